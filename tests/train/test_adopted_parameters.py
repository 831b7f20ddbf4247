"""Parameters that an optimizer holds besides the model: adopted if their module was wrapped, else an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from hpctrain import checkpoint
from hpctrain.errors import UsageError
from hpctrain.train.options import adoptable, check_owned, joined


class CenterLoss(nn.Module):
    """Criterion with parameters."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.ones(classes, 2))
        self.scale = nn.Linear(2, 1)


def optimizer_of(*things: Any) -> torch.optim.Optimizer:
    held = [[thing] if isinstance(thing, nn.Parameter) else list(thing.parameters()) for thing in things]
    return torch.optim.SGD(sum(held, []), lr=0.1)


def test_all_foreign_parameters_are_named_in_one_error() -> None:
    model, loss, loose = nn.Linear(2, 2), CenterLoss(), nn.Parameter(torch.zeros(4))
    optimizers = {"a": optimizer_of(model, loss), "b": optimizer_of(loose)}
    with pytest.raises(UsageError) as caught:
        check_owned(optimizers, {"": model})
    assert caught.value.everywhere
    assert str(caught.value) == (
        '4 parameters of the optimizer belong to no model of the run: optimizer "a", parameter 2 of group 0, '
        'CenterLoss.centers, shape (3, 2); optimizer "a", parameter 3 of group 0, Linear.weight, shape (1, 2); '
        'optimizer "a", parameter 4 of group 0, Linear.bias, shape (1,); optimizer "b", parameter 0 of group 0, '
        "in no module, shape (4,); a checkpoint stores parameters by their names in a model; wrap the module that has "
        "them (job.wrap(criterion); a loose parameter goes into a module first) and pass it: "
        'job.run({"model": ..., "criterion": criterion}, ...)'
    )
    many = {"": torch.optim.SGD([nn.Parameter(torch.zeros(1)) for _ in range(20)], lr=0.1)}
    with pytest.raises(UsageError, match="^20 parameters of the optimizer .*; and 12 more; "):
        check_owned(many, {"": model})


def test_parameters_of_the_models_are_accepted() -> None:
    model, loss = nn.Linear(2, 2), CenterLoss()
    check_owned({"": optimizer_of(model)}, {"": model})
    check_owned({"": optimizer_of(model, loss)}, {"model": model, "criterion": loss})


def test_wrapped_modules_are_adopted_if_an_optimizer_holds_them() -> None:
    model, first, second, unused = nn.Linear(2, 2), CenterLoss(), CenterLoss(), CenterLoss()
    optimizers = {"": optimizer_of(model, first, second)}
    wrapped = [model, first, first.scale, unused, second]
    found = adoptable(optimizers, {"": model}, wrapped)
    assert found == {"center_loss": first, "center_loss_1": second}, "neither parts nor what is not trained"
    everything = joined({"": model}, found)
    assert everything == {"model": model, "center_loss": first, "center_loss_1": second}
    check_owned(optimizers, everything)
    assert adoptable(optimizers, everything, wrapped) == {}
    assert joined({"": model}, {}) == {"": model} and joined({"a": model}, {"b": first}) == {"a": model, "b": first}


@pytest.mark.ranks(1, 2)
def test_a_criterion_is_stored_with_the_model(job: Any, shared_tmp_path: Path) -> None:
    model, loss = job.wrap(nn.Linear(2, 2)), job.wrap(CenterLoss())
    optimizers = {"": torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1, momentum=0.9)}
    for parameter in (*model.parameters(), *loss.parameters()):
        parameter.grad = torch.ones_like(parameter)
    job.average_gradients(model)
    job.average_gradients(loss)
    optimizers[""].step()
    wrapped = [strategy.model for strategy in job.strategies.values()]
    models = joined({"": model}, adoptable(optimizers, {"": model}, wrapped))
    checkpoint.save(shared_tmp_path / "c.h5", model=models, optimizer=optimizers, comm=job.comm)
    with h5py.File(shared_tmp_path / "c.h5") as file:
        np.testing.assert_array_equal(file["model/center_loss/centers"][()], loss.centers.detach().numpy())
        assert "momentum_buffer" in file["optimizer/center_loss/scale.bias"]
    job.comm.barrier()

"""Checkpoints of strategies: each is read by every strategy on every number of ranks, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from support.crossings import CASES, SIZES, Case, Stored, bits, case, learn, make_odd, make_optimizer, stored_in, teams
from torch import nn

from hpctrain import checkpoint
from hpctrain.checkpoint.saver import Saver
from hpctrain.checkpoint.storage import Storage
from hpctrain.errors import CheckpointError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.wrap import attach

STEPS = 2
SPLIT = ("zero2", "fsdp", "fsdp_alone", "hybrid_alone")


def save(one: Case, path: Path, **options: Any) -> None:
    """Write a case's model and optimizer."""
    state = {"model": one.model, "optimizer": one.optimizer, "train": {"step": STEPS}}
    checkpoint.save(path, comm=one.comm, split=one.strategy.split, **state, **options)


def load(one: Case, path: Path, **options: Any) -> Any:
    """Load a case's model and optimizer."""
    state = {"model": one.model, "optimizer": one.optimizer}
    loaded = checkpoint.load(path, comm=one.comm, split=one.strategy.split, **state, **options)
    one.strategy.refresh()
    return loaded


def held(one: Case) -> list[Any]:
    """Return the bits of all state that a rank holds."""
    states = [value for state in one.optimizer.state.values() for value in state.values()]
    return [bits(tensor) for tensor in (*one.model.state_dict().values(), *states)]


@pytest.fixture(scope="module")
def files(comm: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of checkpoints: one per strategy and number of ranks, each trained by that strategy itself."""
    folder = Path(comm.broadcast_object(str(tmp_path_factory.mktemp("files"))))
    with teams(comm) as mine:
        for team, names in mine:
            for name in names:
                seed = CASES.index((name, team.size))  # so that no two files hold the same values
                with case(name, team, seed=seed) as one:
                    learn(one, range(STEPS))
                    save(one, folder / f"{name}_{team.size}.h5")
        comm.barrier()
    return folder


@pytest.fixture(scope="module")
def stored(comm: Any, files: Path) -> dict[Path, Stored]:
    """Return the contents of the files as h5py reads them; every rank reads some of the files."""
    paths = sorted(files.iterdir())
    assert {path.stem for path in paths} == {f"{name}_{size}" for name, size in CASES if size in SIZES[comm.size]}
    found: dict[Path, Stored] = {}
    for part in comm.all_gather_object({path: stored_in(path) for path in paths[comm.rank :: comm.size]}):
        found |= part
    return found


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.slow
@pytest.mark.limit(300)
def test_every_strategy_reads_the_checkpoint_of_every_other(comm: Any, stored: dict[Path, Stored]) -> None:
    """Four ranks skip the pairs of team sizes that two and three ranks have already tested."""
    wrong = []
    with teams(comm) as mine:
        for team, names in mine:
            left = {path: each for path, each in stored.items() if _is_new(comm.size, team.size, int(path.stem[-1]))}
            for name in names:
                with case(name, team, seed=len(CASES)) as one:
                    wrong += [f"{name}_{team.size} of {text}" for text in _misread(one, left)]
        comm.barrier()
    assert not wrong


def _is_new(world: int, reader: int, writer: int) -> bool:
    """Return whether no smaller world has teams of both sizes."""
    return not any({reader, writer} <= set(sizes) for smaller, sizes in SIZES.items() if smaller < world)


def _misread(one: Case, stored: dict[Path, Stored]) -> list[str]:
    """Load the files into one model, one after the other, and return the values that differ."""
    wrong = []
    for number, (path, expected) in enumerate(sorted(stored.items())):
        one.spoil(forget=number % 2 == 0)
        assert load(one, path).step == STEPS
        wrong += [f"{path.stem}: {name}" for name in one.differences(expected)]
        if number % 4 == 0:
            for name, each in one.whole().items():
                seen = expected[name].to(each.dtype) if one.rounds else expected[name]
                wrong += [] if bits(each) == bits(seen) else [f"{path.stem}: whole {name}"]
    return wrong


@pytest.mark.ranks(2, 3)
def test_a_single_process_reads_them(comm: Any, stored: dict[Path, Stored]) -> None:
    for path in sorted(stored)[comm.rank :: comm.size]:
        model = make_odd(seed=len(CASES))
        optimizer = make_optimizer(model)
        loaded = checkpoint.load(path, model=model, optimizer=optimizer)
        assert loaded.world_size == int(path.stem[-1])
        for name, tensor in model.state_dict().items():
            assert bits(tensor) == bits(stored[path][f"model/{name}"]), (path.stem, name)
        states = 0
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                states += 1
                assert bits(value) == bits(stored[path][f"optimizer/{name}/{key}"]), (path.stem, name, key)
                assert key != "step" or value == STEPS
        assert states == len([name for name in stored[path] if name.startswith("optimizer")]) > 10


@pytest.mark.ranks(2, 3)
def test_param_groups_list_their_parameters_by_name(stored: dict[Path, Stored]) -> None:
    model = make_odd()
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    wanted = [{name for name, each in trained if each.dim() > 1}, {name for name, each in trained if each.dim() < 2}]
    assert all(wanted)
    for path in stored:
        with h5py.File(path, "r") as file:
            attributes = file["optimizer"].attrs
            assert attributes["kind"] == b"AdamW"
            groups = json.loads(attributes["param_groups.json"])
        assert [set(group["params"]) for group in groups] == wanted, path.stem
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


@pytest.mark.ranks(2, 3, 4)
def test_equal_training_writes_equal_tensors(comm: Any, shared_tmp_path: Path) -> None:
    if comm.nodes > 1:
        pytest.skip("sums over several nodes are taken in another order")
    for name in ("ddp", "zero1", "zero2", "fsdp"):
        with case(name, comm) as one:
            learn(one, range(4), clip=float("inf"))  # a norm over shards differs in its last digits
            save(one, shared_tmp_path / f"{name}.h5")
    first, *others = (stored_in(shared_tmp_path / f"{name}.h5") for name in ("ddp", "zero1", "zero2", "fsdp"))
    for other in others:
        assert other.keys() == first.keys() and all(bits(other[name]) == bits(first[name]) for name in first)


@pytest.mark.few(2)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", SPLIT)
def test_a_file_with_other_shapes_changes_no_state(comm: Any, shared_tmp_path: Path, name: str) -> None:
    path = shared_tmp_path / "c.h5"
    with case("fsdp", comm, outputs=4) as one:
        learn(one, range(1))
        save(one, path)
    with case(name, comm) as one:
        learn(one, range(1))
        before = held(one)
        said = "does not fit this program, 1 difference.*\n *blocks.1.narrow.weight +shape +bfloat16 4x5 +bfloat16 3x5"
        with pytest.raises(CheckpointError, match=f"(?s){said}") as found:
            load(one, path)
        assert found.value.everywhere and held(one) == before

        own = bits(one.model.blocks[1].narrow.weight)  # type: ignore[union-attr]
        load(one, path, skip=["*.narrow.*"])
        assert bits(one.model.blocks[1].narrow.weight) == own  # type: ignore[union-attr]
        assert all("narrow" in text for text in one.differences(stored_in(path)))


@pytest.mark.few(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["fsdp", "fsdp_alone"])
def test_shards_are_written_in_the_background_during_training(comm: Any, shared_tmp_path: Path, name: str) -> None:
    with case(name, comm) as one:
        learn(one, range(STEPS))
        save(one, shared_tmp_path / "now.h5")
        with Saver(one.comm, background=True) as saver:
            state = {"model": one.model, "optimizer": one.optimizer, "train": {"step": STEPS}}
            saver.save(shared_tmp_path / "later.h5", split=one.strategy.split, **state)
            assert saver.pending
            learn(one, range(STEPS, STEPS + 2))
        after = one.whole()
    now, later = (stored_in(shared_tmp_path / f"{each}.h5") for each in ("now", "later"))
    assert now.keys() == later.keys() and all(bits(now[name]) == bits(later[name]) for name in now)
    assert bits(after["model/token.weight"]) != bits(later["model/token.weight"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["fsdp", "hybrid_alone"])
def test_shards_written_by_mpiio_equal_those_written_by_posix(comm: Any, shared_tmp_path: Path, name: str) -> None:
    with case(name, comm) as one:
        learn(one, range(STEPS))
        save(one, shared_tmp_path / "posix.h5")
        save(one, shared_tmp_path / "mpiio.h5", how=Storage(io="mpiio"))
    one, two = (stored_in(shared_tmp_path / f"{each}.h5") for each in ("posix", "mpiio"))
    assert one.keys() == two.keys() and all(bits(one[name]) == bits(two[name]) for name in one)


class Nothing(nn.Module):
    """Module with a parameter and a buffer without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.nothing = nn.Parameter(torch.empty(4, 0))
        self.register_buffer("empty", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, 3]`` to ``[batch, 2]``."""
        return self.linear(x) + self.nothing.sum()  # type: ignore[no-any-return]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("writer, reader", [("ddp", "fsdp"), ("fsdp", "ddp"), ("zero1", "zero2")])
def test_a_parameter_without_elements_round_trips(comm: Any, shared_tmp_path: Path, writer: Any, reader: Any) -> None:
    for data, does in ((writer, checkpoint.save), (reader, checkpoint.load)):
        model = Nothing()
        strategy = attach(model, comm, ParallelSettings(data=data))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        does(shared_tmp_path / "c.h5", model=model, optimizer=optimizer, comm=comm, split=strategy.split)
        strategy.detach()
        comm.barrier()
    with h5py.File(shared_tmp_path / "c.h5") as file:
        assert file["model/nothing"].shape == (4, 0) and file["model/empty"].shape == (0,)

"""Models of torch.compile under every strategy: numbers of a plain loop in one process, few graphs, plain names."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.machine import quiet_watchdog
from support.nodes import on_nodes, one_per_node
from support.training_fixtures import give_back_process
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hpctrain
from hpctrain.cluster.launcher import detect
from hpctrain.parallel.compiled import skipped
from hpctrain.train.job import Job

pytestmark = pytest.mark.ranks(2)
ON_DEMAND = "on demand"  # fsdp whose ranks share no memory, so that units are gathered one by one
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", ON_DEMAND)
WIDTH, BLOCKS, SAMPLES = 6, 10, 4  # more blocks than torch's limit of recompilations, which is 8
OPTIONS: Any = {"backend": "aot_eager"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, WIDTH]`` to the same shape."""
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, WIDTH]`` to ``[batch, 3]``."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def compiler_records() -> Any:
    return importlib.import_module("torch._dynamo.utils")  # loaded by the first test that needs it


def make_net() -> Net:
    torch.manual_seed(3)
    return Net().double()


@contextmanager
def job_of(comm: Any, strategy: str) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Yield a job and the settings of a strategy; nothing is compiled yet."""
    torch.compiler.reset()
    compiler_records().counters.clear()
    own = on_nodes(comm, one_per_node) if strategy == ON_DEMAND else comm.split(0)
    with give_back_process():
        torch.set_num_threads(1)
        with Job(own, torch.device("cpu"), detect(), quiet_watchdog()) as job:
            yield job, {"data": "fsdp", "units": ["Block"]} if strategy in ("fsdp", ON_DEMAND) else {"data": strategy}
    own.free()


def batches(steps: int = 3) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    for _ in range(steps):
        x, y = (torch.randn(SAMPLES, size, dtype=torch.float64, generator=generator) for size in (WIDTH, 3))
        yield x, y


def train(model: nn.Module, call: Callable[[Tensor], Tensor], job: Job | None = None, **extra: Any) -> list[int]:
    """Train on whole batches, or on this rank's share; return the number of graphs after each step."""
    optimizer, graphs = torch.optim.AdamW(model.parameters(), lr=0.01), []
    loss_of = extra.get("loss", F.mse_loss)
    for x, y in batches():
        if job is not None:
            x, y = (each[job.rank * 2 : job.rank * 2 + 2] for each in (x, y))
        if extra.get("accumulates"):
            with nullcontext() if job is None else job.no_sync(model):
                loss_of(call(x), y).backward()
        loss_of(call(x), y).backward()
        if extra.get("clips"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        graphs.append(compiler_records().counters["stats"]["unique_graphs"])
    return graphs


def compile_blocks(model: Net) -> None:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, **OPTIONS)  # type: ignore[assignment]


def wrap_compiled(job: Job, settings: Any, form: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Return a wrapped model, and what the program calls."""
    model = make_net()
    if form == "before":
        called: Any = torch.compile(model, **OPTIONS)
        assert job.wrap(called, settings) is called
        return called, called
    if form == "blocks before":
        compile_blocks(model)
    job.wrap(model, settings)
    if form == "after":
        return model, torch.compile(model, **OPTIONS)
    if form == "in place":
        model.compile(**OPTIONS)
    elif form == "blocks after":
        compile_blocks(model)
    elif form == "function":
        return model, torch.compile(lambda x: model(x) * 1.0, **OPTIONS)
    return model, model


def expect(job: Job, model: nn.Module, plain: nn.Module, tolerance: float = 1e-12) -> None:
    found, wanted = job.state_dict(model), plain.state_dict()
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, msg=lambda text: f"{name}: {text}")


@pytest.mark.few(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("form", ["before", "after", "in place", "blocks before", "blocks after", "function"])
def test_compiled_models_have_one_graph_and_the_numbers_of_one_process(comm: Any, strategy: str, form: str) -> None:
    plain = make_net()
    train(plain, plain)
    with job_of(comm, strategy) as (job, settings):
        model, called = wrap_compiled(job, settings, form)
        graphs = train(model, called, job)
        assert graphs[0] == graphs[-1] and 1 <= graphs[0] <= 2  # as many for 10 blocks as for one
        expect(job, model, plain)


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", ON_DEMAND])
@pytest.mark.parametrize("extra", ["accumulates", "clips", "recompute", "loss"])
def test_compiled_models_train_with_accumulation_clipping_and_recomputation(
    comm: Any, strategy: str, extra: str
) -> None:
    plain = make_net()
    with job_of(comm, strategy) as (job, settings):
        more: dict[str, Any] = {extra: torch.compile(F.mse_loss, **OPTIONS) if extra == "loss" else True}
        train(plain, plain, **{**more, "loss": F.mse_loss})
        recomputes = {"recompute": True, "units": ["Block"]} if extra == "recompute" else {}
        model, called = wrap_compiled(job, {**settings, **recomputes}, "after")
        graphs = train(model, called, job, **more)
        assert graphs[0] == graphs[-1] <= 2
        expect(job, model, plain)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["zero1", "ddp", ON_DEMAND])
def test_a_compiled_step_leaves_hooks_and_updates_outside(comm: Any, strategy: str) -> None:
    """Autograd and the optimizer call hooks while the compiler is active."""

    def step_of(model: nn.Module) -> Callable[[Tensor, Tensor], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, y: Tensor) -> None:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    plain = make_net()
    alone = step_of(plain)
    for x, y in batches():
        alone(x, y)
    with job_of(comm, strategy) as (job, settings):
        model = job.wrap(make_net(), settings)
        step = torch.compile(step_of(model), **OPTIONS)
        for x, y in batches():
            step(*(each[job.rank * 2 : job.rank * 2 + 2] for each in (x, y)))
        expect(job, model, plain)
    own = str(Path(hpctrain.__file__).parent)
    compiled = {str(one.co_filename) for one in compiler_records().get_compilation_metrics()}
    assert not any(name.startswith(own) and name.startswith(tuple(skipped())) for name in compiled)


def test_a_graph_from_before_wrap_is_not_used_after_it(comm: Any) -> None:
    """A graph does not notice new hooks of a module inside it."""
    plain = make_net()
    train(plain, plain)
    with job_of(comm, ON_DEMAND) as (job, settings):
        model = make_net()
        called: Any = torch.compile(model, **OPTIONS)
        called(torch.zeros(2, WIDTH, dtype=torch.float64))
        job.wrap(called, settings)
        train(model, called, job)
        expect(job, model, plain)


def test_a_whole_graph_of_units_that_are_gathered_names_what_to_compile(comm: Any) -> None:
    with job_of(comm, ON_DEMAND) as (job, settings):
        model = job.wrap(make_net(), settings)
        call = torch.compile(model, fullgraph=True, **OPTIONS)
        with pytest.raises(Exception, match="hpctrain gathers .* leave out fullgraph=True, or .* block.compile()"):
            call(torch.zeros(2, WIDTH, dtype=torch.float64))


def test_compiled_batch_norms_are_synchronised(comm: Any) -> None:
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(WIDTH, 9, bias=False), nn.BatchNorm1d(9), nn.Linear(9, 3)).double()
    model = copy.deepcopy(plain)
    train(plain, plain)
    with job_of(comm, "ddp") as (job, settings):
        model[1].compile(**OPTIONS)
        train(job.wrap(model, settings), model, job)
        expect(job, model, plain)


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["zero1", "ddp", ON_DEMAND])
def test_checkpoints_of_compiled_blocks_have_plain_names_and_resume_plain_models(
    comm: Any, strategy: str, shared_tmp_path: Path
) -> None:
    def leg(job: Job, model: nn.Module, steps: int) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        shares = [tuple(each[job.rank * 2 : job.rank * 2 + 2] for each in pair) for pair in batches(2)]
        with job.run(model, optimizer, shares, checkpoints=str(shared_tmp_path), steps=steps) as run:
            for _, (x, y) in run:
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()

    plain = make_net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for x, y in batches(2):
        F.mse_loss(plain(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    with job_of(comm, strategy) as (job, settings):
        leg(job, wrap_compiled(job, settings, "blocks after")[0], 1)
        model = job.wrap(make_net(), settings)
        leg(job, model, 2)
        expect(job, model, plain)
    file = shared_tmp_path / "checkpoints" / "step_00000002.h5"
    fresh = make_net()
    compile_blocks(fresh)
    compiled: Any = torch.compile(fresh, **OPTIONS)
    hpctrain.checkpoint.load(file, model=compiled)
    found = {name.replace("_orig_mod.", ""): value for name, value in fresh.state_dict().items()}
    assert all(torch.allclose(found[name], value, rtol=0, atol=1e-12) for name, value in plain.state_dict().items())


# Averages of weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_average_that_is_wrapped_too_is_that_of_one_process(comm: Any, strategy: str) -> None:
    def averaged(model: nn.Module) -> AveragedModel:
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))

    def steps(model: nn.Module, average: AveragedModel, job: Job | None = None) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for x, y in batches():
            if job is not None:
                x, y = (each[job.rank * 2 : job.rank * 2 + 2] for each in (x, y))
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)

    plain = make_net()
    wanted = averaged(plain)
    steps(plain, wanted)
    with job_of(comm, strategy) as (job, settings):
        model = make_net()
        average = averaged(model)
        job.wrap(model, settings)
        job.wrap(average, settings)
        steps(model, average, job)
        expect(job, average, wanted)
        x = next(batches())[0]
        with torch.no_grad():
            torch.testing.assert_close(average(x), wanted(x), rtol=0, atol=1e-12)

"""A run continues without ranks that have died (``on_failure = "shrink"``), under MPI with fault tolerance."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.tolerance import TOLERANT, needs_tolerance

from hpctrain.errors import LaunchError, SettingsError, UsageError
from hpctrain.parallel.config import ParallelSettings
from hpctrain.parallel.offload.config import OffloadSettings
from hpctrain.train.config import CheckpointSettings, Settings
from hpctrain.train.failure_policy import check_launch, check_options, check_settings
from hpctrain.train.options import RunOptions
from hpctrain.train.recovery.sections import Progressed, agreed_section

STEPS = 24
PROGRAM = """
import os, signal, sys
import torch
from torch.nn.functional import cross_entropy
import hpctrain

kind, folder = sys.argv[1:3]
deaths = [death.split(":") for death in sys.argv[3:]]  # rank:step:place
job = hpctrain.init(parallel={"data": "ddp", "reproducible": kind == "reproducible"})
number = job.rank


def die(step, place):
    if [str(number), str(step), place] in deaths:
        os.kill(os.getpid(), signal.SIGKILL)


class Data(torch.utils.data.TensorDataset):
    starts = 0

    def set_epoch(self, epoch):  # called whenever the loader is started
        self.starts += 1
        die(self.starts, "start")


torch.manual_seed(0)
layers = [torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.GELU(), torch.nn.Linear(64, 4)]
if kind == "dropout":
    layers[1] = torch.nn.Dropout(0.3)
model = job.wrap(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
draw = torch.Generator().manual_seed(1)
data = Data(torch.randn(96, 16, generator=draw), torch.randint(0, 4, (96,), generator=draw))
loader = torch.utils.data.DataLoader(data, batch_size=12, shuffle=True)
with job.run(model, optimizer, loader, checkpoints=folder, every=5, on_failure="shrink") as run:
    for epoch in run.epochs(3):
        for step, (inputs, targets) in run:
            die(step, "begin")
            if kind == "reproducible":
                loss = run.backward((inputs, targets), lambda part: cross_entropy(model(part[0]), part[1]))
            else:
                loss = cross_entropy(model(inputs), targets)
                die(step, "backward")
                loss.backward()
            die(step, "optimizer")
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            die(step, "end")
        scheduler.step()
        die(step, "epoch")
print("rank", number, "is now", job.rank, "of", job.size, flush=True)
"""


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run(launch: Any, folder: Path, kind: str, *deaths: str, ranks: int = 3) -> tuple[Any, list[dict[str, Any]]]:
    result = launch(ranks, PROGRAM, kind, folder, *deaths, options=TOLERANT, timeout=100)
    assert result.returncode == 0 and not result.survivors, result
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), result
    assert result.stdout.count("is now") == ranks - len(deaths), result
    return result, rows


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[dict[str, Any]]]:
    return {}


def expected(known: dict[str, list[dict[str, Any]]], launch: Any, folder: Path, kind: str) -> list[dict[str, Any]]:
    if kind not in known:
        known[kind] = run(launch, folder / "undisturbed", kind)[1]
    return known[kind]


@needs_tolerance
@pytest.mark.limit(240)
@pytest.mark.parametrize(
    "deaths",
    [
        ("0:5:optimizer",),  # rank 0, which keeps the records, in a step with a checkpoint
        pytest.param(("2:8:end",), marks=pytest.mark.long),  # the last step of an epoch
        pytest.param(("0:1:backward", "1:6:end"), marks=pytest.mark.long),  # one after the other, down to one rank
        pytest.param(("1:10:backward", "2:10:backward"), marks=pytest.mark.long),  # together
        pytest.param(("0:16:epoch",), marks=pytest.mark.long),
        ("1:5:backward", "2:2:start"),  # the second when step 5 is about to be repeated
    ],
)
def test_the_other_ranks_continue_with_the_same_batches(
    launch: Any, tmp_path: Path, undisturbed: dict[str, list[dict[str, Any]]], deaths: tuple[str, ...]
) -> None:
    wanted = expected(undisturbed, launch, tmp_path, "plain")
    _, rows = run(launch, tmp_path / "run", "plain", *deaths)
    complete = [number for number, row in enumerate(rows) if "lost_ranks" not in row]
    assert len(rows) - len(complete) == sum(death.split(":")[2] in ("optimizer", "end") for death in deaths)
    losses = ([each[number]["loss"] for number in complete] for each in (rows, wanted))
    assert next(losses) == pytest.approx(next(losses), rel=1e-4)
    receipt = json.loads((tmp_path / "run" / "run.json").read_text())
    (attempt,) = receipt["attempts"]
    assert receipt["status"] == "finished" and attempt["steps"] == STEPS
    ranks = sorted(rank for recovery in attempt["recoveries"] for rank in recovery["ranks"])
    assert ranks == sorted(int(death[0]) for death in deaths)
    assert all(0 < recovery["seconds"] < 30 for recovery in attempt["recoveries"])
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {
        "step_00000020.h5",
        "step_00000024.h5",
    }


@needs_tolerance
@pytest.mark.limit(240)
@pytest.mark.parametrize("deaths", [("1:3:begin", "2:15:end")])
def test_reproducible_weights_have_the_bits_of_an_undisturbed_run(
    launch: Any, tmp_path: Path, undisturbed: dict[str, list[dict[str, Any]]], deaths: tuple[str, ...]
) -> None:
    wanted = expected(undisturbed, launch, tmp_path, "reproducible")
    _, rows = run(launch, tmp_path / "run", "reproducible", *deaths)
    assert [row["loss"] for row in rows] == [row["loss"] for row in wanted]
    assert rows[-1]["fingerprint"] == wanted[-1]["fingerprint"]


# Rank 0 has begun the first checkpoint when a rank dies, and rank 1 has not.
FIRST_SAVE = """
from hpctrain.errors import RankFailedError
from hpctrain.train.checkpointing import RunCheckpoints

take, save, first = RunCheckpoints.take_fingerprint, RunCheckpoints.save_due, [True]


def take_fingerprint(self):
    result = take(self)
    if number == 1 and first:
        first.clear()
        while not job.guard.detector.dead():
            pass
        raise RankFailedError("another rank has died")
    return result


def save_due(self):
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return save(self)


RunCheckpoints.take_fingerprint, RunCheckpoints.save_due = take_fingerprint, save_due
"""


@needs_tolerance
@pytest.mark.limit(240)
def test_ranks_that_are_in_different_calls_of_the_first_checkpoint_write_it_together(
    launch: Any, tmp_path: Path
) -> None:
    program = PROGRAM.replace("torch.manual_seed(0)\n", f"{FIRST_SAVE}\ntorch.manual_seed(0)\n")
    result = launch(3, program, "plain", tmp_path / "run", options=TOLERANT, timeout=100)
    assert result.returncode == 0 and result.stdout.count("is now") == 2, result
    assert [row["step"] for row in rows_of(tmp_path / "run")] == list(range(1, STEPS + 1))


# Rank 0 has not got the result of a collective of which another rank, that is alive, has it.
LATE = """
import hpctrain.parallel.reproducible.ddp as strategy

norm, calls = strategy.exact_norm, 0


def norm_without_a_dead_rank(pieces, comm, device):
    global calls
    calls += 1
    result = norm(pieces, comm, device)
    if calls == 7 and number == 0:
        while not job.guard.detector.dead():
            pass
        comm.failed = True
    return result


strategy.exact_norm = norm_without_a_dead_rank
"""


@needs_tolerance
@pytest.mark.limit(240)
def test_a_rank_that_learns_of_a_death_while_it_inspects_gradients_makes_no_update(
    launch: Any, tmp_path: Path, undisturbed: dict[str, list[dict[str, Any]]]
) -> None:
    wanted = expected(undisturbed, launch, tmp_path, "reproducible")
    program = PROGRAM.replace("torch.manual_seed(0)\n", f"{LATE}\ntorch.manual_seed(0)\n")
    result = launch(3, program, "reproducible", tmp_path / "run", "1:7:end", options=TOLERANT, timeout=100)
    assert result.returncode == 0 and "which repeat the step" in result.stderr, result
    assert rows_of(tmp_path / "run")[-1]["fingerprint"] == wanted[-1]["fingerprint"]


@needs_tolerance
@pytest.mark.limit(120)
def test_the_log_and_the_receipt_name_what_died(launch: Any, tmp_path: Path) -> None:
    result, _ = run(launch, tmp_path / "run", "dropout", "2:5:begin")
    assert re.search(
        r"warning: rank 2 on \S+ has died in step 5: 2 ranks continue after .* repeat the step", result.stderr
    )
    shown = launch(0, "-m", "hpctrain", "receipt", tmp_path / "run")
    died = r"died: rank 2 on \S+ in step 5, continued with 2 ranks, 1 step repeated, [0-9.]+ s lost"
    assert re.search(died, shown.stdout), shown


ACCUMULATES = """
import os, signal, sys
from contextlib import nullcontext
import torch
from torch.nn.functional import cross_entropy
import hpctrain

job = hpctrain.init()
number = job.rank
torch.manual_seed(0)
model = job.wrap(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
draw = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(96, 8, generator=draw), torch.randint(0, 4, (96,), generator=draw))
loader = torch.utils.data.DataLoader(data, batch_size=12, shuffle=True)
means = []
with job.run(model, optimizer, loader, checkpoints=sys.argv[1], on_failure="shrink", steps=10, every=3) as run:
    for step, (inputs, targets) in run:
        last = run.batch % 2 == 1
        if sys.argv[2] == f"{number}:{step}:{int(last)}":
            os.kill(os.getpid(), signal.SIGKILL)
        with nullcontext() if last else job.no_sync(model):
            loss = cross_entropy(model(inputs), targets)
            (loss / 2).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        run.log(loss=loss)
with torch.no_grad():
    mean = job.evaluate(loader, lambda part: cross_entropy(model(part[0]), part[1]))
print("weights", model.weight.flatten().tolist(), mean, flush=True)
"""


@needs_tolerance
@pytest.mark.limit(240)
def test_a_step_of_several_batches_is_repeated_from_its_first(launch: Any, tmp_path: Path) -> None:
    """Gradients that a dead rank had accumulated are computed again; so are measurements afterwards."""
    results = {}
    for name, death in (("plain", "none"), ("first", "2:5:0"), ("second", "0:6:1")):
        result = launch(3, ACCUMULATES, tmp_path / name, death, options=TOLERANT)
        assert result.returncode == 0 and len(rows_of(tmp_path / name)) == 10, result
        numbers = re.findall(r"-?[0-9.]+(?:e-?[0-9]+)?", result.stdout.split("weights", 1)[1].splitlines()[0])
        results[name] = [float(number) for number in numbers]
        assert ("such as enumerate(run)" in result.stderr) == (death != "none"), result
    for name in ("first", "second"):
        assert results[name] == pytest.approx(results["plain"], rel=1e-4, abs=1e-6)
        losses = ([row["loss"] for row in rows_of(tmp_path / one)] for one in (name, "plain"))
        assert next(losses) == pytest.approx(next(losses), rel=1e-4)


CONFIG = """
[run]
folder = "runs/a"
on_failure = "shrink"
[data]
files = ["corpus.h5"]
[model]
name = "gpt-tiny"
layers = 1
width = 32
context = 16
dropout = 0.1
[parallel]
reproducible = true
[train]
steps = 8
batch = 6
evaluate_every = 4
[checkpoint]
every = 2
"""


@needs_tolerance
@pytest.mark.limit(240)
def test_hpctrain_train_survives_a_kill_within_a_save_and_an_evaluation(launch: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{number}\n" for number in range(3000)))
    (tmp_path / "a.toml").write_text(CONFIG)
    launch(0, "-m", "hpctrain", "data", "pack", "text.txt", "-o", "corpus.h5", cwd=tmp_path)
    train = ("-m", "hpctrain", "train", "a.toml")
    plain = launch(3, *train, "--set", "run.folder=plain", options=TOLERANT, cwd=tmp_path)
    assert plain.returncode == 0, plain
    faults = "kill rank=0 step=4 at=save; kill rank=1 step=6 at=forward"
    result = launch(3, *train, "--fault", faults, options=TOLERANT, cwd=tmp_path)
    assert result.returncode == 0 and result.stderr.count("continue") == 2, result
    wanted, found = rows_of(tmp_path / "plain"), rows_of(tmp_path / "runs" / "a")
    for name in ("step", "loss", "validation_loss", "fingerprint"):
        assert [row.get(name) for row in found] == [row.get(name) for row in wanted], name
    files = {path.name for path in (tmp_path / "runs" / "a" / "checkpoints").iterdir()}
    assert files == {"step_00000006.h5", "step_00000008.h5"}


STOPS = """
import os, signal, sys
import torch
import hpctrain

job = hpctrain.init()
number = job.rank
model = job.wrap(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=8)
with job.run(model, optimizer, loader, checkpoints="run", on_failure="shrink") as run:
    for step, batch in run:
        if step == 3 and (number == 1 or number == 2 and sys.argv[1] == "last"):
            if sys.argv[1] == "error":
                raise ValueError("bad sample")
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 5 and sys.argv[1] == "last":
            raise ValueError("bad sample")
        if sys.argv[1] == "comm":
            job.comm.all_gather_object(step)
        if sys.argv[1] == "evaluate":
            run.evaluate(loader, lambda part: model(part).mean())
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
if sys.argv[1] == "raise":
    raise SystemExit(5)
sys.exit(5 if sys.argv[1] == "code" else 0)
"""


@needs_tolerance
@pytest.mark.limit(120)
@pytest.mark.parametrize(
    "why",
    ["error", pytest.param("last", marks=pytest.mark.long), "comm", pytest.param("evaluate", marks=pytest.mark.long)],
)
def test_errors_and_own_collectives_end_the_job(launch: Any, why: str) -> None:
    result = launch(3, STOPS, why, options=TOLERANT)
    assert result.returncode == 1 and not result.survivors, result
    reason = "ValueError: bad sample" if why in ("error", "last") else r"rank 1 on \S+ has died"
    assert len(re.findall(rf"ends the job: {reason}", result.stderr)) == 1, result


ERRORS = """
import sys
import torch
import hpctrain
from hpctrain.train.exit import end_job

rank, place, on_failure = int(sys.argv[1]), sys.argv[2], sys.argv[3]
job = hpctrain.init()
model = job.wrap(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=8)
if place == "between" and job.rank == rank:
    end_job(7)
with job.run(model, optimizer, loader, checkpoints="run", on_failure=on_failure) as run:
    for step, batch in run:
        if place == "step" and step == 3 and job.rank == rank:
            raise ValueError("bad sample")
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@needs_tolerance
@pytest.mark.limit(60)
@pytest.mark.parametrize(
    ("rank", "place", "on_failure"),
    [
        (2, "step", "shrink"),
        pytest.param(0, "step", "shrink", marks=pytest.mark.long),
        (3, "step", "restart"),
        (1, "between", "restart"),
    ],
)
def test_an_error_on_one_of_four_ranks_ends_them_all(launch: Any, rank: int, place: str, on_failure: str) -> None:
    """With fault tolerance, MPI_Abort of Open MPI 5.0 ends its own rank alone, and the others are told nothing."""
    result = launch(4, ERRORS, str(rank), place, on_failure, options=TOLERANT, timeout=50)
    assert result.returncode == 1 and not result.survivors, result
    reason = "ValueError: bad sample" if place == "step" else rf"rank {rank} on \S+ has died"
    assert len(re.findall(rf"ends the job: {reason}", result.stderr)) == 1, result


@needs_tolerance
@pytest.mark.limit(120)
@pytest.mark.parametrize("how", ["code", pytest.param("raise", marks=pytest.mark.long)])
def test_the_exit_code_is_that_of_the_ranks_that_are_left(launch: Any, how: str) -> None:
    result = launch(3, STOPS, how, options=TOLERANT)
    assert result.returncode == 5 and "2 ranks continue" in result.stderr and not result.survivors, result


@needs_tolerance
@pytest.mark.limit(120)
def test_without_fault_tolerance_it_is_refused(launch: Any) -> None:
    result = launch(2, STOPS, "none")
    assert (
        result.returncode == 2 and "started without fault tolerance; start by mpiexec --with-ft ulfm" in result.stderr
    )


ALONE = """
import torch, hpctrain
job = hpctrain.init(parallel={"data": "zero1"})
model = job.wrap(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=8)
with job.run(model, optimizer, loader, checkpoints="run", on_failure="shrink", replicate=10):
    pass
"""


@pytest.mark.limit(60)
def test_one_rank_has_no_partner(launch: Any) -> None:
    result = launch(0, ALONE)
    line = result.stderr.splitlines()[-1]
    assert result.returncode == 2 and "a run with replicate = 10 on one rank: no other rank can hold a copy" in line


# One process ----------------------------------------------------------------------------------------------------------


def test_all_ranks_agree_on_the_last_section_that_must_be_complete() -> None:
    in_step, outside = (lambda section, began: Progressed(section, began)), (lambda section: Progressed(section, None))
    # All in the same step: it is repeated from the section before it.
    assert agreed_section([in_step(8, 7), in_step(8, 7)]) == 7
    # In the step, in its second iteration: both repeat it.
    assert agreed_section([in_step(9, 7), in_step(8, 7)]) == 7
    # One has ended the step and is in a save, or in the next step: the other gets the results up to there.
    assert agreed_section([in_step(8, 7), outside(9)]) == 8
    assert agreed_section([in_step(8, 7), in_step(11, 10)]) == 10
    assert agreed_section([outside(9), outside(9)]) == 8


@pytest.mark.parametrize(
    "parallel, offload, named",
    [
        (ParallelSettings(data="easgd"), OffloadSettings(), 'parallel.data = "easgd"'),
        (ParallelSettings(data="fsdp", shard_within="node"), OffloadSettings(), 'parallel.shard_within = "node"'),
        (ParallelSettings(data="zero1", pipe=2), OffloadSettings(), 'parallel.data = "zero1" and parallel.pipe = 2'),
        (ParallelSettings(pipe=2, schedule="pipedream"), OffloadSettings(), 'parallel.schedule = "pipedream"'),
        (ParallelSettings(), OffloadSettings(optimizer=True), "offload"),
    ],
)
def test_settings_whose_state_dies_with_a_rank_are_refused(
    parallel: ParallelSettings, offload: OffloadSettings, named: str
) -> None:
    with pytest.raises(SettingsError, match=re.escape(f'run.on_failure = "shrink" with {named}: ')) as caught:
        check_settings("shrink", parallel, offload, "auto")
    assert caught.value.exit_code == 2
    check_settings("restart", parallel, offload, "cuda")
    check_settings("shrink", ParallelSettings(reproducible=True), OffloadSettings(), "auto")
    check_settings("shrink", ParallelSettings(data="fsdp"), OffloadSettings(), "auto")
    check_settings("shrink", ParallelSettings(pipe=2, tensor=2), OffloadSettings(), "auto")


def test_copies_on_other_nodes_need_a_run_that_continues() -> None:
    with pytest.raises(SettingsError, match='setting checkpoint.replicate = 10: is for on_failure = "shrink"'):
        Settings(checkpoint=CheckpointSettings(replicate=10))
    with pytest.raises(SettingsError, match='a run with replicate = 10: is for on_failure = "shrink"'):
        RunOptions(replicate=10)
    with pytest.raises(UsageError, match="a run with replicate = -1: must be at least 0"):
        RunOptions(replicate=-1)


def test_gpus_are_refused() -> None:
    with pytest.raises(SettingsError, match="GPUs are not supported yet"):
        check_settings("shrink", ParallelSettings(), OffloadSettings(), "cuda")


@pytest.mark.parametrize(
    "library, environ, told",
    [
        (
            "MPICH Version:      4.3.1\nABI",
            {},
            "MPICH 4.3.1 ends a job .* take Open MPI 5 and start by mpiexec",
        ),
        ("Open MPI v5.0.8, package", {"SLURM_STEP_ID": "0"}, "srun ends a step .* start by mpiexec .* inside the job"),
        ("Open MPI v5.0.8, package", {}, "started without fault tolerance; start by mpiexec --with-ft ulfm"),
    ],
)
def test_launchers_that_end_the_job_are_refused(library: str, environ: dict[str, str], told: str) -> None:
    with pytest.raises(LaunchError, match=told) as caught:
        check_launch(reports=False, library=library, environ=environ)
    assert caught.value.everywhere and caught.value.exit_code == 2 and "\n" not in str(caught.value)
    check_launch(reports=True, library=library, environ=environ)


@pytest.mark.parametrize(
    "changed, told",
    [
        ({"splits": False}, "a loader that every rank reads by itself .list."),
        ({"lacks": "fsdp over nodes"}, "fsdp over nodes: a dead rank takes its part of the state with it"),
        ({"on_gpu": True}, "on GPUs"),
        ({"fingerprint_every": 1}, "fingerprint_every = 1"),
        ({"background": True}, "background = true"),
        ({"on_nonfinite": "rollback"}, "on_nonfinite"),
    ],
)
def test_runs_that_cannot_continue_are_refused(changed: dict[str, Any], told: str) -> None:
    given: dict[str, Any] = {"splits": True, "loader": [], "lacks": "", "on_gpu": False}
    options = RunOptions(on_failure="shrink")
    check_options(options, **given)
    known = {name: value for name, value in changed.items() if name in given}
    others = {name: value for name, value in changed.items() if name not in given}
    with pytest.raises(UsageError, match=f'on_failure = "shrink" .*{told}') as caught:
        check_options(replace(options, **others), **(given | known))
    assert caught.value.everywhere

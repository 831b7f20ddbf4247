"""Runs whose shards are divided over the ranks continue without ranks that have died (``on_failure = "shrink"``)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.tolerance import TOLERANT, needs_tolerance

from hpctrain.train.receipt.read import load
from hpctrain.watch.state import read_state

STEPS = 18
# Deaths are rank:step:place. Two of the places are within a copy of the shards and within a recovery.
PROGRAM = """
import copy, os, signal, sys
import torch
from torch.nn.functional import cross_entropy
import hpctrain
from hpctrain.comm.transport.mpi import MpiTransport
from hpctrain.parallel.fsdp import partner_copies, shard_copies

if "NODES" in os.environ:  # the node of each rank
    node = int(os.environ["NODES"].split(",")[int(os.environ["OMPI_COMM_WORLD_RANK"])])
    MpiTransport.split_node = lambda self: self.split(node, self.rank)
data, kind, folder = sys.argv[1:4]
deaths = [death.split(":") for death in sys.argv[4:]]
job = hpctrain.init(parallel={"data": data, "reproducible": kind == "reproducible"})
number, now = job.rank, 0


def die(place):
    if [str(number), str(now), place] in deaths:
        os.kill(os.getpid(), signal.SIGKILL)


def dies_before(kind, name, place):
    original = getattr(kind, name)

    def method(*args, **kwargs):
        if not name == "mark" or kwargs["complete"]:
            die(place)
        return original(*args, **kwargs)

    setattr(kind, name, method)


dies_before(shard_copies.Copies, "mark", "copy")
dies_before(shard_copies.ShardCopies, "restore", "recovery")
dies_before(partner_copies.PartnerCopies, "take", "replica")
dies_before(partner_copies.PartnerCopies, "go_back", "back")
checksum = partner_copies.checksum
partner_copies.checksum = lambda memory: checksum(memory) + ([str(number), str(now), "damage"] in deaths)
torch.manual_seed(0)
layers = [torch.nn.Linear(16, 50), torch.nn.LayerNorm(50), torch.nn.GELU(), torch.nn.Linear(50, 30)]
model = torch.nn.Sequential(*layers, torch.nn.GELU(), torch.nn.Linear(30, 4))
average = copy.deepcopy(model)
if kind == "frozen":
    model[0].requires_grad_(False)
models = {"model": job.wrap(model)}
if kind == "average":
    models["average"] = job.wrap(average)
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
draw = torch.Generator().manual_seed(1)
inputs, classes = torch.randn(72, 16, generator=draw), torch.randint(0, 4, (72,), generator=draw)
samples = torch.utils.data.TensorDataset(inputs, classes)
loader = torch.utils.data.DataLoader(samples, batch_size=12, shuffle=True)
options = {"every": 5, "on_failure": "shrink", "replicate": int(os.environ.get("REPLICATE", "0"))}
with job.run(models, {"adam": optimizer}, loader, checkpoints=folder, **options) as run:
    for epoch in run.epochs(3):
        for step, (inputs, targets) in run:
            now = step
            die("begin")
            if kind == "reproducible":
                loss = run.backward((inputs, targets), lambda part: cross_entropy(model(part[0]), part[1]))
            else:
                loss = cross_entropy(model(inputs), targets)
                die("backward")
                loss.backward()
            run.clip(0.5, model="model")
            die("optimizer")
            optimizer.step()
            optimizer.zero_grad()
            if kind == "average":
                with torch.no_grad():
                    for mean, parameter in zip(average.parameters(), model.parameters()):
                        mean.lerp_(parameter, 0.1)
            run.log(loss=loss)
            die("end")
        scheduler.step()
        die("epoch")
print("rank", number, "is now", job.rank, "of", job.size, flush=True)
"""


def run(
    launch: Any, folder: Path, data: str, kind: str, *deaths: str, nodes: str = "0,0,0", replicate: int = 0
) -> tuple[Any, list[dict[str, Any]]]:
    ranks = nodes.count(",") + 1
    env = {"NODES": nodes, "REPLICATE": str(replicate)}
    result = launch(ranks, PROGRAM, data, kind, folder, *deaths, options=TOLERANT, timeout=100, env=env)
    assert result.returncode == 0 and not result.survivors, result
    assert not (folder / "failure.json").exists(), "no reason for an end is left by a recovery"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), result
    assert result.stdout.count("is now") == ranks - sum("damage" not in death for death in deaths), result
    return result, rows


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[dict[str, Any]]]:
    return {}


@needs_tolerance
@pytest.mark.limit(240)
@pytest.mark.parametrize(
    "data, deaths",
    [
        pytest.param("zero1", ("0:5:optimizer",), marks=pytest.mark.long),  # rank 0, in a step with a checkpoint
        ("zero1", ("1:7:copy",)),  # within its copy, which is incomplete
        pytest.param("zero2", ("2:6:end",), marks=pytest.mark.long),  # the last step of an epoch
        ("zero2", ("1:9:backward", "2:9:recovery")),  # the second while the shards of the first are restored
        ("fsdp", ("0:1:backward", "1:6:end")),  # in the first step, without states; then down to one rank
        pytest.param("fsdp", ("1:10:backward", "2:10:backward"), marks=pytest.mark.long),  # together
        pytest.param("fsdp", ("0:12:epoch",), marks=pytest.mark.long),
    ],
)
def test_shards_of_dead_ranks_have_the_bits_of_an_undisturbed_run(
    launch: Any, tmp_path: Path, undisturbed: dict[str, list[dict[str, Any]]], data: str, deaths: tuple[str, ...]
) -> None:
    """The reference is ``ddp`` without a death: weights, moments and losses do not depend on strategy and ranks."""
    if not undisturbed:
        undisturbed["ddp"] = run(launch, tmp_path / "undisturbed", "ddp", "reproducible")[1]
    in_body = [death.replace("backward", "begin") for death in deaths]  # run.backward is one call
    _, rows = run(launch, tmp_path / "run", data, "reproducible", *in_body)
    assert [row["loss"] for row in rows] == [row["loss"] for row in undisturbed["ddp"]]
    assert rows[-1]["fingerprint"] == undisturbed["ddp"][-1]["fingerprint"]
    (attempt,) = json.loads((tmp_path / "run" / "run.json").read_text())["attempts"]
    died = sorted(rank for recovery in attempt["recoveries"] for rank in recovery["ranks"])
    assert died == sorted(int(death[0]) for death in deaths)


@needs_tolerance
@pytest.mark.limit(240)
@pytest.mark.parametrize(
    "data, kind, deaths",
    [
        pytest.param("zero1", "plain", ("1:4:backward", "2:8:end"), marks=pytest.mark.long),
        ("zero2", "average", ("0:7:backward",)),
        pytest.param("fsdp", "plain", ("2:10:backward",), marks=pytest.mark.long),
        pytest.param("fsdp", "frozen", ("1:3:optimizer", "0:8:end"), marks=pytest.mark.long),
    ],
)
def test_the_losses_are_those_of_the_same_batches(
    launch: Any, tmp_path: Path, undisturbed: dict[str, list[dict[str, Any]]], data: str, kind: str, deaths: Any
) -> None:
    if kind not in undisturbed:
        undisturbed[kind] = run(launch, tmp_path / "undisturbed", "ddp", kind)[1]
    result, rows = run(launch, tmp_path / "run", data, kind, *deaths)
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in undisturbed[kind]], rel=1e-4)
    assert re.search(r"warning: rank \d on \S+ has died in step \d+: 2 ranks continue", result.stderr), result


@needs_tolerance
@pytest.mark.limit(240)
@pytest.mark.parametrize(
    "nodes, deaths",
    [
        ("0,0,1", ("1:7:begin",)),  # unequal nodes share no parameters: units are gathered on demand
        pytest.param("0,0,1,1", ("3:7:begin", "0:7:begin"), marks=pytest.mark.long),  # one of each node
    ],
)
def test_ranks_of_other_nodes_get_the_shards_of_a_dead_rank(
    launch: Any, tmp_path: Path, undisturbed: dict[str, list[dict[str, Any]]], nodes: str, deaths: tuple[str, ...]
) -> None:
    if "ddp" not in undisturbed:
        undisturbed["ddp"] = run(launch, tmp_path / "undisturbed", "ddp", "reproducible")[1]
    _, rows = run(launch, tmp_path / "run", "fsdp", "reproducible", *deaths, nodes=nodes)
    assert [row["loss"] for row in rows] == [row["loss"] for row in undisturbed["ddp"]]
    assert rows[-1]["fingerprint"] == undisturbed["ddp"][-1]["fingerprint"]


@needs_tolerance
@pytest.mark.limit(240)
@pytest.mark.parametrize(
    "data, kind, nodes, deaths",
    [
        ("zero1", "reproducible", "0,0,1,1", ("2:11:optimizer", "3:11:optimizer")),
        # one node after the other
        pytest.param("fsdp", "reproducible", "0,1,2", ("0:5:begin", "1:11:end"), marks=pytest.mark.long),
        pytest.param("fsdp", "frozen", "0,0,1", ("2:9:begin",), marks=pytest.mark.long),
        # the others may be in step 8 or before it
        pytest.param("zero1", "reproducible", "0,1,2", ("1:8:replica",), marks=pytest.mark.long),
        ("zero2", "reproducible", "0,0,1,2", ("2:9:begin", "1:9:back")),  # the second while they go back
    ],
)
def test_a_run_goes_back_to_the_copies_on_other_nodes(
    launch: Any,
    tmp_path: Path,
    undisturbed: dict[str, list[dict[str, Any]]],
    data: str,
    kind: str,
    nodes: str,
    deaths: tuple[str, ...],
) -> None:
    name = "ddp" if kind == "reproducible" else kind
    if name not in undisturbed:
        undisturbed[name] = run(launch, tmp_path / "undisturbed", "ddp", kind)[1]
    result, rows = run(launch, tmp_path / "run", data, kind, *deaths, nodes=nodes, replicate=2)
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in undisturbed[name]], rel=1e-4)
    if kind == "reproducible":
        assert rows[-1]["fingerprint"] == undisturbed[name][-1]["fingerprint"]
    assert "of which other nodes had the shards" in result.stderr, result
    (attempt,) = json.loads((tmp_path / "run" / "run.json").read_text())["attempts"]
    assert all(1 <= recovery["repeated_steps"] <= 5 for recovery in attempt["recoveries"])


@needs_tolerance
@pytest.mark.limit(240)
@pytest.mark.parametrize(
    "deaths, told",
    [
        (("2:8:damage", "2:10:begin"), "from step 7 on, of which other nodes had the shards"),
        pytest.param(
            ("1:8:damage",),
            "a copy of shards has arrived damaged on another node: the next one replaces it",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_copy_that_arrives_damaged_is_not_used(
    launch: Any, tmp_path: Path, undisturbed: dict[str, list[dict[str, Any]]], deaths: tuple[str, ...], told: str
) -> None:
    """That of step 9 is sent with a wrong checksum; the one before is of step 7."""
    if "ddp" not in undisturbed:
        undisturbed["ddp"] = run(launch, tmp_path / "undisturbed", "ddp", "reproducible")[1]
    result, rows = run(launch, tmp_path / "run", "fsdp", "reproducible", *deaths, nodes="0,1,2", replicate=2)
    assert told in result.stderr, result
    assert rows[-1]["fingerprint"] == undisturbed["ddp"][-1]["fingerprint"]


@needs_tolerance
@pytest.mark.limit(120)
def test_a_lost_node_ends_the_job_with_the_reason(launch: Any, tmp_path: Path) -> None:
    result = launch(
        3, PROGRAM, "zero1", "plain", tmp_path, "2:7:begin", options=TOLERANT, timeout=60, env={"NODES": "0,0,1"}
    )
    assert result.returncode == 1 and not result.survivors, result
    assert re.search(r"Error: the shards of ranks \[2\] are lost: .* a job script starts the run again", result.stderr)


@needs_tolerance
@pytest.mark.limit(120)
def test_the_receipt_tells_that_all_died_within_a_recovery(launch: Any, tmp_path: Path) -> None:
    deaths = ("2:7:begin", "0:7:recovery", "1:7:recovery")
    result = launch(3, PROGRAM, "zero1", "plain", tmp_path, *deaths, options=TOLERANT, timeout=60)
    assert not result.survivors and "is now" not in result.stdout, result
    (receipt,) = load([tmp_path])
    last = receipt.attempts[-1]
    assert last.status == "failed", last
    assert re.fullmatch(
        r"failed on rank \d: rank 2 on \S+ has died, and the other ranks died while they recovered", last.why
    )
    assert read_state(tmp_path).status == "failed"


@needs_tolerance
@pytest.mark.limit(120)
def test_the_last_checkpoint_has_the_weights_of_all_shards(launch: Any, tmp_path: Path) -> None:
    """One process reads what two ranks wrote after the death of the third one."""
    h5py = pytest.importorskip("h5py")
    for name, deaths in (("plain", ()), ("killed", ("1:9:begin",))):
        run(launch, tmp_path / name, "fsdp", "reproducible", *deaths)
    files = [h5py.File(tmp_path / name / "checkpoints" / "step_00000018.h5") for name in ("plain", "killed")]
    found: list[dict[str, bytes]] = [{}, {}]
    for file, values in zip(files, found):
        file.visititems(lambda name, item: values.update({name: item[()].tobytes()} if hasattr(item, "dtype") else {}))
        file.close()
    names = [name for name in found[0] if name.startswith(("model", "optimizer"))]
    assert len(names) > 15 and [found[0][name] for name in names] == [found[1][name] for name in names]


WHOLE = """
import torch, hpctrain
job = hpctrain.init(parallel={"data": "zero1"})
model = job.wrap(torch.nn.Linear(8, 8, bias=False))
optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(64, 8), batch_size=8)
with job.run(model, optimizer, loader, checkpoints="run", on_failure="shrink") as run:
    pass
"""


@needs_tolerance
@pytest.mark.limit(120)
def test_optimizers_of_whole_parameters_are_refused(launch: Any) -> None:
    result = launch(2, WHOLE, options=TOLERANT)
    assert result.returncode == 2, result
    (line,) = [line for line in result.stderr.splitlines() if "error" in line]
    assert 'on_failure = "shrink" with Muon: the states of its whole parameters are lost' in line

"""Jobs with a range of nodes: what is accepted, and scripts that compute everything from the nodes of each start."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, cast

import pytest
from fakes.schedulers import SAVES, Batch
from support.job_requests import ASKED, MOST

from hpctrain.cluster.nodes import requested_range
from hpctrain.errors import SettingsError, UsageError
from hpctrain.jobs.check import problems
from hpctrain.jobs.profile import Profile
from hpctrain.jobs.render import render
from hpctrain.jobs.request import Request, combine, node_range
from hpctrain.parallel.config import ParallelSettings
from hpctrain.train.config import Settings, TrainSettings, check_node_counts

RANGE = replace(ASKED, most_nodes=8)  # 2 to 8 nodes with 4 ranks of 3 cores
COMMANDS = {
    "srun": "srun --kill-on-bad-exit=1 --nodes={0} --ntasks={1} --ntasks-per-node=4 --cpus-per-task=3",
    "openmpi": "mpirun -n {1} --map-by ppr:4:node:PE=3",
    "hydra": "mpiexec -n {1} -ppn 4 -bind-to core:3",
    "pals": "mpiexec -n {1} --ppn 4 --depth 3 --cpu-bind depth",
}


def slurm(launcher: str = "srun", **settings: Any) -> Profile:
    return Profile(scheduler="slurm", launcher=cast(Any, launcher), **settings)


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


@pytest.mark.parametrize(
    "text, fields", [("1", (1, 0)), ("2-8", (2, 8)), ("2-2", (2, 0)), ("08", (8, 0)), ("1-65536", (1, 65536))]
)
def test_a_number_or_a_range_is_read(text: str, fields: tuple[int, int]) -> None:
    assert node_range(text) == fields


@pytest.mark.parametrize(
    "text, message",
    [
        ("8-2", "allowed is MIN-MAX with MIN up to MAX; write it as 2-8"),
        *((text, "steps and lists are not supported; allowed is N or MIN-MAX") for text in ("2-8:2", "8:2", "2,4,8")),
        *(
            (text, "allowed is N or MIN-MAX, from 1 to 65536; write it as 2 or 2-8")
            for text in ("0", "0-3", "2-", "-3", "a-b", "", " 2", "2-4-8", "1.5", "1k", "٢-٣", "2\n", "2--8")
        ),
        *((text, "from 1 to 65536") for text in ("65537", "2-65537", "9" * 5000, f"2-{'9' * 30}")),
    ],
)
def test_other_texts_are_one_error(text: str, message: str) -> None:
    with pytest.raises(UsageError, match="^nodes = '") as caught:
        node_range(text)
    assert message in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize("most", [1, 2, -1, 65537])
def test_the_largest_number_exceeds_the_smallest(most: int) -> None:
    with pytest.raises(UsageError, match="most_nodes = "):
        replace(ASKED, most_nodes=most)


def test_a_request_lists_the_numbers_it_may_get() -> None:
    assert list(replace(ASKED, most_nodes=4).node_counts) == [2, 3, 4] and list(ASKED.node_counts) == [2]
    assert RANGE.nodes_text == requested_range(RANGE.nodes_text) == "2-8" and ASKED.nodes_text == "2"
    assert [requested_range(text) for text in (None, "", "2", "x-y", "2-8 ", "0-3", "2-8\n")] == [None] * 7


@pytest.mark.parametrize("template", ["train", "array", "benchmark"])
@pytest.mark.parametrize("launcher", COMMANDS)
def test_the_directives_have_no_number_of_tasks(launcher: str, template: str) -> None:
    """From a number of tasks, Slurm computes the largest number of nodes, and a restart waits for as many tasks."""
    sweep = combine(["train.seed=1,2"]) if template == "array" else ()
    request = replace(RANGE, template=cast(Any, template), sweep=sweep)
    script = render(request, slurm(launcher))
    found = directives(script)
    assert {"--nodes=2-8", "--mincpus=12"} <= set(found) and problems(script) == []
    assert not [line for line in found if line.startswith(("--ntasks", "--cpus-per", "-n"))]
    assert "-n 8" not in script and "--ntasks=8" not in script
    fixed = directives(render(replace(request, most_nodes=0), slurm(launcher)))
    assert {"--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=3"} <= set(fixed)
    assert not [line for line in fixed if line.startswith("--mincpus")]


@pytest.mark.parametrize("nodes", [2, 5, 8])
@pytest.mark.parametrize("launcher", COMMANDS)
def test_ranks_follow_from_the_nodes_of_each_start(tmp_path: Path, launcher: str, nodes: int) -> None:
    batch = Batch(tmp_path)
    name = COMMANDS[launcher].split()[0]
    batch.does(name, f'case "$*" in *doctor*) ;; *) {SAVES} exit 75 ;; esac')
    script = render(replace(RANGE, preflight=30), slurm(launcher))
    done = batch.run(script, SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES=str(nodes), SLURM_NTASKS="8", SLURM_NNODES="99")
    measured, trained = batch.calls(name)
    expected = COMMANDS[launcher].format(nodes, 4 * nodes).split()[1:]
    assert measured.words[: len(expected)] == trained.words[: len(expected)] == expected
    assert measured.words[len(expected) :][:2] == ["hpctrain", "doctor"]
    assert trained.words[len(expected) :][:2] == ["hpctrain", "train"]
    assert trained.environment["HPCTRAIN_NODES"] == "2-8"
    assert f"job 7 has {nodes} of 2-8 nodes: {4 * nodes} ranks\n" in done.stdout


def test_a_requeued_job_may_get_another_number(tmp_path: Path) -> None:
    batch = Batch(tmp_path)
    batch.does("srun", f"{SAVES} exit 75")
    script = render(RANGE, slurm())
    for variables in ({"SLURM_JOB_NUM_NODES": "3"}, {"SLURM_NNODES": "7"}):  # the second name is Slurm's older one
        assert batch.run(script, SLURM_JOB_ID="7", **variables).returncode == 75
    found = [word for call in batch.calls("srun") for word in call.words if word.startswith(("--nodes", "--ntasks="))]
    assert found == ["--nodes=3", "--ntasks=12", "--nodes=7", "--ntasks=28"]
    assert [call.words for call in batch.calls("scontrol")] == [["requeue", "7"]] * 2


def test_scripts_are_valid_bash() -> None:
    for profile in (slurm(), slurm("openmpi"), slurm(gpus="gpus-per-task", shell="/bin/bash -l")):
        for request in (RANGE, replace(MOST, most_nodes=64, preflight=60)):
            script = render(request, profile)
            subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    "settings, directive",
    [
        ({"gpus": "gpus-per-task", "gpu_type": "a100"}, "--gpus-per-node=a100:8"),  # by task needs a number of tasks
        ({"gpus": "gpus-per-node"}, "--gpus-per-node=8"),
        ({"gpus": "gres"}, "--gres=gpu:8"),
    ],
)
def test_gpus_are_requested_per_node(settings: dict[str, str], directive: str) -> None:
    script = render(replace(RANGE, gpus_per_node=8), slurm(**settings))
    assert [line for line in directives(script) if "gpu" in line] == [directive]
    assert ("--gpus-per-task=2" in script) == (settings["gpus"] == "gpus-per-task"), "each rank gets its own by srun"


@pytest.mark.parametrize("launcher", ["hydra", "openmpi", "pals"])
def test_a_range_is_refused_under_pbs(launcher: str) -> None:
    profile = Profile(scheduler="pbs", launcher=cast(Any, launcher), gpus="none")
    with pytest.raises(UsageError, match="^nodes = 2-8: PBS has no range of nodes.*; submit with --nodes 2$"):
        render(RANGE, profile)


# Batches that ranks cannot divide -------------------------------------------------------------------------------------


def wrong_counts(settings: Settings, counts: range, ranks_per_node: int) -> str:
    try:
        check_node_counts(settings, counts, ranks_per_node)
    except SettingsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("ranks_per_node", [1, 4])
@pytest.mark.parametrize("batch", [16, 24, 840])
def test_every_number_of_nodes_is_checked(batch: int, ranks_per_node: int, accumulate: int) -> None:
    settings = Settings(train=TrainSettings(batch=batch, accumulate=accumulate))
    for least in (1, 2, 5):
        wrong = [n for n in range(least, 8) if batch % (n * ranks_per_node * accumulate)]
        right = [str(n) for n in range(least, 8) if n not in wrong]
        said = wrong_counts(settings, range(least, 8), ranks_per_node)
        assert bool(said) == bool(wrong)
        if wrong:
            named = said.partition("does not work on ")[2].partition(" nodes")[0]
            assert expanded(named) == wrong and f" ({wrong[0]}: a batch of {batch} samples cannot be divided" in said
            assert [str(n) for n in expanded(said.partition("allowed is ")[2].partition(";")[0])] == right


def expanded(text: str) -> list[int]:
    """Return the numbers of a text such as 3,5-7."""
    if text == "none":
        return []
    ends = [part.split("-") for part in text.split(",")]
    return [number for first, *rest in ends for number in range(int(first), int((rest or [first])[0]) + 1)]


def test_both_ends_of_a_long_range_are_checked() -> None:
    said = wrong_counts(Settings(train=TrainSettings(batch=65536)), range(3, 65537), 1)
    assert "does not work on 3 nodes (3: " in said and "allowed is of both ends 65536;" in said


def test_a_mesh_that_does_not_fit_is_named() -> None:
    settings = Settings(train=TrainSettings(batch=48), parallel=ParallelSettings(tensor=4))
    said = wrong_counts(settings, range(1, 4), 2)
    assert "with 2 ranks per node: the run does not work on 1,3 nodes (1: 2 ranks cannot form a mesh" in said


@pytest.mark.parametrize("microbatch, most", [(0, 8), (4, 8), (3, ceil(32 / 3)), (32, 1)])
def test_reproducible_runs_work_on_up_to_as_many_ranks_as_microbatches(microbatch: int, most: int) -> None:
    train = TrainSettings(batch=32, microbatch=microbatch)
    settings = Settings(train=train, parallel=ParallelSettings(reproducible=True))
    assert wrong_counts(settings, range(1, most + 1), 1) == ""
    assert f"does not work on {most + 1} nodes" in wrong_counts(settings, range(1, most + 2), 1)


def test_arrays_count_their_tasks_in_the_request() -> None:
    sweep = Request(config="a.toml", folder="r", time="01:00:00", template="array", sweep=(("a.b=1",), ("a.b=2",)))
    assert (sweep.array, replace(sweep, at_once=1).array) == ("0-1", "0-1%1")

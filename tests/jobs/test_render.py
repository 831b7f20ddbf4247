"""Rendered job scripts: valid bash, and directives that the manuals allow."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support import job_requests

from hpctrain.errors import UsageError
from hpctrain.jobs import profile as profiles
from hpctrain.jobs.check import problems
from hpctrain.jobs.profile import Profile
from hpctrain.jobs.render import render, script_path
from hpctrain.jobs.request import Request, combine, run_folder

NOWHERE = {"HOME": "/nowhere"}
ONLY_SLURM = ("reservation", "constraint", "exclude", "qos")
PROFILES = {name: profiles.load(name, NOWHERE)[0] for name in profiles.names(NOWHERE)}
LEAST = Request(config="a.toml", folder="runs/a", time="04:00:00")
MOST = replace(
    job_requests.MOST,
    venv="/apps/venv",
    modules=("a/1", "b"),
    environment={"A": "b $(c) 'd'", "E": ""},
    settings=("train.prompt=`x` $y", "run.resume=must"),
)


def every_script() -> dict[str, str]:
    """Return scripts for each profile and template, with few options and with many."""
    found = {}
    sweeps = {"train": (), "benchmark": (), "array": combine(["train.seed=1,2", 'data.files=["a b"],["c\'d"]'])}
    for (name, profile), template, asked in product(PROFILES.items(), sweeps, ("least", "most")):
        request = replace({"least": LEAST, "most": MOST}[asked], template=template, sweep=sweeps[template])
        if asked == "most" and template != "benchmark":
            request = replace(request, preflight=60)
        found[f"{name} {template} {asked}"] = render(request, profile)
    return found


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    return every_script()


def test_directives_pass_the_checker(scripts: dict[str, str]) -> None:
    assert len(scripts) == 60
    for name, script in scripts.items():
        assert problems(script) == [], name
        assert script.startswith("#!/bin/bash") and "@" not in re.sub(r"USR1@|\[@\]|%%@\*", "", script), name


def test_scripts_are_valid_bash(scripts: dict[str, str], tmp_path: Path) -> None:
    for number, script in enumerate(scripts.values()):
        (tmp_path / f"{number}.sh").write_text(script)
    for path in tmp_path.iterdir():
        subprocess.run(["bash", "-n", str(path)], check=True)


def test_shellcheck_reports_no_problem(scripts: dict[str, str], tmp_path: Path) -> None:
    beside = Path(sys.executable).parent / "shellcheck"
    program = str(beside) if beside.exists() else shutil.which("shellcheck")
    if program is None:
        pytest.skip("needs shellcheck")
    # Only three profiles, because it is slow. SC2016 is about the quotes in the values of MOST.
    chosen = [name for name in scripts if name.split()[0] in ("generic-slurm", "polaris", "lumi")]
    for number, name in enumerate(chosen):
        (tmp_path / f"{number}.sh").write_text(scripts[name])
    done = subprocess.run(
        [program, "--shell=bash", "--exclude=SC2016", *map(str, tmp_path.iterdir())], capture_output=True, text=True
    )
    assert done.stdout == "" and done.returncode == 0


def lines(script: str, *words: str) -> list[str]:
    return [line for line in script.splitlines() if any(word in line for word in words)]


@pytest.mark.parametrize(
    "settings, asked, directive, option",
    [
        ({"gpus": "gpus-per-node"}, 4, "#SBATCH --gpus-per-node=4", None),
        ({"gpus": "gpus-per-node", "gpu_type": "a100"}, 4, "#SBATCH --gpus-per-node=a100:4", None),
        ({"gpus": "gres"}, 4, "#SBATCH --gres=gpu:4", None),
        ({"gpus": "gres", "gpu_type": "a100"}, 4, "#SBATCH --gres=gpu:a100:4", None),
        ({"gpus": "gpus-per-task"}, 8, "#SBATCH --gpus-per-task=2", "--gpus-per-task=2"),
        ({"gpus": "none"}, 4, None, None),
        ({"gpus": "gres"}, 0, None, None),
    ],
)
def test_gpus_are_requested_by_the_option_of_the_site(
    settings: dict[str, str], asked: int, directive: str | None, option: str | None
) -> None:
    profile = Profile(scheduler="slurm", **settings)  # type: ignore[arg-type]
    script = render(replace(LEAST, ranks_per_node=4, gpus_per_node=asked), profile)
    assert lines(script, "#SBATCH --g") == ([directive] if directive else [])
    assert [line for line in lines(script, "srun ") if "--gpus" in line and option not in line.split()] == []


@pytest.mark.parametrize(
    "launcher, command, signal",
    [
        ("srun", "srun --mpi=pmix --kill-on-bad-exit=1 --cpus-per-task=6 --x=y --a b \\", "USR1@300"),
        ("openmpi", "mpirun -n 12 --map-by ppr:4:node:PE=6 --x=y --a b \\", "B:USR1@300"),
        ("hydra", "mpiexec -n 12 -ppn 4 -bind-to core:6 --x=y --a b \\", "B:USR1@300"),
        ("pals", "mpiexec -n 12 --ppn 4 --depth 6 --cpu-bind depth --x=y --a b \\", "B:USR1@300"),
    ],
)
def test_each_launcher_has_its_command_and_signal(launcher: str, command: str, signal: str) -> None:
    settings = {"launcher": launcher, "mpi": "pmix", "launch_options": ("--x=y", "--a b")}
    profile = Profile(scheduler="slurm", **settings)  # type: ignore[arg-type]
    script = render(replace(LEAST, nodes=3, ranks_per_node=4, cpus_per_rank=6), profile)
    assert command in script.splitlines()
    # To the job steps if there are any; else to the script, which passes it on.
    assert f"#SBATCH --signal={signal}" in script.splitlines()


@pytest.mark.parametrize("name", ["generic-slurm", "generic-pbs"])
def test_preflight_runs_on_the_ranks_of_the_run(name: str) -> None:
    """Preflight precedes all parts that a signal or a crash restarts, and runs in the container of the run."""
    request = replace(LEAST, nodes=2, preflight=60, container="image.sif")
    script = render(request, replace(PROFILES[name], container_program="apptainer"))
    measures, trains = (script.index(word) for word in ("hpctrain doctor --preflight", "hpctrain train"))
    assert measures < script.index("trap pass_on USR1") < trains
    (line,) = lines(script, "--preflight")
    assert "apptainer exec image.sif hpctrain doctor --preflight --strict --seconds 60" in line
    assert "|| exit #" in line and line.split()[0] in script[script.index("trap pass_on") : trains]
    assert "doctor" not in render(LEAST, PROFILES[name])
    with pytest.raises(UsageError, match="preflight: a benchmark measures by itself"):
        replace(request, template="benchmark")


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("launcher, start", [("openmpi", "mpirun -n {}"), ("hydra", "mpiexec -n {} -ppn 1")])
def test_launchers_get_their_options_under_pbs(launcher: str, start: str, nodes: int) -> None:
    profile = Profile(scheduler="pbs", launcher=launcher, gpus="ngpus")  # type: ignore[arg-type]
    script = render(replace(LEAST, nodes=nodes), profile)
    (line,) = lines(script, "    mpi")
    assert line.startswith(f"    {start.format(nodes)} ") and '"${bind[@]}"' in line
    # Open MPI needs the nodes and their environment; mpirun crashes on PBS's description of a single node.
    assert ('--hostfile "$PBS_NODEFILE"' in line) == ('"${variables[@]}"' in line) == (launcher == "openmpi")
    assert ("export PRTE_MCA_ras=^pbs" in script) == (launcher == "openmpi" and nodes == 1)
    assert ("compgen -e" in script) == (launcher == "openmpi" and nodes == 2)
    assert ("pbs_tmrsh" in script) == (nodes == 2)


@pytest.mark.parametrize("template", ["train", "array", "benchmark"])
@pytest.mark.parametrize("name", [name for name, profile in PROFILES.items() if profile.scheduler == "pbs"])
def test_chunks_are_placed_on_different_nodes(name: str, template: str) -> None:
    """Without ``place=scatter`` PBS may put all chunks on one node."""
    sweep = (("a.b=1",), ("a.b=2",)) if template == "array" else ()
    asked = replace(LEAST, nodes=2, template=template, sweep=sweep)  # type: ignore[arg-type]
    assert lines(render(asked, PROFILES[name]), "place=") == ["#PBS -l place=scatter"]
    asked = replace(asked, directives=("-l place=vscatter:excl",))
    assert lines(render(asked, PROFILES[name]), "place=") == ["#PBS -l place=vscatter:excl"]


@pytest.mark.parametrize("directive", ["-o /tmp", "-o runs"])
def test_the_output_file_of_pbs_follows_the_user(directive: str) -> None:
    assert lines(render(LEAST, PROFILES["generic-pbs"]), "#PBS -o") == ["#PBS -o runs/a/"]
    assert lines(render(replace(LEAST, directives=(directive,)), PROFILES["generic-pbs"]), "#PBS -o") == [
        f"#PBS {directive}"
    ]


@pytest.mark.parametrize(
    "settings, directives, decides",
    [
        ({}, (), True),
        ({"place": "scatter:excl"}, (), False),
        ({"chunks": "nodes"}, (), False),
        ({}, ("-l place=scatter:exclhost",), False),
    ],
)
def test_jobs_with_whole_nodes_bind_ranks(settings: dict[str, str], directives: tuple[str, ...], decides: bool) -> None:
    profile = Profile(scheduler="pbs", launcher="hydra", gpus="none", **settings)  # type: ignore[arg-type]
    script = render(replace(LEAST, cpus_per_rank=3, directives=directives), profile)
    assert lines(script, "bind=") == ["bind=(-bind-to core:3)", *(["    bind=(-bind-to none)"] if decides else [])]


def test_resources_of_pbs_are_in_the_chunk() -> None:
    script = render(
        replace(MOST, memory="64000"), Profile(scheduler="pbs", launcher="hydra", gpus="ngpus", select=("model=a",))
    )
    assert lines(script, "select=", "walltime=") == [
        "#PBS -l select=3:ncpus=48:mpiprocs=8:ompthreads=6:ngpus=8:mem=64000mb:model=a",
        "#PBS -l walltime=36:00:00",
    ]


TASKS = (("a.b=1",), ("a.b=2",))


@pytest.mark.parametrize(
    "asked, profile, message",
    [
        *(({name: "x"}, "generic-pbs", f"^{name} = 'x': PBS does not support it") for name in ONLY_SLURM),
        ({"template": "array", "sweep": TASKS[:1]}, "generic-pbs", "sweep has 1 task: an array of PBS has at least 2"),
        ({"template": "array", "sweep": TASKS, "at_once": 1}, "generic-pbs", "at_once = 1: tasks of a PBS array that"),
        ({"ranks_per_node": 4, "gpus_per_node": 2}, "by-rank", "gpus_per_node = 2: this profile asks for GPUs by rank"),
    ],
)
def test_requests_that_a_site_cannot_fulfil_are_refused(asked: dict[str, Any], profile: str, message: str) -> None:
    site = PROFILES.get(profile) or Profile(scheduler="slurm", gpus="gpus-per-task")
    with pytest.raises(UsageError, match=message):
        render(replace(LEAST, **asked), site)


def test_requested_values_override_the_profile() -> None:
    profile = Profile(scheduler="slurm", partition="slow", environment={"A": "1", "B": "2"}, interface="ib0")
    script = render(replace(LEAST, partition="fast", environment={"B": "3", "NCCL_SOCKET_IFNAME": "eth0"}), profile)
    assert lines(script, "--partition", "export A", "export B", "export NCCL") == [
        *("#SBATCH --partition=fast", "export A=1", "export B=3", "export NCCL_SOCKET_IFNAME=eth0")
    ]


def test_resume_of_the_user_is_kept() -> None:
    assert "--set run.resume=auto" in render(LEAST, PROFILES["generic-slurm"])
    assert "resume=auto" not in render(replace(LEAST, settings=("run.resume=must",)), PROFILES["generic-slurm"])


def test_the_script_is_in_the_run_folder() -> None:
    assert script_path(LEAST, PROFILES["generic-pbs"]) == "runs/a/job.pbs"
    assert "script=runs/a/job.pbs " in render(LEAST, PROFILES["generic-pbs"])


def test_at_once_limits_arrays() -> None:
    """Tasks of a PBS array that come back are jobs of their own, which its limit does not count."""
    asked = replace(LEAST, template="array", sweep=TASKS, at_once=1)
    assert "#PBS -J 0-1%1" in render(replace(asked, restarts=0), PROFILES["generic-pbs"])
    assert "--array=0-1%1" in render(asked, PROFILES["generic-slurm"])


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"nodes": 0}, "nodes = 0: must be a whole number from 1"),
        ({"time": "00:05:00"}, "time = 00:05:00: the run is told to save 300 s before the end"),
        ({"time": "00:06:30", "preflight": 60}, "300 s before .* and nodes are measured for 60 s: ask for more"),
        ({"gpus_per_node": 3, "ranks_per_node": 2}, "one must divide the other"),
        ({"template": "array"}, "needs a sweep"),
        ({"sweep": (("a=1",),)}, "needs a sweep"),
        ({"template": "other"}, "allowed are train, benchmark, array"),
        ({"template": "array", "sweep": (("a.b=1",),) * 1001}, "at most 1000 are allowed in one array"),
        ({"environment": {"A=B": "c"}}, "environment = 'A=B'"),
        ({"config": ""}, "config = ''"),
    ],
)
def test_wrong_requests_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(LEAST, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "[run]\nfolder = 'x/y'\n", "[run]\nresume = 'auto'\n"])
def test_the_run_folder_equals_that_of_training(text: str, tmp_path: Path) -> None:
    from hpctrain.settings import read_toml
    from hpctrain.train.config import load

    path = tmp_path / "some.toml"
    path.write_text(text)
    assert run_folder(read_toml(path), str(path)) == load(path).run.folder


def test_sweeps_are_combined_as_a_product() -> None:
    assert combine(["a.b=1,2", 'c.d="x, y",z']) == (
        *(("a.b=1", 'c.d="x'), ("a.b=1", 'c.d=y"'), ("a.b=1", "c.d=z")),
        *(("a.b=2", 'c.d="x'), ("a.b=2", 'c.d=y"'), ("a.b=2", "c.d=z")),
    )
    assert combine(['a.b="x, y","z"', "c.d=[1, 2],[3]"]) == (
        ('a.b="x, y"', "c.d=[1, 2]"),
        ('a.b="x, y"', "c.d=[3]"),
        ('a.b="z"', "c.d=[1, 2]"),
        ('a.b="z"', "c.d=[3]"),
    )
    assert combine(["a.b=cosine, constant"]) == (("a.b=cosine",), ("a.b=constant",))


@pytest.mark.parametrize("text", ["a.b", "=1", "a.=1", "a.b=", "run.folder=a,b"])
def test_malformed_sweeps_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--sweep"):
        combine([text])


@pytest.mark.parametrize("name", ["generic-slurm", "generic-pbs"])
def test_a_launcher_that_hides_the_death_of_ranks_is_not_believed(name: str, tmp_path: Path) -> None:
    assert "lock.json" not in render(LEAST, PROFILES[name])
    script = render(LEAST, replace(PROFILES[name], launcher="openmpi"))
    (line,) = lines(script, 'if [ "$code" -eq 0 ] && [ -e')
    assert script.index(line) < script.index("# 0: done.")
    for locked, given, code in ((False, 0, 0), (True, 0, 137), (True, 75, 75)):
        (tmp_path / "lock.json").unlink(missing_ok=True)
        if locked:
            (tmp_path / "lock.json").touch()
        text = f'folder="{tmp_path}" code={given}\n{line}\nexit "$code"'
        assert subprocess.run(["bash", "-euc", text]).returncode == code

"""``hpctrain run``: programs for torchrun run unchanged, as Python runs them, and one failed rank ends the job."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cli.main import main
from hpctrain.cluster.launcher import without_launcher

# Programs that do not import hpctrain.
TRAINING = """
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

os.environ["MASTER_ADDR"] = os.environ.get("MASTER_ADDR", "localhost")  # as many programs do
dist.init_process_group(*sys.argv[1:])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 1))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(dist.get_rank())
losses = []
for step in range(4):
    loss = (model(torch.randn(8, 20, generator=generator)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item().hex())
log = model._get_ddp_logging_data()
assert log["backend_name"] == dist.get_backend()
settings = dict(sorted((name, value) for name, value in log.items() if name.startswith("gloo_")))
group = dist.new_group([1, 0])
total = torch.ones(3)
dist.all_reduce(total, group=group)
sys.stdout.write(f"{dist.get_rank()} {dist.get_backend()} {total.tolist()} {losses} {settings}\\n")
dist.destroy_process_group()
"""
FACTS = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_PORT")
facts = {"argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__}
facts |= {"module": __spec__ and __spec__.name, "main": vars(sys.modules["__main__"]) is globals()}
facts |= {"env": {name: os.environ.get(name) for name in names}}
sys.stdout.write(json.dumps(facts) + "\\n")
"""


@pytest.fixture
def program(tmp_path: Path) -> Any:
    """Return a function that writes a program and returns its path."""

    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def started(launch: Any, n: int, *words: Any, **options: Any) -> Any:
    return launch(n, "-m", "hpctrain", "run", *words, **options)


@pytest.mark.limit(150)
def test_losses_and_names_equal_those_of_torchs_own_gloo(launch: Any, program: Any) -> None:
    path = program(TRAINING)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    interface = {"GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, path, "gloo"],
            env={**without_launcher(os.environ), **common, **interface, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    stock = sorted(rank.communicate()[0] for rank in ranks)
    assert [line[:17] for line in stock] == ["0 gloo [2.0, 2.0,", "1 gloo [2.0, 2.0,"]
    assert all("'gloo_num_threads': 2, 'gloo_socket_ifname': 'lo'" in line for line in stock)
    for words, name in [(["gloo"], "gloo"), (["mpi"], "mpi"), ([], "undefined")]:
        result = started(launch, 2, path, *words, env=interface)
        expected = stock
        if name != "gloo":  # DDP's log has settings of gloo for this name only
            expected = [re.sub(r"\{.*\}", "{}", line).replace("gloo", name) for line in stock]
        assert result.returncode == 0 and sorted(result.stdout.splitlines(True)) == expected, (words, result)


@pytest.mark.limit(120)
def test_torchs_own_gloo_runs_without_an_address(launch: Any, program: Any) -> None:
    path = program(TRAINING.replace("group = ", "print(type(dist.group.WORLD) is dist.ProcessGroup)\ngroup = "))
    result = started(launch, 2, "--backend", "torch:gloo", path, "gloo")
    assert result.returncode == 0 and result.stdout.count("[2.0, 2.0, 2.0]") == 2, result
    assert result.stdout.count("True") == 2  # ours is a class of its own


def facts(text: str) -> list[dict[str, Any]]:
    return sorted(map(json.loads, text.splitlines()), key=lambda one: str(one["env"]["RANK"]))


def test_a_script_runs_as_python_runs_it(launch: Any, program: Any) -> None:
    path = program(FACTS, "folder/facts.py")
    words = ["--help", "-m", "--backend", "x", "--n", "3", "--nproc", "--rdzv=1", "--", "a b"]
    own = facts(launch(0, path, *words).stdout)[0]
    for n in (0, 2):
        result = started(launch, n, path, *words)
        found = facts(result.stdout)
        assert len(found) == max(n, 1), result
        for one in found:
            assert {**one, "env": None} == {**own, "env": None}


def test_paths_of_a_script_are_those_of_python(launch: Any, program: Any) -> None:
    text = "import os, sys; os.chdir('/'); print(__file__, sys.argv[0], os.path.exists(__file__), type(__builtins__))"
    folder = program(text, "folder/paths.py").parents[1]
    own = launch(0, "folder/paths.py", cwd=folder)
    found = started(launch, 0, "folder/paths.py", cwd=folder)
    assert own.stdout == found.stdout and own.stdout.count(" folder/paths.py True <class 'module'>") == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["run", "name"])
def test_a_rank_that_has_destroyed_its_groups_and_left_is_named(launch: Any, program: Any, how: str) -> None:
    path = program("""
import sys, torch, torch.distributed as dist
dist.init_process_group("hpctrain")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    dist.destroy_process_group()
    sys.exit(0)
dist.all_reduce(torch.ones(1))
print("no error")
""")
    result = started(launch, 2, path) if how == "run" else launch(2, path)
    assert result.returncode == 1 and "no error" not in result.stdout
    assert "ends the job: rank 1 has left, this one waits in all_reduce" in result.stderr


def test_the_scheduler_s_signal_ends_a_program_without_a_handler(launch: Any, program: Any) -> None:
    path = program("""
import os, signal, torch.distributed as dist
dist.init_process_group()
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGUSR1)
dist.barrier()
print("no end")
""")
    result = started(launch, 2, path)
    assert result.returncode not in (0, 2) and "no end" not in result.stdout


def test_a_module_runs_as_python_runs_it(launch: Any, program: Any) -> None:
    folder = program("", "package/__init__.py").parents[1]
    program(FACTS, "package/facts.py")
    own = facts(launch(0, "-m", "package.facts", "--lr", "1", cwd=folder).stdout)[0]
    found = facts(started(launch, 0, "-m", "package.facts", "--lr", "1", cwd=folder).stdout)[0]
    assert own["module"] == "package.facts" and {**found, "env": None} == {**own, "env": None}


def test_the_program_finds_the_variables_of_torchrun(launch: Any, program: Any) -> None:
    path = program(FACTS)
    result = started(launch, 2, path)
    for rank, one in enumerate(facts(result.stdout)):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_PORT")
        assert [one["env"][name] for name in names] == [str(rank), "2", str(rank), "2", "0", "0", "29500"], result
    alone = facts(started(launch, 0, path).stdout)[0]["env"]
    assert (alone["RANK"], alone["WORLD_SIZE"], alone["LOCAL_WORLD_SIZE"]) == ("0", "1", "1")


FAILING = """
import os, signal, sys
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
{before}
dist.init_process_group()
{after}
dist.all_reduce(torch.ones(3))
"""


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("what", "code", "text"),
    [
        ("sys.exit(3)", 3, "rank 1 of 2 on .* ends the job: the program has exited with code 3"),
        ("raise ValueError('no such thing')", 1, "rank 1 of 2 on .* ends the job: ValueError: no such thing"),
    ],
)
def test_one_failed_rank_ends_the_job(launch: Any, program: Any, place: str, what: str, code: int, text: str) -> None:
    source = FAILING.format(**{"before": "", "after": "", place: f"if rank == 1: {what}"})
    result = started(launch, 2, program(source))
    assert result.returncode == code and not result.survivors, result
    assert len(re.findall(text, result.stderr)) == len(re.findall("ends the job", result.stderr)) == 1, result
    assert result.stderr.count("Traceback") == ("raise" in what) and "runpy" not in result.stderr, result
    assert "cli/run.py" not in result.stderr


def test_ranks_that_fail_together_exit_with_their_code(launch: Any, program: Any) -> None:
    result = started(launch, 2, program(FAILING.format(before="", after="sys.exit(5)")))
    assert result.returncode == 5 and "ends the job" not in result.stderr, result


def test_an_error_in_one_process_is_printed_as_python_does(launch: Any, program: Any) -> None:
    path = program("def broken():\n    raise ValueError('no such thing')\nbroken()\n")
    own, found = launch(0, path), started(launch, 0, path)
    assert found.returncode == own.returncode == 1 and found.stderr == own.stderr


def test_a_rank_and_a_size_beside_the_name_mpi_give_no_warning(launch: Any, program: Any) -> None:
    lines = (
        "import os, torch.distributed as dist",
        "rank, size = (int(os.environ[name]) for name in ('RANK', 'WORLD_SIZE'))",
        "dist.init_process_group('mpi', rank=rank, world_size=size)",
        "print('two' if dist.get_world_size() == 2 else 'other')",
    )
    result = started(launch, 2, program("\n".join(lines)))  # as Accelerate does on CPUs
    assert result.returncode == 0 and result.stdout.count("two") == 2 and "Warning" not in result.stderr, result


def test_an_unknown_name_of_a_back_end_is_one_line(launch: Any, program: Any) -> None:
    result = started(launch, 2, program(TRAINING), "glooo")
    assert result.returncode == 2 and "Traceback" not in result.stderr, result
    assert result.stderr.startswith(
        "hpctrain: error: unknown back end of torch.distributed: did you mean gloo? "
    ), result
    assert result.stderr.count("hpctrain: error") == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["missing.py"], "no such program: missing.py; a module is started by hpctrain run -m"),
        (["notes.txt"], "notes.txt is not a Python file: its name must end in .py"),
        (["."], ". is not a Python file"),
        (["run.toml"], "run.toml has the settings of a run: start it by hpctrain train run.toml"),
        (["-m", "missing.module"], "no such module: missing.module"),
        (["--backend", "torch:glo", "train.py"], "unknown --backend: did you mean torch:gloo?"),
        (["--backend", "x", "train.py"], "unknown --backend: known are hpctrain, torch:gloo"),
        ([], "the following arguments are required: PROGRAM"),
        (["--nproc-per-node=2", "train.py"], "the launcher starts the ranks, not an option as in torchrun: mpiexec"),
        (["--nproc", "2", "train.py"], "the launcher starts the ranks, not an option as in torchrun: mpiexec"),
        (["--standalone", "train.py"], "the launcher starts the ranks, not an option as in torchrun: mpiexec"),
    ],
)
def test_wrong_words_are_one_line(launch: Any, program: Any, words: list[str], text: str) -> None:
    for name in ("notes.txt", "run.toml", "train.py"):
        folder = program("", name).parent
    result = started(launch, 0, *words, cwd=folder)
    assert result.returncode == 2 and result.stderr.startswith(f"hpctrain: error: {text}"), result
    assert result.stderr.count("\n") == 1


def test_a_group_of_one_process_needs_no_launcher(launch: Any, program: Any) -> None:
    text = "import torch, torch.distributed as dist; dist.init_process_group({name!r}); print(dist.get_world_size())"
    for name, environ in (("hpctrain", {}), ("hpctrain", {"RANK": "0", "WORLD_SIZE": "1"})):
        result = launch(0, program(text.format(name=name)), env=environ)
        assert result.stdout == "1\n" and result.returncode == 0, result
    store = "dist.init_process_group({name!r}, None, None, 1, 0, dist.HashStore())"
    own = text.replace("dist.init_process_group({name!r})", store).format(name="hpctrain")
    assert launch(0, program(own)).stdout == "1\n"  # a store of the program
    for name, environ in (("hpctrain", {"WORLD_SIZE": "2"}), ("gloo", {})):  # others are missing; torch's own
        result = launch(0, program(text.format(name=name)), env=environ)
        assert "environment variable RANK expected" in result.stderr and result.returncode == 1, result


def test_a_job_of_a_program_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["job", "slurm", "--folder", "runs/a", "--time", "04:00:00", "--", "run"]
    for words, text in {
        ("missing.py",): "no such program: missing.py",
        ("--backend", "y", "a.py"): "unknown --backend",
    }.items():
        assert main([*job, *words]) == 2
        assert text in capsys.readouterr().err
    assert main([*job[:2], *job[4:], "jobs/program.py"]) == 2
    assert "--folder is missing" in capsys.readouterr().err

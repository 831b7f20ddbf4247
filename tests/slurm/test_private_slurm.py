"""Private Slurm clusters: isolation from each other, cleanup after any end, and the message if packages are missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import slurm_needs
from private_slurm import PrivateSlurm
from slurm_conf import NODES, hosts, slurm_conf

HERE = Path(__file__).resolve().parent
HOLD = """
import time
from private_slurm import PrivateSlurm
with PrivateSlurm() as slurm:
    print(slurm.folder, flush=True)
    time.sleep(600)
"""
AS_A_USER = """
import os, runpy, sys
os.geteuid = lambda: 1000  # as far as Python can tell
del sys.argv[0]
runpy.run_path("run.py", run_name="__main__")
"""


@pytest.mark.slurm
@pytest.mark.limit(90)
def test_two_clusters_are_isolated(slurm: PrivateSlurm) -> None:
    with PrivateSlurm() as other:
        job_id = other.command("sbatch", "--parsable", "--wrap=sleep 600", "--output=/dev/null").strip()
        other.until(lambda: other.job(job_id)["JobState"] == "RUNNING", "a job", 20)
        assert slurm.idle() == set(NODES) and len(other.idle()) == 2
        found = _processes(other.folder)
        assert len(found) >= 2 + len(NODES)
    assert not other.folder.exists() and not _processes(other.folder)
    assert slurm.idle() == set(NODES)


@pytest.mark.slurm
@pytest.mark.limit(90)
def test_a_killed_cluster_leaves_no_process_or_folder() -> None:
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, cwd=HERE, env=_environment(), stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        folder = Path(holder.stdout.readline().strip())
        found = len(_processes(folder))
        holder.send_signal(signal.SIGKILL)
    assert found >= 2 + len(NODES)
    assert _soon(lambda: not _processes(folder)), _processes(folder)
    with PrivateSlurm():
        assert not folder.exists()


@pytest.mark.slurm
@pytest.mark.limit(90)
def test_killing_a_node_kills_its_processes() -> None:
    with PrivateSlurm() as slurm:
        wanted = "--wrap=sleep 599", "--output=/dev/null", "--nodelist=a2"
        job_id = slurm.command("sbatch", "--parsable", *wanted).strip()
        slurm.until(lambda: slurm.job(job_id)["JobState"] == "RUNNING", "a job", 20)
        slurm.until(lambda: _sleeping(slurm.folder), "its process", 20)
        slurm.kill_node("a2")
        slurm.until(lambda: not _sleeping(slurm.folder), "its end", 5)


def test_slurm_conf_names_hosts_ports_and_nodes() -> None:
    lines = slurm_conf(Path("/f"), [1, 2, 3, 4]).splitlines()
    assert "SlurmctldHost=ctl(127.0.0.1)" in lines and "SlurmctldPort=1" in lines
    assert [line.partition(" ")[0] for line in lines if line.startswith("NodeName")] == [f"NodeName={n}" for n in NODES]
    assert "127.0.0.1 a3" in hosts().splitlines()
    with pytest.raises(ValueError):
        slurm_conf(Path("/f"), [1, 2])


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    missing = slurm_needs.missing_packages((), "libnowhere.so")
    assert missing == [*"munge slurmctld slurmd slurm-client slurm-wlm-torque util-linux libpmix-dev".split()]
    assert f"apt-get install {' '.join(missing)}" in str(slurm_needs.obstacle(0, (), "libnowhere.so"))
    assert slurm_needs.obstacle(user=1000) == "a private Slurm needs root"


@pytest.mark.parametrize("option, word, code", [(["--or-skip"], "skipped", 0), ([], "error", 1)])
def test_only_the_or_skip_option_skips(option: list[str], word: str, code: int) -> None:
    command = [sys.executable, "-c", AS_A_USER, "run.py", *option]
    done = subprocess.run(command, cwd=HERE, env=_environment(), capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (code, f"{word}: tests with Slurm: a private Slurm needs root\n"), done


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HERE, *HERE.parents[:2])))}


def _processes(folder: Path) -> list[int]:
    """Return the processes whose environment names a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"SLURM_CONF={folder}/".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def _sleeping(folder: Path) -> list[int]:
    lines = {pid: Path(f"/proc/{pid}/cmdline") for pid in _processes(folder)}
    return [pid for pid, path in lines.items() if path.exists() and b"sleep\x00599" in path.read_bytes()]


def _soon(condition: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()

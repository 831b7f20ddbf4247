"""Two nodes on one machine: separate hosts for the ranks, and complete cleanup however a run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import isolation
import pytest
from namespaces import WIRE, address
from support.jobs import JobStarter

from hpctrain.cluster.launcher import without_launcher

RUN = Path(__file__).with_name("run.py")
WIRE_PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "bandwidth.py"
SPEAK = "sh", "-c", 'echo "$(uname -n) $(getent hosts h1 h2 | tr -s " " | paste -s -d ,)"'
nodes = pytest.mark.usefixtures("can_play_nodes")


@pytest.fixture(scope="session")
def can_play_nodes() -> None:
    """Skip the test if this machine cannot simulate several nodes."""
    if reason := isolation.obstacle():
        pytest.skip(reason)


@nodes
def test_ranks_are_on_two_hosts_that_know_each_other(launch: JobStarter) -> None:
    before = Path("/etc/hosts").read_bytes(), os.uname().nodename
    done = launch(0, RUN, "-n", "4", "--", *SPEAK)
    assert done.returncode == 0, done
    known = f"{address(0)} h1,{address(1)} h2"
    assert sorted(done.stdout.splitlines()) == [f"h1 {known}"] * 2 + [f"h2 {known}"] * 2
    assert (Path("/etc/hosts").read_bytes(), os.uname().nodename) == before


@nodes
def test_shared_memory_of_one_node_is_invisible_on_the_other(launch: JobStarter, tmp_path: Path) -> None:
    program = 'n=$(uname -n); touch /dev/shm/of-$n "$1/of-$n"; sleep 1; echo $n $(cd /dev/shm; ls -d of-*) $(ls $1)'
    shared = tmp_path / "shared"
    shared.mkdir()
    done = launch(0, RUN, "-n", "2", "--", "sh", "-c", program, "sh", shared)
    assert sorted(done.stdout.splitlines()) == ["h1 of-h1 of-h1 of-h2", "h2 of-h2 of-h1 of-h2"], done


@nodes
def test_exit_code_of_the_program_is_returned(launch: JobStarter) -> None:
    done = launch(0, RUN, "-n", "2", "--", "sh", "-c", "exit 3")
    assert done.returncode == 3 and not done.survivors


@nodes
@pytest.mark.parametrize("rate, bits", [("100mbit", 1e8), ("300mbit", 3e8)])
def test_the_cable_has_the_requested_rate_each_way(
    launch: JobStarter, tmp_path: Path, rate: str, bits: float
) -> None:
    role = "case $(uname -n) in h1) role=serve;; *) role=call;; esac"
    program = f'{role}; exec "$0" "$1" $role {address(0)} 7701 1 > "$2/$role"'
    ends = sys.executable, WIRE_PROGRAM, tmp_path
    done = launch(0, RUN, "-n", "2", "--rate", rate, "--", "sh", "-c", program, *ends)
    assert done.returncode == 0, done
    rates = [8 * float((tmp_path / role).read_text()) for role in ("serve", "call")]
    # The headers of TCP and Ethernet use part of the rate; on a busy machine it drops further.
    assert all(0.5 * bits < found < bits for found in rates), rates


@nodes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_an_ended_run_leaves_no_process(number: int, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    begun = tmp_path / "begun"
    program = f'echo $(uname -n) >> {begun}; trap "" TERM INT HUP; sleep 600'
    run = subprocess.Popen(
        [sys.executable, str(RUN), "-n", "4", "--", "sh", "-c", program],
        env=without_launcher({**os.environ, "MULTINODE_TEST": mark}),
        start_new_session=True,
    )
    try:
        assert _soon(lambda: begun.exists() and len(begun.read_text().split()) == 4)
        assert len(_marked(mark)) > 4
    finally:
        run.send_signal(number)
    try:
        assert run.wait(10) == (-number if number == signal.SIGKILL else 128 + number)
        assert _soon(lambda: not _marked(mark)), [_command(pid) for pid in _marked(mark)]
        assert WIRE not in os.listdir("/sys/class/net")
    finally:
        for pid in _marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@nodes
def test_two_runs_are_isolated(tmp_path: Path) -> None:
    command = [sys.executable, str(RUN), "-n", "2", "--", *SPEAK]
    env = without_launcher(os.environ)
    runs = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [(len(run.communicate(timeout=50)[0].splitlines()), run.returncode) for run in runs] == [(2, 0)] * 2


@pytest.mark.parametrize("option, word, code", [(["--or-skip"], "skipped", 0), ([], "error", 1)])
def test_only_the_or_skip_option_skips(launch: JobStarter, option: list[str], word: str, code: int) -> None:
    hidden = {"PATH": "/nowhere"}  # which hides all programs
    again = f"import os, sys; os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {hidden})"
    done = launch(0, "-c", again, RUN, *option)
    assert done.returncode == code and done.stdout.startswith(f"{word}: two nodes on one machine: "), done


@pytest.mark.parametrize("ranks", ["0", "3", "-2"])
def test_ranks_must_divide_over_the_nodes(launch: JobStarter, ranks: str) -> None:
    done = launch(0, RUN, "-n", ranks, "--", "true")
    assert done.returncode == 2 and f"{ranks} ranks cannot sit in equal numbers on 2 nodes" in done.stderr


def _soon(met: Callable[[], object], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not (found := met()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(found)


def _marked(mark: str) -> list[int]:
    """Return the processes that inherited the environment mark of a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return "gone"

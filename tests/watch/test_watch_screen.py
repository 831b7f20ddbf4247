"""``hpctrain watch``: what it prints at each width, the keys in a terminal, and what it imports."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.watched_runs import MakeRun, row

from hpctrain.cli.main import main


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, *words: str) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["watch", *words, "--once"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out  # the output is no terminal
    lines = out.splitlines()
    assert max(map(len, lines)) <= width
    return lines


def test_one_run_in_detail(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(job_ends=time.time() + 300.4)
    lines = printed(capsys, monkeypatch, 100, str(folder))
    said = "\n".join(lines)
    for wanted in (
        "8 ranks on n1 and 1 other node  fsdp, cuda  slurm 4711",
        "step 200 of 1,000  20.0%  2 steps/s  8,192 tokens/s",
        "ETA 6:40  job ends in 5:00",
        "█" * 12 + "░" * 48,
        "loss 2.015",
        "best  validation_loss 2.22 at step 150",
        "data 5%  forward 15%  backward 30%  communication 10%  optimizer 20%  saving 2%  other 18%",
        "of 2:20 until the last checkpoint: start-up 14%, steps 57%, checkpoints 4%",
        "newest checkpoint: step 200, written in 2.5 s",
        "the job ends before the last step: the run saves, and must be started again",
        "loss, validation_loss over 200 steps",
    ):
        assert wanted in said, wanted
    assert sum("⠁" <= character <= "⣿" for character in said) > 20


def test_a_start_of_a_finished_run_has_no_times_of_steps(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(status="finished", step_seconds=0.0)
    assert "until the last checkpoint" not in "\n".join(printed(capsys, monkeypatch, 100, str(folder)))


@pytest.mark.parametrize("width", [12, 20, 40, 80, 200])
def test_every_width_shows_what_fits(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    runs = [make_run(f"sweep/{name}", status=status) for name, status in (("a", "running"), ("b", "failed"))]
    lines = printed(capsys, monkeypatch, width, str(runs[0].parent))
    assert lines[1].split()[0] == "run" and lines[2].startswith("a") and lines[3].startswith("b"), lines
    if width >= 20:
        assert "running" in lines[2] and "failed" in lines[3]
    if width >= 80:
        assert lines[1].split() == [
            "run",
            "status",
            "step",
            "done",
            "loss",
            "valid.",
            "rate",
            "ETA",
            *lines[1].split()[8:],
        ]
    printed(capsys, monkeypatch, width, str(runs[1]))


def test_names_and_values_cannot_control_the_terminal(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run("a\x1b[31mb", status="failed", reason="x\x1b]0;title\x07 [bold]y[/bold]", host="h\x1b[2J")
    with open(folder / "metrics.jsonl", "a") as file:
        for step in (201, 202):
            file.write(json.dumps({**row(step, begun=0.0), "val\x1b[5m": 1.0}) + "\n")
    for words in ([str(folder)], [str(folder), str(make_run("c"))]):
        said = "\n".join(printed(capsys, monkeypatch, 200, *words))
        assert "[bold]y[/bold]" in said and "\x07" not in said


def test_json_has_all_of_it(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run()
    assert main(["watch", str(folder), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["folder"] == str(folder) and found["left"] == pytest.approx(400.0) and found["attempt"]["size"] == 8


@pytest.mark.parametrize("words", [["missing"], ["."], [".", "--json"], ["run", "--every", "0"], []])
def test_bad_words_are_one_line(
    make_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        sys.exit(main(["watch", *words]))
    err = capsys.readouterr().err.strip().splitlines()
    assert caught.value.code == 2 and err[-1].startswith("hpctrain") and "error: " in err[-1], err


def test_it_needs_neither_torch_nor_mpi_nor_numpy(make_run: MakeRun) -> None:
    program = "import sys; from hpctrain.cli.main import main; main(sys.argv[1:]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, "watch", str(make_run()), "--once"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and not {"torch", "mpi4py", "numpy", "h5py"} & set(done.stdout.split("\n")[-2].split())


# In a terminal --------------------------------------------------------------------------------------------------------


class Terminal:
    """Program in a pseudo-terminal: what it has written, and keys for it."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process, self._descriptor, self._said = process, descriptor, ""

    def until(self, wanted: str, seconds: float = 20.0) -> str:
        """Return what the program has written since the last call, when it contains a text."""
        deadline = time.monotonic() + seconds
        while wanted not in self._said:
            assert time.monotonic() < deadline, (wanted, self._said[-3000:])
            if select.select([self._descriptor], [], [], 0.1)[0]:
                with suppress(OSError):
                    self._said += os.read(self._descriptor, 65536).decode("utf-8", "replace")
        found, self._said = self._said, ""
        return found

    def press(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())


@contextmanager
def terminal(*words: str, rows: int = 24, columns: int = 80) -> Iterator[Terminal]:
    """Run ``hpctrain watch`` in a terminal of this size."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    command = [sys.executable, "-m", "hpctrain", "watch", *words]
    before = termios.tcgetattr(theirs)
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**environ, "TERM": "xterm"}
    ) as process:
        try:
            yield Terminal(process, ours)
            assert process.wait(20) == 0 and termios.tcgetattr(theirs) == before
        finally:
            process.kill()
            os.close(ours)
            os.close(theirs)


@pytest.mark.limit(120)
def test_keys_select_a_run_show_it_and_leave(make_run: MakeRun) -> None:
    runs = [make_run(f"runs/{name}") for name in ("one", "two", "three")]
    with terminal(*map(str, runs), "--every", "0.3") as seen:
        assert "enter details" in seen.until("q quit")
        seen.press("\x1b[B")
        seen.until("q quit")
        seen.press("\r")
        said = seen.until("next curve")
        assert "runs/two" in said and "loss, validation_loss over 200 steps" in said
        seen.press("c")
        seen.until("validation_loss over 200 steps")
        seen.press("b")
        seen.until("enter details")
        seen.press("q")


@pytest.mark.limit(120)
def test_new_steps_appear_and_a_deleted_run_is_said_to_be_gone(make_run: MakeRun) -> None:
    folder = make_run()
    with terminal(str(folder), "--every", "0.2", columns=60) as seen:
        seen.until("step 200 of 1,000")
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row(201, begun=time.time() - 100.5)) + "\n")
        seen.until("step 201 of 1,000")
        shutil.rmtree(folder)
        seen.until("unreadable")
        seen.press("q")


@pytest.mark.limit(120)
def test_a_tiny_terminal_shows_what_fits(make_run: MakeRun) -> None:
    with terminal(str(make_run("a")), str(make_run("b")), rows=5, columns=20) as seen:
        seen.until("run")
        seen.press("q")

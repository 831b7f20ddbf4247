"""Records of a run: lock, metrics, receipt and settings, written together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.disks import shared_disk
from support.training_fixtures import metrics_of, receipt_of

from hpctrain.cli.main import main
from hpctrain.errors import FileSystemError, LockError, UsageError
from hpctrain.train.metrics import Metrics
from hpctrain.train.receipt import write
from hpctrain.train.receipt.write import Receipt
from hpctrain.train.run_folder import RunFolder, TimeAccounting
from hpctrain.util.retry import VARIABLE


def test_an_attempt_writes_records_from_lock_to_release(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path, "42")
    run_folder.lock()
    assert json.loads((tmp_path / "lock.json").read_text())["job_id"] == "42"
    run_folder.open(3, "x = 1\n", {"size": 2})
    run_folder.record({"step": 4, "step_seconds": 0.5})
    run_folder.record({"step": 5, "step_seconds": 0.25})
    run_folder.rewind(4)
    run_folder.accounting.waited(0.125)
    run_folder.saved(4, 0.12345)
    with pytest.raises(LockError):
        RunFolder(tmp_path, "43").lock()
    run_folder.close("stopped", 4, "SIGUSR1")
    (row,) = metrics_of(tmp_path)
    assert row["step"] == 4 and abs(row["unix_time"] - time.time()) < 60
    assert (tmp_path / "config.toml").read_text() == "x = 1\n"
    (attempt,) = receipt_of(tmp_path)["attempts"]
    facts = {"size": 2, "first_step": 4, "step": 4, "saved_step": 4, "last_save_seconds": 0.123}
    spent = {"steps": 2, "step_seconds": 0.75, "repeated_steps": 1, "repeated_seconds": 0.25, "save_seconds": 0.125}
    assert (facts | spent | {"status": "stopped", "reason": "SIGUSR1"}).items() <= attempt.items()
    assert not (tmp_path / "lock.json").exists()


def test_other_ranks_write_no_records(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path, None)
    run_folder.record({"step": 1})
    run_folder.rewind(0)
    run_folder.saved(1, 1.0)
    run_folder.close("finished", 1, None)
    assert not list(tmp_path.iterdir())


def test_a_failing_receipt_still_releases_the_folder(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path, None)
    run_folder.lock()
    run_folder.open(0, None, {})
    (tmp_path / "run.json").unlink()
    (tmp_path / "run.json").mkdir()
    with pytest.raises(UsageError, match="run.json: is a directory"):
        run_folder.close("finished", 1, None)
    assert not (tmp_path / "lock.json").exists()


class FullMetrics(Metrics):
    """Metrics on a full disk."""

    def write(self, row: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        super().close()
        raise OSError(28, "No space left on device")


class FullReceipt(Receipt):
    """Receipt on a full disk."""

    def update(self, **facts: Any) -> None:
        raise OSError(28, "No space left on device")

    def end(self, status: str, **facts: Any) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("lenient", [False, True])
def test_failed_writes_of_records_stop_or_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lenient: bool
) -> None:
    run_folder = _opened(tmp_path, lenient=lenient, metrics=FullMetrics, receipt=FullReceipt)
    for note in (
        lambda: run_folder.record({"step": 1}),
        lambda: run_folder.saved(1, 0.1),
        lambda: run_folder.failed_save(1, "x", 1),
        lambda: run_folder.close("finished", 1, None),
    ):
        if lenient:
            note()
        else:
            with pytest.raises(OSError, match="no space left"):
                note()
    said = f"cannot write {tmp_path}/metrics.jsonl: No space left on device; continuing without it; this is said once"
    assert [record.getMessage() for record in caplog.records] == [said] * lenient


@pytest.mark.parametrize("lenient", [False, True])
def test_a_failure_is_not_hidden_by_records_that_cannot_be_closed(tmp_path: Path, lenient: bool) -> None:
    run_folder = _opened(tmp_path, lenient=lenient, metrics=FullMetrics, receipt=FullReceipt)
    run_folder.close("failed", 1, "CheckpointError: disk full")
    assert not (tmp_path / "lock.json").exists()


def _opened(folder: Path, last_step: int = 0, **options: Any) -> RunFolder:
    run_folder = RunFolder(folder, None, **options)
    run_folder.lock()
    run_folder.open(last_step, None, {})
    return run_folder


@pytest.mark.parametrize("how", ["deleted", "renamed", "replaced"])
def test_metrics_that_are_moved_during_a_run_continue_in_a_new_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    run_folder, path = _opened(tmp_path, check_every=0.0), tmp_path / "metrics.jsonl"
    run_folder.record({"step": 1})
    if how == "deleted":
        path.unlink()
    else:
        path.rename(tmp_path / "old.jsonl")
    if how == "replaced":
        path.write_text('{"step": 0}\n')
    run_folder.record({"step": 2})
    run_folder.record({"step": 3})
    assert [row["step"] for row in metrics_of(tmp_path)] == ([0, 2, 3] if how == "replaced" else [2, 3])
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"{path} was deleted, renamed or replaced") and "\n" not in said
    run_folder.close("finished", 3, None)


def test_the_place_of_the_metrics_is_checked_once_per_second(tmp_path: Path) -> None:
    run_folder, began = _opened(tmp_path, check_every=1.0), time.monotonic()
    run_folder.record({"step": 1})
    (tmp_path / "metrics.jsonl").unlink()
    for step in range(2, 50):
        run_folder.record({"step": step})
    assert time.monotonic() - began > 0.9 or not (tmp_path / "metrics.jsonl").exists()
    time.sleep(1.0)
    run_folder.record({"step": 100})
    assert [row["step"] for row in metrics_of(tmp_path)][-1] == 100
    run_folder.close("finished", 100, None)


@pytest.mark.parametrize("lenient", [False, True])
def test_a_link_in_place_of_the_metrics_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lenient: bool
) -> None:
    run_folder, other = _opened(tmp_path, lenient=lenient, check_every=0.0), tmp_path / "other"
    other.write_text("keep me\n")
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to(other)
    if lenient:
        run_folder.record({"step": 1})
        run_folder.record({"step": 2})
        assert len(caplog.records) == 1 and "it is a link; continuing without" in caplog.text
    else:
        with pytest.raises(UsageError, match="cannot write .*metrics.jsonl: it is a link"):
            run_folder.record({"step": 1})
    assert other.read_text() == "keep me\n"
    run_folder.close("failed", 1, "x")


def test_rows_do_not_reach_the_metrics_of_a_start_that_took_the_folder_over(tmp_path: Path) -> None:
    run_folder, lock = _opened(tmp_path, check_every=0.0), tmp_path / "lock.json"
    run_folder.record({"step": 1})
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "token": "another"}))
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(LockError, match="is now that of job"):
        run_folder.record({"step": 2})
    assert not (tmp_path / "metrics.jsonl").exists()
    run_folder.close("failed", 2, "LockError")


@pytest.mark.parametrize("damaged, said", [(1, "1 damaged row is left out"), (3, "3 damaged rows are left out")])
def test_damaged_rows_are_counted_in_a_warning_when_a_run_resumes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: int, said: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + '{"st\n' * damaged + '{"step": 2}\n{"step": 3, "lo')
    _opened(tmp_path, 2).close("finished", 2, None)
    assert [record.getMessage() for record in caplog.records] == [f"{path}: {said}, the first in line 2"]
    assert [row["step"] for row in metrics_of(tmp_path)] == [1, 2]


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "run.json", "failure.json"])
@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_folder_or_a_pipe_in_place_of_a_record_is_bad_input(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    if kind == "pipe" and name == "failure.json":
        pytest.skip("it is removed")
    os.mkdir(path) if kind == "folder" else os.mkfifo(path)
    run_folder = RunFolder(tmp_path, None)
    run_folder.lock()
    with pytest.raises(UsageError, match=f"(?i){path}: {'is a dir' if kind == 'folder' else 'it is not a regular'}"):
        run_folder.open(0, "x = 1\n", {})
    run_folder.close("failed", 0, None)


@pytest.mark.parametrize(
    "name, pages, rows", [("lock.json", 0, 0), ("run.json", 1, 0), ("config.toml", 2, 0), ("metrics.jsonl", 2, 1)]
)
def test_a_full_disk_at_the_start_names_the_file_and_the_free_bytes(
    tmp_path: Path, comm: Any, monkeypatch: pytest.MonkeyPatch, name: str, pages: int, rows: int
) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    with shared_disk(tmp_path / "disk", comm) as disk:
        (disk.folder / "other").write_text("x")  # size=0 would be without a limit
        if rows:
            (disk.folder / "metrics.jsonl").write_text('{"step": 1}\n')
        disk.leave(pages * os.sysconf("SC_PAGE_SIZE"))
        run_folder = RunFolder(disk.folder, None)
        said = f"cannot write {disk.folder / name}: no space left on device, [0-9]+ bytes are free in {disk.folder};"
        with pytest.raises(FileSystemError, match=said):
            run_folder.lock()
            run_folder.open(1, "x = 1\n", {})
        run_folder.close("failed", 1, None)


def test_failed_saves_are_counted(tmp_path: Path) -> None:
    run_folder = RunFolder(tmp_path, None)
    run_folder.lock()
    run_folder.open(0, None, {})
    run_folder.failed_save(4, "disk full", 1)
    run_folder.failed_save(6, "quota", 2)
    (attempt,) = receipt_of(tmp_path)["attempts"]
    assert attempt["failed_saves"] == 2 and attempt["last_failed_save"] == {"step": 6, "reason": "quota"}
    run_folder.close("finished", 8, None)


def test_the_receipt_is_written_at_intervals(tmp_path: Path) -> None:
    writes: list[int] = []

    class Counted(Receipt):
        """Receipt whose updates are counted."""

        def update(self, **facts: Any) -> None:
            writes.append(1)
            super().update(**facts)

    run_folder = _opened(tmp_path, receipt=Counted)
    for step in range(1, 50):
        run_folder.record({"step": step, "step_seconds": 1.0})
        written = receipt_of(tmp_path)["attempts"][0]["steps"]
        assert (written, len(writes)) == ((1, 1) if step <= 20 else (20, 2))
        if step == 20:
            run_folder.saved(20, 0.1)
            assert len(writes) == 2 and receipt_of(tmp_path)["attempts"][0]["step"] == 20
    run_folder.close("failed", 49, "KeyError: 'a'\nmore", 0)
    (attempt,) = receipt_of(tmp_path)["attempts"]
    assert (attempt["reason"], attempt["failed_rank"], attempt["steps"]) == ("KeyError: 'a'", 0, 49)


def _kill(run_folder: RunFolder) -> None:
    """Simulate a kill: leave all files of the records as they are."""
    (run_folder.folder / "lock.json").unlink()


def test_a_kill_between_receipt_and_metrics_loses_no_count(tmp_path: Path) -> None:
    """The next attempt counts the steps that it will repeat, and dies before it removes them from the metrics."""
    run_folder = RunFolder(tmp_path, None)
    run_folder.lock()
    run_folder.open(0, None, {})
    for step in (1, 2, 3):
        run_folder.record({"step": step, "step_seconds": 1.0})
        if step == 2:
            run_folder.saved(2, 0.1)
    before = (tmp_path / "metrics.jsonl").read_text()
    _kill(run_folder)
    time.sleep(1.1)  # smaller differences are within the error of clocks
    for _ in range(2):
        again = RunFolder(tmp_path, None)
        again.lock()
        again.open(2, None, {})
        _kill(again)
        (tmp_path / "metrics.jsonl").write_text(before)
    first, second, _ = receipt_of(tmp_path)["attempts"]
    assert (first["status"], first["steps"], first["repeated_steps"]) == ("killed", 3, 1)
    assert (second["status"], second["steps"], second.get("repeated_steps")) == ("killed", 0, None)


# Time of an attempt by category, with a clock that the test sets ------------------------------------------------------


def test_every_second_has_a_category() -> None:
    now = [100.0]
    tally = TimeAccounting(age=4.0, clock=lambda: now[0])

    def pass_(seconds: float) -> None:
        now[0] += seconds

    pass_(2.0)
    assert tally.facts()["startup_seconds"] == tally.elapsed == 6.0
    for step in (11, 12):
        pass_(3.0)
        assert tally.step({"step": step, "step_seconds": 3.0, "tokens": 10 * step}) is (step == 11)
    pass_(0.5)
    tally.waited(0.5)
    pass_(1.0)  # in no category
    facts = tally.facts()
    assert facts == {
        "elapsed_seconds": 13.5,
        "startup_seconds": 6.0,
        "step_seconds": 6.0,
        "save_seconds": 0.5,
        "steps": 2,
        "step": 12,
        "tokens": 120,
    }
    tally.rewind(11)
    assert tally.facts() == facts | {"step": 11}


def test_a_wait_before_the_first_step_is_not_counted_twice() -> None:
    now = [0.0]
    tally = TimeAccounting(age=0.0, clock=lambda: now[0])
    now[0] = 5.0
    tally.waited(2.0)
    assert tally.facts()["startup_seconds"] == 3.0
    now[0] = 6.0
    tally.step({"step": 1, "step_seconds": 1.0})
    assert tally.facts()["startup_seconds"] == 3.0 and "tokens" not in tally.facts()


def test_the_first_attempt_of_a_process_starts_with_the_process() -> None:
    code = (
        "from hpctrain.train.run_folder import TimeAccounting, process_age; age = process_age(); "
        "print(TimeAccounting().elapsed - age, TimeAccounting().elapsed - age)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = map(float, done.stdout.split())
    assert first >= 0 > second


def test_the_age_of_a_process_is_measured() -> None:
    code = "import time; from hpctrain.train.run_folder import process_age; time.sleep(0.3); print(process_age())"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.3 <= float(done.stdout) <= time.monotonic() - began + 0.05


# Folders of runs prepared with links: no file outside of the folder is written, no history is lost --------------------


RECORDS = ("config.toml", "run.json", "metrics.jsonl", "failure.json")


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "bashrc"
    path.write_text("keep me\n")
    return path


@pytest.mark.parametrize("dangling", [False, True])
def test_records_are_not_written_through_links(tmp_path: Path, precious: Path, dangling: bool) -> None:
    folder, planted = tmp_path / "run", tmp_path / "planted"
    folder.mkdir()
    for name in RECORDS:
        if name != "run.json" or dangling:
            (folder / name).symlink_to(planted if dangling else precious)
    for pid in range(os.getpid() - 3, os.getpid() + 3):
        for name in RECORDS:
            (folder / f".{name}.tmp-{pid}").symlink_to(precious)
    run_folder = RunFolder(folder, None)
    run_folder.lock()
    run_folder.open(0, "x = 1\n", {})
    run_folder.record({"step": 1})
    write.FailureRecord(folder, 0).say("an end", 1)
    run_folder.rewind(0)
    run_folder.close("finished", 1, None)
    assert precious.read_text() == "keep me\n" and not planted.exists()
    assert (folder / "config.toml").read_text() == "x = 1\n"
    assert not any((folder / name).is_symlink() for name in RECORDS)


def test_metrics_are_not_written_through_hard_links(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "metrics.jsonl").hardlink_to(precious)
    metrics = Metrics(tmp_path, 0)
    metrics.write({"step": 1})
    metrics.close()
    assert precious.read_text() == "keep me\n"


@pytest.mark.parametrize(
    "words",
    [
        ["modulefile", "lua", "--root", "/apps/x", "-o", "out.svg"],
        ["plan", "--schedule", "1f1b", "--pipe", "2", "--microbatches", "2", "-o", "out.svg"],
        ["data", "pack", "bashrc", "-o", "out.svg", "--force"],
    ],
)
def test_outputs_replace_links(
    tmp_path: Path, precious: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("out.svg").symlink_to(precious)
    assert main(words) == 0
    assert precious.read_text() == "keep me\n" and Path("out.svg").stat().st_size and not Path("out.svg").is_symlink()

"""Trace of a run: the file, the spans of every rank, and the figure of a step."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.train_runs import Legs
from support.training_fixtures import Training, make_batches

from hpctrain import trace
from hpctrain.errors import SettingsError, UsageError
from hpctrain.trace import Recording, Span
from hpctrain.train.config import TrainSettings
from hpctrain.train.options import RunOptions
from hpctrain.train.profile.read import read
from hpctrain.train.profile.record import clock_offsets, events, merge_traces

STEPS = 8


class Traced(Training):
    """Training in a loop that opens no spans itself."""

    def __init__(self, job: Any, folder: Path, **options: Any) -> None:
        super().__init__(job, folder, make_batches(10), steps=STEPS, **{"every": 4, "trace": True, **options})

    def go(self, before: Any = lambda step, batch: None) -> Traced:
        super().go(before)
        self.job.comm.barrier()  # rank 0 writes
        return self


def spans_of(folder: Path) -> list[dict[str, Any]]:
    found = json.loads((folder / "trace.json").read_text())
    assert found["otherData"]["format"] == "hpctrain-trace"
    return [event for event in found["traceEvents"] if event["ph"] == "X"]


@pytest.mark.ranks(1, 2, 3)
def test_the_file_contains_spans_of_every_rank(job: Any, shared_tmp_path: Path) -> None:
    Traced(job, shared_tmp_path, trace_steps=(3, 5)).go()
    spans = spans_of(shared_tmp_path)
    for rank in range(job.size):
        own = Counter(span["name"] for span in spans if span["args"]["rank"] == rank)
        # A checkpoint is copied, then waited for.
        assert own["step"] == own["forward"] == own["backward"] == own["optimizer"] == own["data"] == 3
        assert own["checkpoint"] >= 2
        assert (own["reduce"] >= 6) == (job.size > 1)  # gradients, and the exchange after a step
        assert [s["args"]["step"] for s in spans if s["name"] == "step" and s["args"]["rank"] == rank] == [3, 4, 5]
        saved = [span["args"].get("step") for span in spans if span["name"] == "checkpoint"]
        assert set(saved) == {4, None}
    assert {span["pid"] for span in spans} == set(job.comm.all_gather_object(job.node))
    assert {span["tid"] for span in spans} == set(range(job.size))


@pytest.mark.ranks(1, 2, 3)
def test_spans_of_a_thread_are_nested(job: Any, shared_tmp_path: Path) -> None:
    Traced(job, shared_tmp_path, trace_steps=(1, STEPS)).go()
    for thread in range(job.size):
        around: list[float] = []
        for span in (each for each in spans_of(shared_tmp_path) if each["tid"] == thread):
            begin, end = round(span["ts"] * 1000), round((span["ts"] + span["dur"]) * 1000)
            while around and around[-1] <= begin:
                around.pop()
            assert not around or end <= around[-1], span
            around.append(end)


@pytest.mark.ranks(1, 2)
def test_a_step_is_read_back_as_a_timeline(job: Any, shared_tmp_path: Path) -> None:
    Traced(job, shared_tmp_path, trace_steps=(3, 5)).go()
    found, second = read(shared_tmp_path), read(shared_tmp_path / "trace.json", 4)
    assert (found.step, second.step) == (5, 4)
    assert found.names == tuple(f"rank {rank}" for rank in range(job.size))
    for measured in (found, second):
        timeline = measured.timeline
        for row in timeline.rows:
            work = [span.name for span in row if span.name in ("forward", "backward", "optimizer")]
            assert work == ["forward", "backward", "optimizer"]
        assert 0 < timeline.makespan < 60_000 and 0 <= timeline.bubble < 1
        names = {span.name for row in timeline.rows for span in row}
        assert names <= {"forward", "backward", "optimizer", "reduce", "wait", "send", "receive"}
    with pytest.raises(UsageError, match="trace.json holds no step 9: it holds 3 to 5"):
        read(shared_tmp_path, 9)


@pytest.mark.ranks(1, 2)
def test_a_measured_step_is_drawn(job: Any, shared_tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from hpctrain.cli.main import main

    Traced(job, shared_tmp_path).go()
    if job.rank == 0:
        picture = shared_tmp_path / "measured.png"
        assert main(["plan", "--measured", str(shared_tmp_path), "-o", str(picture)]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_trace_without_passes_is_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hpctrain.cli.main import main

    spans = [["step", 0, 9_000, 4, {"step": 1}], ["optimizer", 1_000, 2_000, 4, {}]]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": list(events([report(0, spans)]))}))
    assert main(["plan", "--measured", str(tmp_path)]) == 2
    assert "trace.json has no passes to draw: in a loop of your own, open a span" in capsys.readouterr().err


@pytest.mark.ranks(1, 2)
def test_a_run_that_ends_early_writes_its_spans(job: Any, shared_tmp_path: Path) -> None:
    Traced(job, shared_tmp_path, trace_steps=(7, 20)).go()
    assert {span["args"]["step"] for span in spans_of(shared_tmp_path) if span["name"] == "step"} == {7, 8}
    assert not trace.recording


@pytest.mark.ranks(1, 2)
def test_without_tracing_no_file_is_written(job: Any, shared_tmp_path: Path) -> None:
    Traced(job, shared_tmp_path / "off", trace=False).go()
    Traced(job, shared_tmp_path / "late", trace_steps=(9, 12)).go()
    assert not list(shared_tmp_path.rglob("trace.json*"))


@pytest.mark.ranks(1, 2)
def test_a_failed_run_discards_spans_and_the_next_may_trace(job: Any, shared_tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(step: int, batch: torch.Tensor) -> None:
        if step == 7:
            raise Stop

    with pytest.raises(Stop):
        Traced(job, shared_tmp_path, trace_steps=(6, 8)).go(stop)
    job.comm.barrier()
    assert not trace.recording and not (shared_tmp_path / "trace.json").exists()
    Traced(job, shared_tmp_path, trace_steps=(1, 2)).go()  # counted from this attempt, which resumes after step 4
    assert {span["args"]["step"] for span in spans_of(shared_tmp_path) if span["name"] == "step"} == {5, 6}


@pytest.mark.ranks(1, 2)
def test_an_unwritable_trace_is_a_warning(job: Any, shared_tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if job.rank == 0:
        (shared_tmp_path / "trace.json" / "in the way").mkdir(parents=True)
    job.comm.barrier()
    training = Traced(job, shared_tmp_path, trace_steps=(1, 2)).go()
    assert training.run.step == STEPS
    assert ("trace.json: Is a directory; continuing without" in caplog.text) == (job.rank == 0)


@pytest.mark.ranks(1, 2, 3)
def test_all_ranks_are_aligned_to_one_clock(comm: Any, shared_tmp_path: Path) -> None:
    """Ranks have simultaneous spans, measured by clocks that are 1000 s ahead per rank."""
    spans = [Span("forward", 5.0, 5.5, 1), Span("backward", 5.5, 7.0, 1)]
    moved = [Span(each.name, each.start + 1000 * comm.rank, each.end + 1000 * comm.rank, 1) for each in spans]
    path = shared_tmp_path / "trace.json"
    recording = Recording(moved, dropped=comm.rank)
    merge_traces(comm, recording, path, coordinates=f"pipe {comm.rank}", ahead=1000.0 * comm.rank)
    comm.barrier()
    found = json.loads((shared_tmp_path / "trace.json").read_text())
    assert found["otherData"] == {"format": "hpctrain-trace", "ranks": comm.size, "dropped": sum(range(comm.size))}
    times = [(event["name"], event["ts"], event["dur"]) for event in found["traceEvents"] if event["ph"] == "X"]
    assert times == [("forward", 0, 500_000), ("backward", 500_000, 1_500_000)] * comm.size
    names = [event["args"]["name"] for event in found["traceEvents"] if event["name"] == "thread_name"]
    assert names == [f"rank {rank} (pipe {rank})" for rank in range(comm.size)]


@pytest.mark.few(1)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_run_from_a_file_traces(leg: Legs, comm: Any, project: Path, name: str) -> None:
    words = ["train.steps=6", "train.accumulate=2", "train.trace=true", "train.trace_steps=[2, 4]"]
    leg(name, f"traced_{name}", *words)
    comm.barrier()
    folder = project / f"traced_{name}"
    for rank in range(comm.size):
        own = Counter(span["name"] for span in spans_of(folder) if span["args"]["rank"] == rank)
        assert own["step"] == own["optimizer"] == 3 and own["forward"] == own["backward"] == 6
    assert read(folder).step == 4


# The format, without a run --------------------------------------------------------------------------------------------


def report(rank: int, spans: list[list[Any]], **more: Any) -> dict[str, Any]:
    return {"rank": rank, "node": rank // 2, "host": "", "coordinates": "", "dropped": 0, "spans": spans, **more}


def test_events_have_the_format_of_chrome() -> None:
    spans = [["reduce", 5_000, 6_500, 77, {"operation": "all_reduce"}], ["step", 4_000, 9_000, 77, {"step": 1}]]
    other = report(1, [["forward", 4_250, 4_251, 8, {}]], host="n1", coordinates="pipe 1")
    found = list(events([report(0, spans), other]))
    names = {(event["name"], event["pid"], event.get("tid")): event["args"] for event in found if event["ph"] == "M"}
    assert names["process_name", 0, None] == {"name": "node 0 (n1)"}  # the last one is used
    assert names["thread_name", 0, 0] == {"name": "rank 0"}
    assert names["thread_name", 0, 1] == {"name": "rank 1 (pipe 1)"}
    assert names["thread_sort_index", 0, 1] == {"sort_index": 1000}, "all rows of rank 0 come first"
    step, reduce, forward = [event for event in found if event["ph"] == "X"]
    assert (step["name"], step["cat"], step["ts"], step["dur"], step["tid"]) == ("step", "step", 0, 5, 0)
    assert (reduce["cat"], reduce["ts"], reduce["dur"]) == ("communication", 1, 1.5)
    assert reduce["args"] == {"rank": 0, "operation": "all_reduce"}
    assert (forward["cat"], forward["ts"], forward["dur"], forward["tid"]) == ("computation", 0.25, 0.001, 1)


def test_other_threads_of_a_rank_have_distinct_numbers() -> None:
    spans = [["send", 1_000, 2_000, 5, {}], ["step", 0, 9_000, 4, {"step": 1}]]
    found = list(events([report(0, spans), report(1, spans), report(2, [])]))
    threads = {(event["name"], event["args"]["rank"]): event["tid"] for event in found if event["ph"] == "X"}
    assert threads == {("step", 0): 0, ("send", 0): 3, ("step", 1): 1, ("send", 1): 4}
    texts = [event["args"]["name"] for event in found if event["name"] == "thread_name"]
    assert texts == ["rank 0", "rank 0, thread 2", "rank 1", "rank 1, thread 2", "rank 2"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "is not a trace of hpctrain: ValueError it is not JSON"),
        ("[1]", "is not a trace of hpctrain: TypeError"),
        ('{"traceEvents": [{"ph": "X", "ts": "soon"}]}', "is not a trace of hpctrain"),
        ('{"traceEvents": []}', "holds no complete step"),
    ],
)
def test_files_that_are_not_traces_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        read(tmp_path)


def test_a_missing_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="trace.json does not exist: a run with train.trace = true writes it"):
        read(tmp_path)


def test_a_step_that_one_rank_did_not_end_is_ignored(tmp_path: Path) -> None:
    steps = [["step", 0, 9, 1, {"step": 1}], ["step", 10, 19, 1, {"step": 2}], ["forward", 1, 2, 1, {}]]
    found = {"traceEvents": list(events([report(0, steps), report(1, [steps[0]])]))}
    (tmp_path / "trace.json").write_text(json.dumps(found))
    assert read(tmp_path).step == 1
    with pytest.raises(UsageError, match="holds no step 2: it holds 1 to 1"):
        read(tmp_path, 2)


@pytest.mark.parametrize("steps", [(), (3,), (0, 4), (5, 4), (1, 2, 3)])
def test_wrong_ranges_of_steps_are_refused(steps: tuple[int, ...]) -> None:
    with pytest.raises(SettingsError, match="setting train.trace_steps = .*: give the first and the last step to"):
        TrainSettings(trace_steps=steps)
    with pytest.raises(UsageError, match="a run with trace_steps = "):
        RunOptions(trace_steps=steps)


# Clock offsets between nodes, without messages on one node ------------------------------------------------------------


@pytest.mark.ranks
def test_ranks_of_one_node_share_a_clock(comm: Any) -> None:
    if comm.nodes > 1:
        assert len(set(clock_offsets(comm))) <= comm.nodes
        return
    with comm.transport.recording() as sent:
        assert clock_offsets(comm, clock=lambda: comm.rank * 1000.0) == [0.0] * comm.size
    assert not sent.calls["send"] and not sent.calls["isend"]


@pytest.mark.ranks
def test_clock_offsets_are_measured(comm: Any) -> None:
    """Each rank simulates a node whose clock is 1000 s ahead per rank; an answer takes far less than the tolerance."""
    nodes = list(range(comm.size))
    found = clock_offsets(comm, clock=lambda: time.monotonic() + 1000.0 * comm.rank, nodes=nodes)
    base = comm.all_gather_object(time.monotonic())
    assert max(base) - min(base) < 100 or comm.nodes > 1
    assert found == pytest.approx([1000.0 * rank for rank in nodes], abs=1.0)
    assert comm.all_gather_object(found) == [found] * comm.size


@pytest.mark.ranks(3, 4)
def test_ranks_use_the_clock_of_the_first_rank_of_their_node(comm: Any) -> None:
    nodes = [0, *([1] * (comm.size - 1))]
    found = clock_offsets(comm, clock=lambda: time.monotonic() + 1000.0 * comm.rank, nodes=nodes)
    assert found[0] == 0 and found[1] == pytest.approx(1000, abs=1.0) and set(found[1:]) == {found[1]}

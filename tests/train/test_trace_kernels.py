"""Operators and GPU kernels in the timeline of a run: their times, their rows, and their place beside the spans."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training_fixtures import Training, make_batches
from torch.profiler import record_function

from hpctrain import trace
from hpctrain.errors import UsageError
from hpctrain.trace import Recording
from hpctrain.train.options import RunOptions
from hpctrain.train.profile.kernels import MARKER, KernelRecorder, activities_of
from hpctrain.train.profile.read import read
from hpctrain.train.profile.record import Tracing, clock_offsets, merge_traces

CLOSE = 200.0  # microseconds between two calls that a busy machine may separate


def events_of(folder: Path) -> list[dict[str, Any]]:
    with gzip.open(folder / "trace-kernels.json.gz") as file:
        found = json.load(file)
    assert found["otherData"]["format"] == "hpctrain-trace"
    events: list[dict[str, Any]] = found["traceEvents"]
    return events


def named(events: list[dict[str, Any]], name: str, rank: int) -> list[tuple[float, float]]:
    """Return start and end of the events of a rank with a name, by time."""
    found = [
        event for event in events if event["ph"] == "X" and event["name"] == name and event["args"]["rank"] == rank
    ]
    return sorted((event["ts"], event["ts"] + event["dur"]) for event in found)


def rows(events: list[dict[str, Any]]) -> list[str]:
    return [event["args"]["name"] for event in events if event["name"] == "thread_name"]


@pytest.mark.ranks(1, 2, 3)
def test_operators_of_all_ranks_lie_in_the_steps(job: Any, shared_tmp_path: Path) -> None:
    training = Training(job, shared_tmp_path, make_batches(8), steps=8, trace_kernels=True, trace_steps=(3, 5))

    def body(step: int, batch: torch.Tensor) -> None:
        with trace.span("own", microbatch=step), record_function(f"batch {step}"):
            torch.sigmoid(torch.zeros(3))

    training.go(body)
    job.comm.barrier()  # rank 0 writes
    events = events_of(shared_tmp_path)
    assert rows(events) == [text for rank in range(job.size) for text in (f"rank {rank}", f"rank {rank}, operators")]
    for rank in range(job.size):
        steps = named(events, "step", rank)
        sigmoids, spans = named(events, "aten::sigmoid", rank), named(events, "own", rank)
        assert len(steps) == len(sigmoids) == len(spans) == 3
        for (begin, end), (first, last), (opened, closed) in zip(steps, sigmoids, spans):
            assert begin < opened - 1 and closed < end
            # The operator ran inside of the span, on another clock.
            assert opened - CLOSE < first < last < closed + CLOSE
        annotations = [named(events, f"batch {step}", rank) for step in range(1, 9)]
        assert [len(each) for each in annotations] == [0, 0, 1, 1, 1, 0, 0, 0], "only the traced steps"
    assert not [event for event in events if event["name"] == MARKER]
    plain = json.loads((shared_tmp_path / "trace.json").read_text())["traceEvents"]
    assert not [event for event in plain if event.get("cat") == "cpu_op"] and read(shared_tmp_path).step == 5


@pytest.mark.ranks(2, 3)
def test_chosen_ranks_record_and_the_others_only_have_spans(job: Any, shared_tmp_path: Path) -> None:
    options = {"trace_kernels": True, "kernel_ranks": [1], "trace_steps": (2, 2)}
    Training(job, shared_tmp_path, make_batches(8), steps=3, **options).go()
    job.comm.barrier()
    operators = Counter(event["args"]["rank"] for event in events_of(shared_tmp_path) if event.get("cat") == "cpu_op")
    assert set(operators) == {1}
    assert rows(events_of(shared_tmp_path)) == ["rank 0", "rank 1", "rank 1, operators", "rank 2"][: job.size + 1]


@pytest.mark.ranks(1, 2)
def test_a_run_computes_the_same_while_it_records(job: Any, shared_tmp_path: Path) -> None:
    weights = []
    for name in ("off", "on"):
        torch.manual_seed(0)
        training = Training(job, shared_tmp_path / name, make_batches(8), steps=6, trace_kernels=name == "on")
        weights.append([each.detach().clone() for each in training.go().model.parameters()])
    job.comm.barrier()
    assert all(map(torch.equal, *weights))
    assert not (shared_tmp_path / "off" / "trace-kernels.json.gz").exists()


@pytest.mark.ranks(2)
def test_no_receive_ends_before_its_send_begins(comm: Any, shared_tmp_path: Path) -> None:
    """Also if the clock of rank 1 is 1000 s ahead: only messages between the ranks show that."""
    ahead = 1000 * comm.rank
    recorder = KernelRecorder()
    recorder.start()
    trace.start()
    for number in range(50):
        sends = comm.rank == number % 2
        name = f"{'send' if sends else 'receive'} {number}"
        with trace.span(name), record_function(f"operator: {name}"):
            if sends:
                time.sleep(0.0005 * (number % 3))
                comm.send(torch.zeros(4), 1 - comm.rank)
            else:
                comm.recv(torch.zeros(4), 1 - comm.rank)
    recording, activities = trace.take(), recorder.stop()
    moved = [replace(span, start=span.start + ahead, end=span.end + ahead) for span in recording.spans]
    for event in activities.events:
        event[3] += ahead * 10**9
    found = clock_offsets(comm, clock=lambda: time.monotonic() + ahead, nodes=[0, 1])[comm.rank]
    assert abs(found - ahead) < 0.01
    merge_traces(comm, Recording(moved), shared_tmp_path / "trace.json", ahead=found, activities=activities)
    comm.barrier()
    events = events_of(shared_tmp_path)
    for kind in ("", "operator: "):
        for number in range(50):
            ((sent, _),) = named(events, f"{kind}send {number}", number % 2)
            ((_, received),) = named(events, f"{kind}receive {number}", 1 - number % 2)
            assert received > sent, (kind, number)


def test_a_profiler_of_the_program_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    from torch.profiler import ProfilerActivity, profile

    recorder = KernelRecorder()
    with profile(activities=[ProfilerActivity.CPU]) as own:
        recorder.start()
        torch.sigmoid(torch.zeros(3))
        assert recorder.stop() is None
    assert "torch.profiler is in use by the program" in caplog.text
    assert "aten::sigmoid" in {each.key for each in own.key_averages()}


@pytest.mark.ranks(1, 2)
def test_a_profiler_that_the_program_starts_meanwhile_is_a_warning(
    job: Any, shared_tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.profiler import ProfilerActivity, profile

    own = profile(activities=[ProfilerActivity.CPU])

    def body(step: int, batch: torch.Tensor) -> None:
        if step == 4:
            own.start()
        if step == 6:
            own.stop()

    options = {"trace_kernels": True, "trace_steps": (3, 5)}
    training = Training(job, shared_tmp_path, make_batches(8), steps=8, **options).go(body)
    job.comm.barrier()
    assert training.run.step == 8 and "the trace has no kernels of this rank" in caplog.text
    assert read(shared_tmp_path).step == 5 and not (shared_tmp_path / "trace-kernels.json.gz").exists()


class SlowRecorder(KernelRecorder):
    def start(self) -> None:
        if self.records:
            time.sleep(1.0)
        super().start()


@pytest.mark.ranks(2)
def test_the_start_of_the_profiler_is_not_a_part_of_the_step(comm: Any, shared_tmp_path: Path) -> None:
    tracing = Tracing(comm, shared_tmp_path, (2, 3), "", SlowRecorder(comm.rank == 1), True)
    for step in range(1, 5):
        tracing.begin_step(step)
        comm.barrier()
        tracing.end_step()
    comm.barrier()
    for rank in range(2):
        assert all(end - begin < 0.9e6 for begin, end in named(events_of(shared_tmp_path), "step", rank))


@pytest.mark.ranks(1, 2)
def test_steps_beyond_the_end_are_a_warning(job: Any, shared_tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Training(job, shared_tmp_path, make_batches(8), steps=3, trace_kernels=True, trace_steps=(60, 70)).go()
    said = "no trace was written: this start of the run had 3 steps, the first one to trace is 60"
    assert (said in caplog.text) == (job.rank == 0)


@pytest.mark.ranks(1, 2)
def test_wrong_ranks_are_refused(job: Any, shared_tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"kernel_ranks = \[7\]: this job has the ranks 0 to {job.size - 1}"):
        Training(job, shared_tmp_path, make_batches(8), trace_kernels=True, kernel_ranks=[0, 7])
    with pytest.raises(UsageError, match=r"kernel_ranks = \[0\]: nothing is recorded without trace_kernels = true"):
        Training(job, shared_tmp_path, make_batches(8), trace=True, kernel_ranks=[0])


def test_off_is_the_default_and_the_first_ranks_are_those_that_record() -> None:
    def recording(size: int, **options: Any) -> list[int]:
        recorders = [RunOptions(**options).kernels(rank, size) for rank in range(size)]
        return [rank for rank, recorder in enumerate(recorders) if recorder is not None and recorder.records]

    assert not recording(9) and RunOptions().traced is None
    assert recording(9, trace_kernels=True) == [*range(8)] and RunOptions(trace_kernels=True).traced == (3, 12)
    assert recording(99, trace_kernels=True, kernel_ranks=[3, 98]) == [3, 98]


# Events of GPUs, made up in the format of torch.profiler --------------------------------------------------------------


def event(name: str, kind: str, at: float, length: float, pid: int, tid: int, **facts: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": kind, "ts": at, "dur": length, "pid": pid, "tid": tid, "args": facts}


def test_kernels_follow_their_launches_on_rows_of_their_streams(comm: Any, tmp_path: Path) -> None:
    found = [
        event(MARKER, "user_annotation", 5_000_000.0, 2.0, 900, 901),  # 3 us after the first time
        event(MARKER, "user_annotation", 5_000_100.0, 2.0, 900, 901),  # 3 us before the second time
        event("aten::mm", "cpu_op", 5_000_020.0, 10.0, 900, 901),
        event("cudaLaunchKernel", "cuda_runtime", 5_000_025.0, 2.0, 900, 901, correlation=8),
        event("gemm", "kernel", 5_000_040.5, 30.25, 0, 7, stream=7, grid=[2, 1, 1], correlation=8, device=0),
        event("Memcpy HtoD", "gpu_memcpy", 5_000_050.0, 3.0, 0, 13, stream=13, bytes=64),
        event("aten::add", "cpu_op", 5_000_060.0, 1.0, 900, 955),
        {"ph": "s", "id": 8, "cat": "ac2g", "name": "ac2g", "ts": 5_000_025.0, "pid": 900, "tid": 901},
        {"ph": "f", "id": 8, "cat": "ac2g", "name": "ac2g", "ts": 5_000_040.5, "pid": 0, "tid": 7, "bp": "e"},
        {"ph": "M", "name": "process_name", "pid": 900, "tid": 0, "args": {"name": "python"}},
        event("PyTorch Profiler (0)", "Trace", 5_000_000.0, 200.0, 900, 1),
    ]
    marks = [(1_000_000_000, 1_000_020_000), (1_000_085_000, 1_000_108_000)]
    made = activities_of(found, marks)
    assert made.rows == ["operators", "operators, thread 2", "GPU 0, stream 7", "GPU 0, stream 13"]
    # The markers allow 1000000000 .. 1000018000 and 999985000 .. 1000006000 for the time 5000000 us.
    begun = {each[1]: each[3] - 1_000_003_000 for each in made.events}
    assert begun == {
        "aten::mm": 20_000,
        "cudaLaunchKernel": 25_000,
        "gemm": 40_500,
        "Memcpy HtoD": 50_000,
        "aten::add": 60_000,
    }
    merge_traces(comm, Recording(), tmp_path / "trace.json", ahead=0.5, activities=made)
    events = events_of(tmp_path)
    assert rows(events) == ["rank 0", *(f"rank 0, {row}" for row in made.rows)]
    threads = {each["args"]["name"]: each["tid"] for each in events if each["name"] == "thread_name"}
    (kernel,) = [each for each in events if each["name"] == "gemm"]
    assert kernel["tid"] == threads["rank 0, GPU 0, stream 7"] and kernel["dur"] == 30.25
    assert kernel["args"] == {"rank": 0, "stream": 7, "grid": [2, 1, 1], "correlation": 8} and kernel["ts"] == 20.5
    begin, end = [each for each in events if each.get("cat") == "ac2g"]
    assert (begin["ph"], end["ph"], begin["ts"], end["ts"]) == ("s", "f", 5.0, 20.5) and begin["id"] == end["id"]
    assert (begin["tid"], end["tid"]) == (threads["rank 0, operators"], kernel["tid"])


def test_lost_markers_are_an_error() -> None:
    with pytest.raises(ValueError, match="recorded 0 of 1 markers"):
        activities_of([], [(1, 2)])


def test_spans_are_ranges_of_nvtx_while_kernels_are_recorded() -> None:
    class Ranges:
        calls: list[str] = []

        def range_push(self, text: str) -> None:
            self.calls.append(text)

        def range_pop(self) -> None:
            self.calls.append("end")

    ranges = Ranges()
    trace.start(ranges=ranges)
    with trace.span("forward", microbatch=2):
        with trace.span("reduce"):
            pass
    trace.take()
    with trace.span("after"):
        pass
    assert ranges.calls == ["forward microbatch=2", "reduce", "end", "end"]


@pytest.mark.gpu
def test_kernels_of_a_gpu_run_after_their_launches(job: Any, shared_tmp_path: Path) -> None:
    recorder = KernelRecorder()
    weights = torch.rand(512, 512, device="cuda")
    recorder.start()
    trace.start(ranges=recorder.ranges)
    with trace.span("forward"):
        (weights @ weights).sum().item()
    recording, activities = trace.take(), recorder.stop()
    merge_traces(job.comm, recording, shared_tmp_path / "trace.json", activities=activities)
    job.comm.barrier()
    events = events_of(shared_tmp_path)
    kernels = [each for each in events if each.get("cat") == "kernel"]
    ((begin, end),) = named(events, "forward", 0)
    assert kernels and all(begin - CLOSE < each["ts"] < end + CLOSE for each in kernels)
    assert [each for each in events if each.get("cat") == "ac2g"]

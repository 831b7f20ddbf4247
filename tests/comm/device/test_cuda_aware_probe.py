"""Canary exchange of device pointers: every outcome gives a verdict, and no outcome crashes the caller."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.pace import scaled
from torch import Tensor

from hpctrain.comm.device.cuda_aware_probe import (
    PREFIX,
    ProbeResult,
    exchange,
    judge,
    library_name,
    mpi_reports_cuda,
    probe,
    reason_to_skip,
)
from hpctrain.comm.transport.base import Transport

SMALL = (2, 1000)
HOST = torch.device("cpu")


def program(text: str) -> Any:
    return probe([], program=(sys.executable, "-c", text), timeout=5)


def printed(verdict: ProbeResult) -> str:
    facts = {"cuda_aware": verdict.cuda_aware, "reason": verdict.reason, "library": verdict.library}
    return f"print('warning: x'); print({PREFIX + json.dumps(facts)!r})"


@pytest.mark.ranks
def test_a_correct_exchange_passes(comm: Any) -> None:
    assert exchange(comm.transport, HOST, SMALL) == []
    verdict = judge(comm.transport, HOST, "Some MPI 1", SMALL)
    memory = "from memory of cpu to memory of cpu"
    assert verdict == ProbeResult(False, f"every value arrived on {comm.size} ranks, {memory}", "Some MPI 1")


class Corrupting:
    """Transport of which one operation delivers one wrong value, to the last rank only."""

    def __init__(self, transport: Transport, broken: str) -> None:
        self._transport, self._broken = transport, broken

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._transport, name)
        return partial(self._corrupted, found) if name == self._broken else found

    def _corrupted(self, operation: Callable[..., Any], tensor: Tensor, *rest: Any) -> Any:
        work = operation(tensor, *rest)
        if work is not None:
            return SimpleNamespace(wait=lambda: (work.wait(), self._corrupt(tensor)))
        self._corrupt(tensor)

    def _corrupt(self, tensor: Tensor) -> None:
        if self._transport.rank == self._transport.size - 1 and tensor.numel() >= 1000:
            tensor[17] += 1


@pytest.mark.ranks
@pytest.mark.parametrize("broken", ["irecv", "broadcast", "all_reduce", "all_gather"])
def test_one_wrong_value_on_one_rank_is_the_verdict_of_all_ranks(comm: Any, broken: str) -> None:
    verdict = judge(cast(Transport, Corrupting(comm.transport, broken)), HOST, "Some MPI 1", SMALL)
    first_line = "send and recv" if broken == "irecv" else broken
    assert not verdict.cuda_aware
    assert verdict.reason == f"{first_line} of 1000 elements brought 1 wrong ones to rank {comm.size - 1}"
    assert comm.all_gather_object(verdict) == [verdict] * comm.size


def test_the_exchange_runs_as_a_separate_job() -> None:
    verdict = probe(program=(sys.executable, "-m", "hpctrain.comm.device.cuda_aware_probe", "--device", "cpu"))
    assert verdict.reason == "every value arrived on 2 ranks, from memory of cpu to memory of cpu"
    assert verdict.library == library_name()


def test_without_a_gpu_the_verdict_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    verdict = probe()
    assert (verdict.cuda_aware, verdict.reason) == (False, "no GPU is visible")


def test_a_crash_is_a_negative_verdict_also_after_a_good_one() -> None:
    verdict = program("import os; print('about to read', flush=True); os.abort()")
    assert verdict == ProbeResult(False, "the exchange ended with status -6: about to read", "")
    good = ProbeResult(True, "every value arrived", "Some MPI 1")
    verdict = program(f"{printed(good)}\nimport os, sys; sys.stdout.flush(); os.abort()")
    assert not verdict.cuda_aware and "ended with status -6" in verdict.reason and verdict.library == "Some MPI 1"


def test_a_hang_is_a_negative_verdict_and_leaves_no_process() -> None:
    started = time.monotonic()
    verdict = probe([], program=(sys.executable, "-c", "import time; time.sleep(60)"), timeout=0.5)
    assert verdict == ProbeResult(False, "the exchange did not end within 0.5 s", "")
    assert time.monotonic() - started < scaled(10)


def test_missing_and_malformed_output_are_negative_verdicts() -> None:
    assert program("pass").reason == "the exchange ended with status 0: it printed nothing"
    assert not program(f"print({PREFIX!r} + '{{broken')").cuda_aware
    assert not program(f"print({PREFIX!r} + '{{}}')").cuda_aware


@pytest.mark.parametrize("aware", [True, False])
def test_a_verdict_is_found_among_warnings(aware: bool) -> None:
    verdict = ProbeResult(aware, "said so", "Some MPI 1")
    assert program(printed(verdict)) == verdict


@pytest.mark.parametrize(
    "device, size, has_gpu, reported, reason",
    [
        ("cuda", 1, True, True, "the canary needs two ranks"),
        ("cpu", 1, False, None, "the canary needs two ranks"),
        ("cuda", 2, False, True, "no GPU is visible"),
        ("cuda", 2, True, False, "the MPI library says that it was built without CUDA (MPIX_Query_cuda_support)"),
        ("cuda", 2, True, True, ""),
        ("cuda", 2, True, None, ""),  # a library without the query may still accept device pointers
        ("cpu", 2, False, False, ""),
    ],
)
def test_the_exchange_is_skipped_if_it_is_impossible(
    device: str, size: int, has_gpu: bool, reported: bool | None, reason: str
) -> None:
    assert reason_to_skip(device, size, has_gpu, reported) == reason


@pytest.mark.ranks
def test_the_mpi_library_reports_cuda_or_cannot_tell(comm: Any) -> None:
    assert mpi_reports_cuda() in (True, False, None)

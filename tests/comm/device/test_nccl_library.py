"""Errors for a missing, old or broken CuPy or NCCL, and the reductions that NCCL supports."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from support.nccl import FakeNccl

from hpctrain.comm.device.nccl_channel import load, op_code, reason_unavailable
from hpctrain.errors import CommunicationError


def install(monkeypatch: pytest.MonkeyPatch, nccl: Any) -> None:
    cuda = types.ModuleType("cupy.cuda")
    cuda.nccl = nccl  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)


def test_a_missing_cupy_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(CommunicationError, match=r"NCCL needs CuPy \(pip install hpctrain\[cuda\]\): "):
        load()


def test_a_cupy_without_nccl_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, types.SimpleNamespace(available=False))
    with pytest.raises(CommunicationError, match="CuPy has no NCCL: install nvidia-nccl-cu12"):
        load()


def test_an_nccl_too_old_to_send_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNccl(version=2604))
    with pytest.raises(CommunicationError, match="NCCL 2604 cannot send from rank to rank: 2.7 or newer is needed"):
        load()


def test_a_missing_gpu_is_reported_before_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    found = FakeNccl()
    install(monkeypatch, found)
    assert load() is found
    assert reason_unavailable(has_gpu=False) == "no GPU is visible"
    assert reason_unavailable(has_gpu=True) == ""
    install(monkeypatch, types.SimpleNamespace(available=False))
    assert "CuPy has no NCCL" in reason_unavailable(has_gpu=True)


@pytest.mark.parametrize(
    "dtype, op, known",
    [
        (torch.float32, "sum", True),
        (torch.float32, "max", False),  # NCCL drops NaN
        (torch.bfloat16, "sum", False),  # NCCL rounds after every rank
        (torch.bfloat16, "max", False),
        (torch.int16, "sum", False),
        (torch.int64, "max", True),
        (torch.int64, "average", False),
        (torch.bool, "average", False),
        (torch.int32, "bxor", False),
    ],
)
def test_nccl_reduces_only_what_it_computes_as_torch_does(dtype: torch.dtype, op: str, known: bool) -> None:
    assert (op_code(dtype, op, 22105) is not None) == known

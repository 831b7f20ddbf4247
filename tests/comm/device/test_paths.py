"""Path of tensors on a GPU: each decision, its reason, and the refused requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpctrain.comm.device.paths import (
    CudaAwareness,
    PathCapabilities,
    choose_path,
    decide_cuda_awareness,
    gather_capabilities,
)
from hpctrain.errors import CommunicationError, SettingsError

ALL = PathCapabilities("", "", "the canary exchange passed")
NO_NCCL = PathCapabilities("CuPy is missing (rank 0)", "", "the canary exchange passed")
NOTHING = PathCapabilities("CuPy is missing (rank 0)", "never proved (rank 0)")
YES, NO = CudaAwareness(True, "the canary exchange passed"), CudaAwareness(False, "the canary exchange failed")


@pytest.mark.parametrize(
    "abilities, path, reason",
    [
        (ALL, "nccl", "every rank has NCCL and a GPU of its own"),
        (NO_NCCL, "mpi", "the canary exchange passed; no NCCL: CuPy is missing (rank 0)"),
        (
            NOTHING,
            "staged",
            "no NCCL: CuPy is missing (rank 0); no device pointers to MPI: never proved (rank 0)",
        ),
    ],
)
def test_default_path_follows_size_and_abilities(abilities: PathCapabilities, path: Any, reason: str) -> None:
    assert choose_path("all_reduce", 1000, abilities) == (path, reason)


def test_a_reduction_that_mpi_computes_differently_from_torch_is_staged() -> None:
    path, reason = choose_path("all_reduce", 1000, NO_NCCL, mpi_reduces=False)
    assert path == "staged" and "MPI does not do this all_reduce as torch does" in reason
    assert choose_path("all_reduce", 1000, ALL, mpi_reduces=False)[0] == "nccl"


@pytest.mark.parametrize("path", ["nccl", "mpi", "staged"])
def test_a_requested_path_is_used(path: Any) -> None:
    assert choose_path("broadcast", 8, ALL, algorithm=path) == (path, "asked for")


def test_an_unsupported_path_is_refused_with_the_reason_and_the_supported_ones() -> None:
    with pytest.raises(CommunicationError) as caught:
        choose_path("broadcast", 8, NO_NCCL, algorithm="nccl")
    assert str(caught.value) == (
        "algorithm nccl cannot do broadcast on the GPU: CuPy is missing (rank 0); able are mpi, staged"
    )
    with pytest.raises(CommunicationError, match="mpi cannot do all_reduce .* as torch does; able are nccl, staged"):
        choose_path("all_reduce", 8, ALL, algorithm="mpi", mpi_reduces=False)
    with pytest.raises(CommunicationError, match="algorithm ring is not for tensors on a GPU: auto, nccl, mpi, staged"):
        choose_path("all_reduce", 8, ALL, algorithm="ring")


def test_measurements_precede_the_default_but_only_for_supported_paths() -> None:
    measured: list[tuple[int, Any]] = [(100, "staged"), (1000, "mpi")]
    sizes = [(100, "staged"), (101, "mpi"), (1000, "mpi"), (1001, "nccl")]
    assert [choose_path("all_reduce", nbytes, ALL, measured=measured)[0] for nbytes, _ in sizes] == [
        path for _, path in sizes
    ]
    assert choose_path("all_reduce", 500, ALL, measured=measured, mpi_reduces=False)[0] == "nccl"
    assert choose_path("all_reduce", 500, NOTHING, measured=measured)[0] == "staged"


def combine(ranks: list[tuple[str, CudaAwareness, str]]) -> PathCapabilities:
    """Return the common abilities of ranks."""
    transport: Any = SimpleNamespace(all_gather_object=lambda own: ranks)
    return gather_capabilities(transport, torch.device("cpu"), YES, "")


def test_an_ability_missing_on_one_rank_is_missing_on_all() -> None:
    ranks = [("", YES, "a 1"), ("", YES, "a 2"), ("", YES, "b 1")]
    assert combine(ranks) == PathCapabilities("", "", "the canary exchange passed")
    assert combine([*ranks, ("no GPU is visible", YES, "b 2")]).no_nccl == "no GPU is visible (rank 3)"
    assert combine([*ranks, ("", NO, "b 2")]).no_mpi == "the canary exchange failed (rank 3)"
    assert combine([*ranks, ("", YES, "a 1")]).no_nccl == "2 ranks use one GPU, which NCCL refuses"


@pytest.mark.parametrize("verdict", [None, True, False])
def test_cuda_awareness_is_decided_by_the_canary_or_the_user(verdict: bool | None) -> None:
    assert decide_cuda_awareness(verdict, {}).cuda_aware == bool(verdict)
    assert decide_cuda_awareness(verdict, {"HPCTRAIN_CUDA_AWARE": "1"}) == CudaAwareness(True, "HPCTRAIN_CUDA_AWARE=1")
    assert decide_cuda_awareness(verdict, {"HPCTRAIN_CUDA_AWARE": "0"}) == CudaAwareness(False, "HPCTRAIN_CUDA_AWARE=0")
    assert ("hpctrain bench calibrate" in decide_cuda_awareness(verdict, {}).reason) == (verdict is None)


def test_other_values_of_HPCTRAIN_CUDA_AWARE_are_refused() -> None:
    with pytest.raises(SettingsError, match="HPCTRAIN_CUDA_AWARE='yes': allowed are 1 .* and 0"):
        decide_cuda_awareness(True, {"HPCTRAIN_CUDA_AWARE": "yes"})

"""Devices by local rank, and the refusal to share a GPU unless requested; GPUs are simulated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpctrain.errors import DeviceError
from hpctrain.train.handshake import check_unshared, identity, select_device


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    def pretend(*uuids: str) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
        properties = [SimpleNamespace(uuid=uuid) for uuid in uuids]
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties[device.index])

    return pretend


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_gpus_are_assigned_by_local_rank(gpus: Any, wanted: str) -> None:
    gpus("a", "b")
    assert [str(select_device(wanted, rank)) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [identity(select_device(wanted, rank)) for rank in range(2)] == ["a", "b"]


def test_a_single_visible_gpu_is_used_by_any_local_rank(gpus: Any) -> None:
    gpus("c")
    assert str(select_device("auto", 3)) == "cuda:0" and identity(select_device("auto", 3)) == "c"


def test_without_gpus_auto_is_the_cpu_and_cuda_is_an_error(gpus: Any) -> None:
    gpus()
    assert select_device("auto", 1).type == "cpu" and identity(select_device("auto", 1)) == "cpu"
    with pytest.raises(DeviceError, match="no GPU is visible .*CUDA_VISIBLE_DEVICES") as found:
        select_device("cuda", 0)
    assert found.value.exit_code == 2


def test_the_cpu_can_be_chosen_and_an_unknown_device_is_an_error(gpus: Any) -> None:
    gpus("a")
    assert select_device("cpu", 0).type == "cpu"
    with pytest.raises(DeviceError, match="known are auto, cpu, cuda"):
        select_device("tpu", 0)


def test_two_ranks_on_one_gpu_are_refused_with_the_table() -> None:
    owners = [("n1", "a"), ("n1", "b"), ("n2", "a"), ("n1", "b")]
    with pytest.raises(DeviceError) as found:
        check_unshared(owners, "THE TABLE")
    said = str(found.value)
    assert "ranks 1, 3 share one GPU of n1" in said and "run.oversubscribe = true" in said
    assert said.endswith("\nTHE TABLE")
    assert found.value.everywhere


def test_equal_identities_on_two_hosts_and_cpus_are_not_shared() -> None:
    check_unshared([("n1", "a"), ("n2", "a"), ("n1", "cpu"), ("n1", "cpu")], "")

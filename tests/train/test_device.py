"""Devices by local rank, and the refusal to share a GPU unless requested; GPUs are simulated."""

from __future__ import annotations

import pytest
from fakes.machine import FakeMachine

from hpctrain.errors import DeviceError
from hpctrain.train.init import Machine, check_unshared, select_device


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_gpus_are_assigned_by_local_rank(wanted: str) -> None:
    two, one = FakeMachine(("a", "b")), FakeMachine(("c",))
    assert [str(select_device(wanted, rank, two)) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert str(select_device(wanted, 3, one)) == "cuda:0"  # a single visible GPU is used by any local rank


def test_without_gpus_auto_is_the_cpu_and_cuda_is_an_error() -> None:
    machine = FakeMachine(())
    device = select_device("auto", 1, machine)
    assert device.type == "cpu" and Machine().identity(device) == "cpu"
    with pytest.raises(DeviceError, match="no GPU is visible .*CUDA_VISIBLE_DEVICES") as found:
        select_device("cuda", 0, machine)
    assert found.value.exit_code == 2


def test_the_cpu_can_be_chosen_and_an_unknown_device_is_an_error() -> None:
    assert select_device("cpu", 0, FakeMachine(("a",))).type == "cpu"
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

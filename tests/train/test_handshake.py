"""Comparison of all ranks at the start: differences raise the same error on all of them before training."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from fakes.machine import FakeMachine
from support.pace import scaled

from hpctrain.errors import DeviceError, MismatchError
from hpctrain.train.init import (
    Handshake,
    Machine,
    check_unshared,
    exchange_handshakes,
    resources,
    select_device,
    table,
    threads,
)
from hpctrain.train.process import versions

CPU = torch.device("cpu")


def _odd(comm: Any) -> bool:
    return bool(comm.rank == comm.size - 1)


@pytest.mark.ranks(1, 2, 3, 4)
def test_equal_ranks_are_accepted_and_listed(comm: Any) -> None:
    hellos = exchange_handshakes(comm, CPU, {"train": {"steps": 3}})
    assert [one.local_rank for one in hellos] == list(range(comm.size)) and len({one.host for one in hellos}) == 1
    lines = table(hellos).splitlines()
    assert len(lines) == comm.size + 1 and all(line.endswith("cpu") for line in lines[1:])


@pytest.mark.ranks(2, 3)
def test_another_version_on_one_rank_is_an_error(comm: Any) -> None:
    own = versions() | ({"torch": "1.0"} if _odd(comm) else {})
    comm.barrier()
    began = time.monotonic()
    said = rf"has torch \d.*, rank {comm.size - 1} on .* has 1\.0: start all"
    with pytest.raises(MismatchError, match=said) as found:
        exchange_handshakes(comm, CPU, {}, FakeMachine(versions=own))
    assert time.monotonic() - began < scaled(1)
    assert found.value.everywhere and found.value.exit_code == 2


@pytest.mark.ranks(2)
def test_a_package_missing_on_one_rank_is_an_error(comm: Any) -> None:
    own = {name: version for name, version in versions().items() if name != "h5py" or not _odd(comm)}
    with pytest.raises(MismatchError, match="rank 0 on .* has h5py .*, rank 1 on .* has none: start all ranks"):
        exchange_handshakes(comm, CPU, {}, FakeMachine(versions=own))


@pytest.mark.ranks(2, 3)
def test_different_settings_on_one_rank_are_an_error(comm: Any) -> None:
    steps = 4 if _odd(comm) else 3
    settings: dict[str, Any] = {"train": {"steps": steps, "batch": 8}, "run": {"folder": "x"}}
    if _odd(comm):
        settings["extra"] = True
    began = time.monotonic()
    with pytest.raises(MismatchError) as found:
        exchange_handshakes(comm, CPU, settings)
    assert time.monotonic() - began < scaled(1)
    said = str(found.value)
    assert f"rank {comm.size - 1} on" in said and "train.steps is 3 there and 4 here" in said
    assert "extra is unset there and True here" in said and "batch" not in said
    assert found.value.everywhere


def test_threads_follow_omp_num_threads_and_the_cores(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hellos = exchange_handshakes(comm, CPU, {})
    for text, expected in (("3", 3), ("999", 999), ("0", len(hellos[0].cpus)), ("many", len(hellos[0].cpus))):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert threads(hellos, 0) == expected
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads(hellos, 0) == len(hellos[0].cpus)


def test_resources_shared_by_ranks_are_counted_once() -> None:
    def one(host: str, cpus: tuple[int, ...], device: str, identity: str) -> Handshake:
        return Handshake(host, 0, 0, cpus, device, identity, {}, "")

    shared = [one("a", (0, 1), "cpu", "cpu"), one("a", (1, 2), "cpu", "cpu"), one("b", (0, 1), "cpu", "cpu")]
    assert resources(shared) == {"cpus": 5}
    gpus = [one("a", (0,), "cuda:0", "x"), one("a", (1,), "cuda:0", "x"), one("b", (0,), "cuda:0", "x")]
    assert resources(gpus) == {"cpus": 3, "gpus": 2}


# Devices by local rank, and the refusal to share a GPU unless requested; GPUs are simulated ---------------------------


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


@pytest.mark.parametrize("variable", ["HPCTRAIN_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"])
def test_a_rank_without_gpus_in_a_job_with_gpus_is_an_error(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "4")
    text = (
        r"device auto: the job has requested 4 GPUs per node, and this rank sees none, .*; or set run.device = \"cpu\""
    )
    with pytest.raises(DeviceError, match=text) as found:
        select_device("auto", 1, FakeMachine(()))
    assert found.value.exit_code == 2
    assert select_device("auto", 1, FakeMachine(("a", "b"))).index == 1
    assert select_device("cpu", 1, FakeMachine(())).type == "cpu", "the user has decided"
    for nothing in ("0", "", "none"):
        monkeypatch.setenv(variable, nothing)
        assert select_device("auto", 1, FakeMachine(())).type == "cpu"


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

"""Comparison of all ranks at the start: differences raise the same error on all of them before training."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from fakes.machine import FakeMachine
from support.pace import scaled

from hpctrain.errors import MismatchError
from hpctrain.train.init import Handshake, exchange_handshakes, flatten, resources, table, threads
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


def test_settings_are_flattened_to_dotted_names() -> None:
    assert flatten({"a": {"b": {"c": 1}}, "d": "x", "e": {}}) == {"a.b.c": "1", "d": "'x'"}


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

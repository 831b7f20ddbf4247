from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster.nodes import (
    MAX_NODES,
    Allocation,
    allocation,
    compress_node_list,
    expand_counts,
    expand_node_list,
    read_node_file,
)
from hpctrain.errors import LaunchError


# The expected values are what `scontrol show hostnames` prints.
@pytest.mark.parametrize(
    "text, hosts",
    [
        ("login", "login"),
        ("a,b", "a b"),
        ("n[001-003,7],m5", "n001 n002 n003 n7 m5"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("gpu-[1-2]-ib.site.org", "gpu-1-ib.site.org gpu-2-ib.site.org"),
        ("n[3,1]", "n3 n1"),
    ],
)
def test_a_node_list_is_expanded(text: str, hosts: str) -> None:
    assert expand_node_list(text) == tuple(hosts.split())


# `scontrol show hostlistsorted` prints the same brackets, some of them in another order.
@pytest.mark.parametrize(
    "hosts, text",
    [
        ("", ""),
        ("login", "login"),
        ("n3", "n3"),
        ("n1 n2 n3", "n[1-3]"),
        ("n7 n001 m5 n002", "m5,n[001-002,7]"),
        ("n9 n10 n11", "n[9-11]"),
        ("n08 n09 n10", "n[08-10]"),
        ("n1 n01", "n[1,01]"),
        ("x1c0b1 x1c0b2 x2c0b1", "x1c0b[1-2],x2c0b1"),
        ("gpu-1-ib.site.org gpu-2-ib.site.org", "gpu-[1-2]-ib.site.org"),
        ("n1 n1 n1", "n1"),
    ],
)
def test_hosts_are_compressed_to_a_list(hosts: str, text: str) -> None:
    assert compress_node_list(hosts.split()) == text


@given(st.sets(st.from_regex(r"[ab-]{0,3}[0-9]{0,21}(-ib)?(\.c)?", fullmatch=True).filter(bool), min_size=1))
def test_a_compressed_list_expands_to_the_same_hosts(hosts: set[str]) -> None:
    assert sorted(expand_node_list(compress_node_list(hosts))) == sorted(hosts)


@pytest.mark.parametrize(
    "text", ["", "n[1-", "n1]", "n[]", "n[2-1]", "n[a-c]", "n[1-2", "a,,b", "a b", "n[[1-2]]", "n[1,,2]", "n[-2]"]
)
def test_a_malformed_node_list_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="cannot read the node list"):
        expand_node_list(text)


@pytest.mark.parametrize("text", ["n[1-99999999999]", "r[1-999]n[1-999]", "r[1-99]n[1-99]m[1-99]", "a,n[1-65536]"])
def test_a_huge_node_list_is_refused_before_it_fills_the_memory(text: str) -> None:
    with pytest.raises(LaunchError, match=f"more than {MAX_NODES} nodes"):
        expand_node_list(text)


def test_the_longest_accepted_node_list() -> None:
    assert len(expand_node_list(f"n[1-{MAX_NODES}]")) == MAX_NODES


@pytest.mark.parametrize("text, counts", [("4", (4,)), ("2(x3),1", (2, 2, 2, 1)), ("1,2(x2)", (1, 2, 2))])
def test_task_counts_are_expanded(text: str, counts: tuple[int, ...]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2x3", "2(x3", "-1", "2,,3"])
def test_malformed_counts_are_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="cannot read the task counts"):
        expand_counts(text)


def test_huge_counts_are_refused() -> None:
    with pytest.raises(LaunchError, match=f"more than {MAX_NODES}"):
        expand_counts("1(x99999999999)")


def test_a_node_file_keeps_order_and_counts_slots(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text("n7\nn7\nn2\n\nn7\n")
    assert read_node_file(path) == ("n7", "n7", "n2", "n7")
    assert allocation({"PBS_NODEFILE": str(path)}) == Allocation(("n7", "n2"), (3, 1))


def test_missing_empty_and_binary_node_files_are_refused(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe")
    for path, reason in [(tmp_path / "none", "No such file"), (empty, "names no node"), (binary, "is not UTF-8 text")]:
        with pytest.raises(LaunchError, match=f"{path}.*{reason}"):
            read_node_file(path)


def test_the_allocation_of_slurm_precedes_the_node_file_of_pbs() -> None:
    environ = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1", "PBS_NODEFILE": "/nowhere"}
    assert allocation(environ) == Allocation(("n1", "n2", "n3"), (2, 2, 1))
    assert allocation({"SLURM_JOB_NODELIST": "n[1-2]"}) == Allocation(("n1", "n2"), None)
    assert allocation({}) is None


def test_the_slots_of_a_job_are_unknown_within_a_step() -> None:
    step = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1", "SLURM_STEP_ID": "0"}
    assert allocation(step) == Allocation(("n1", "n2"), None)


def test_counts_that_do_not_fit_the_nodes_are_refused() -> None:
    with pytest.raises(LaunchError, match="SLURM_TASKS_PER_NODE=2 does not fit the 2 nodes"):
        allocation({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2"})

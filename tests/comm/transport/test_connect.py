"""Connection to the world: a single rank without MPI, or all ranks with MPI; anything else is an error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpctrain.cluster.launcher import without_launcher
from hpctrain.comm.transport.connect import connect, exclude_unusable_ucx
from hpctrain.errors import LaunchError


def environ(**variables: str) -> dict[str, str]:
    """Return this environment with these variables and without those of every launcher."""
    return without_launcher() | variables


@pytest.fixture
def no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)


def test_without_a_launcher_the_single_transport_is_used(no_mpi: None) -> None:
    transport, launch = connect(environ=environ())
    assert (transport.name, transport.rank, transport.size, launch.kind) == ("single", 0, 1, "none")


def test_one_process_of_a_launcher_needs_no_mpi(no_mpi: None) -> None:
    transport, launch = connect(environ=environ(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="1"))
    assert (transport.name, transport.size, launch.kind) == ("single", 1, "openmpi")


def test_several_processes_without_mpi_are_an_error(no_mpi: None) -> None:
    two = environ(OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2")
    with pytest.raises(LaunchError, match="started 2 processes, but MPI cannot be loaded") as found:
        connect(environ=two)
    assert "install hpctrain[openmpi]" in str(found.value)
    assert found.value.everywhere and found.value.exit_code == 2


@pytest.mark.ranks
def test_the_ranks_of_a_launcher_are_connected() -> None:
    from mpi4py import MPI

    transport, launch = connect()
    assert (transport.name, transport.rank, transport.size) == ("mpi", MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert launch.rank == transport.rank
    transport.free()


@pytest.mark.ranks
def test_fewer_ranks_than_the_launcher_started_are_an_error() -> None:
    from mpi4py import MPI

    more = environ(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE=str(MPI.COMM_WORLD.size + 1))
    with pytest.raises(LaunchError, match=f"sees a world of {MPI.COMM_WORLD.size}; "):
        connect(environ=more)


@pytest.mark.ranks
def test_a_users_communicator_is_duplicated() -> None:
    from mpi4py import MPI

    own = MPI.COMM_WORLD.Split(0, -MPI.COMM_WORLD.rank)
    transport, _ = connect(own)
    own.Free()  # the transport has a duplicate
    assert transport.rank == MPI.COMM_WORLD.size - 1 - MPI.COMM_WORLD.rank
    transport.barrier()
    transport.free()


def test_one_sided_ucx_is_excluded_without_an_rdma_device(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    exclude_unusable_ucx(environ, tmp_path / "none")
    assert environ == {"OMPI_MCA_osc": "^ucx"}


@pytest.mark.parametrize("name", ["OMPI_MCA_osc", "OMPI_MCA_pml", "OMPI_MCA_osc_ucx_tls", "OMPI_MCA_pml_ucx_devices"])
def test_settings_of_open_mpi_made_by_the_user_are_kept(tmp_path: Path, name: str) -> None:
    environ = {name: "any"}
    exclude_unusable_ucx(environ, tmp_path)
    assert environ == {name: "any"}


def test_nodes_with_an_rdma_device_keep_their_settings(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    environ: dict[str, str] = {}
    exclude_unusable_ucx(environ, tmp_path)
    assert not environ

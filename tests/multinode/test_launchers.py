"""Command lines of each MPI's launcher for ranks on several hosts."""

from __future__ import annotations

import launchers
import pytest


def test_every_launcher_gets_its_own_options() -> None:
    mpich = launchers.start("mpiexec", "HYDRA build details:\n", "/agent", ["a", "b"], 2, "wire")
    assert " ".join(mpich.command) == "mpiexec -launcher ssh -launcher-exec /agent -hosts a:2,b:2 -n 4"
    openmpi = launchers.start("mpirun", "mpirun (Open MPI) 5.0.11\n", "/agent", ["a", "b"], 1, "wire")
    assert " ".join(openmpi.command) == "mpirun --host a:1,b:1 --map-by slot --bind-to none -n 2"
    assert openmpi.variables["PRTE_MCA_plm_ssh_agent"] == "/agent"
    assert openmpi.variables["OMPI_MCA_btl_tcp_if_include"] == "wire"
    with pytest.raises(SystemExit, match="do not know how /x/mpiexec starts ranks on other hosts: lam"):
        launchers.start("/x/mpiexec", "lam 7\n", "/agent", ["a", "b"], 2, "wire")

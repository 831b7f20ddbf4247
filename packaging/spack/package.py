# Copyright hpctrain contributors. See LICENSE for details.
#
# SPDX-License-Identifier: BSD-3-Clause
"""hpctrain for Spack 1.0 and newer, as a package of the user's own repository.

    spack repo create ~/spack-hpctrain hpctrain         # says where packages go: a folder spack_repo/hpctrain/packages
    mkdir -p .../packages/py_hpctrain && cp packaging/spack/package.py .../packages/py_hpctrain/
    git archive --prefix=hpctrain-0.1.0/ -o hpctrain-0.1.0.tar.gz HEAD
    spack install --no-checksum py-hpctrain             # in the folder where that file is

Tested: the file is valid Python and agrees with setup.cfg; the names of packages and of directives
are those of Spack's own packages. Not tested: Spack itself. Its packages may offer only an older
py-torch or py-isal than hpctrain requires; spack then fails to concretize, and names the package.
"""

import os

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHpctrain(PythonPackage):
    """MPI-native training of PyTorch models in batch jobs on clusters."""

    # Not in a package index: the tarball is taken from the folder where spack is called.
    manual_download = True
    url = f"file://{os.getcwd()}/hpctrain-0.1.0.tar.gz"

    license("BSD-3-Clause")

    version("0.1.0")

    variant("mpi", default=True, description="Run on several ranks, with the MPI of this Spack")
    variant("plot", default=False, description="Draw plans, traces and losses")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@68:", type="build")

    with default_args(type=("build", "run")):
        depends_on("py-torch@2.11:")
        depends_on("py-numpy@1.26:")
        depends_on("py-h5py@3.10:")
        depends_on("py-isal@1.5:")
        depends_on("py-tqdm@4.60:")
        depends_on("py-mpi4py@4:", when="+mpi")
        depends_on("py-matplotlib@3.8:", when="+plot")

    import_modules = ["hpctrain", "hpctrain.cli", "hpctrain.jobs"]

    def setup_run_environment(self, env: EnvironmentModifications) -> None:
        env.set("HPCTRAIN_ROOT", self.prefix)

"""PBS is told from Slurm's stand-ins for its commands."""

from __future__ import annotations

from support.doctoring import MISSING, told

from hpctrain.doctor.login.ask import Answer
from hpctrain.doctor.login.pbs import Pbs, check

PBS = Pbs(Answer("pbs_version = 2022.1.3.20230214"))


def test_none() -> None:
    assert list(check(Pbs(MISSING), {}, slurm=False)) == []


def test_openpbs_and_torque() -> None:
    (found,) = check(PBS, {}, slurm=False)
    assert found.level == "ok" and found.found.startswith("2022.1.3.20230214;")
    (found,) = check(Pbs(Answer("Version: 6.1.2\nCommit: 661e092552de43a785c15d39a3634a541d86898e")), {}, slurm=False)
    assert found.found.startswith("6.1.2;")


def test_stand_ins_of_slurm() -> None:
    usage = Pbs(Answer("Unknown option: version\nUsage:\n    qstat.pl [-f] [-a|-i|-r]", "exit code 1"))
    assert list(check(usage, {}, slurm=True)) == []
    assert told(check(usage, {}, slurm=False)) == [("note", "PBS")]


def test_another_prefix_of_directives() -> None:
    assert told(check(PBS, {"PBS_DPREFIX": "#QSUB"}, slurm=False)) == [("note", "PBS")]

"""Checker of ``#PBS`` lines: examples from qsub(1B) and pbs_resources(7B), and directives that qsub refuses."""

from __future__ import annotations

from hpctrain.jobs.check import problems


def found(*lines: str) -> list[str]:
    """Return the problems of a script with these lines after its first line."""
    return problems("\n".join(["#!/bin/bash", "#PBS -N job", *lines, ""]))


RIGHT = [
    "-A account",
    "-a 12312359",
    "-c c=10",
    "-e err",
    "-h",
    "-J 0-7",
    "-J 1-9:2%3",
    "-j oe",
    "-k doe",
    "-l walltime=04:00:00",
    "-l walltime=3600",
    "-l select=2:ncpus=64:mpiprocs=4:ompthreads=16:ngpus=4",
    "-l select=1:ncpus=1:mem=10gb+3:ncpus=8:host=n1",
    "-lselect=4:system=polaris,place=scatter:excl,walltime=0:10:00",
    "-l filesystems=home:eagle",
    "-m abe",
    "-M a@b.org,c@d.org",
    "-o out",
    "-p -10",
    "-P project",
    "-q queue@server",
    "-r n",
    "-S /bin/bash",
    "-v A=1,B",
    "-V",
    "-W depend=afterany:1234.server",
    "-W block=true",
    "-r y -j oe",
]
WRONG = {
    "-l walltime=4h": "-l walltime=4h: expected hours:minutes:seconds",
    "-l select=2:ncpus=four": "select: ncpus=four: expected a number",
    "-l select=2:ncpus": "'ncpus' in '2:ncpus' is not of the form resource=value",
    "-l select=2:ncpus=1:walltime=60": "walltime is of the whole job",
    "-l select=2:mem=200GB": "mem=200GB: expected an amount",
    "-l ncpus": "-l ncpus: expected resource=value",
    "-l place=scatter": "place= needs select=",
    "-J 3-3": "an array has at least two indices",
    "-J 0-": "-J 0-: expected a range",
    "-j out": "-j out: expected oe, eo or n",
    "-r yes": "-r yes: expected y or n",
    "-N other": "-N is already in line 2",
    "-Z a": "'-Z' is not an option of qsub",
    "--nodes=2": "'--nodes=2' is not an option of qsub",
    "-r y # rerunnable": "'#' is not an option of qsub: a line of directives takes no comment",
    "-q": "-q needs a value: a queue",
    "-V yes": "'yes' is not an option of qsub",
    "-v 1A=b": "-v 1A=b: expected variables",
    "-A a\u2028b": "holds the character U+2028",
    "": "an empty directive",
}


def test_directives_of_the_manual_are_accepted() -> None:
    for directive in RIGHT:
        assert found(f"#PBS {directive}") == []


def test_wrong_directives_are_reported() -> None:
    for directive, text in WRONG.items():
        (message,) = found(f"#PBS {directive}")
        assert message.startswith("line 3: ") and text in message


def test_chunks_and_the_old_form_cannot_be_mixed() -> None:
    assert found("#PBS -l select=2", "#PBS -l nodes=2:ppn=4") == [
        "line 4: nodes= is the old form and cannot be mixed with select="
    ]
    assert found("#PBS -l select=2", "#PBS -l ncpus=4") == ["line 4: ncpus belongs in a chunk of select, not beside it"]
    assert found("#PBS -l walltime=1", "#PBS -l walltime=2") == ["line 4: -l walltime is already in line 3"]


def test_a_name_that_is_too_long_is_reported() -> None:
    assert problems(f"#!/bin/bash\n#PBS -N {'a' * 231}\n") == ["line 2: -N: a name has at most 230 characters"]

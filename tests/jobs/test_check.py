"""Checks of directives: examples from sbatch(1), qsub(1B) and pbs_resources(7B), and wrong directives."""

from __future__ import annotations

import pytest

from hpctrain.errors import UsageError
from hpctrain.jobs.check import problems


def found(*lines: str) -> list[str]:
    """Return the problems of a script with these lines after its first line."""
    return problems("\n".join(["#!/bin/bash", "#SBATCH --nodes=1", *lines, ""]))


RIGHT = """
--account=a -Aa --array=0-7 --array=1,3,5%2 --array=0-15:4 -a0 --begin=now+1hour --constraint="gpu&a100" -Cgpu
--cpus-per-task=4 --cpus-per-task 4 -c4 --dependency=afterok:12:13 --dependency=singleton
--dependency=afterany:12+5,after:3 --distribution=block:cyclic --exclusive --exclusive=user --export=ALL,A=b --gpus=4
--gpus=a100:4 --gpus-per-node=4 --gpu-bind=closest --gpu-bind=single:1 --gpu-bind=mask_gpu:0x1,0x2 --gres=gpu:4
--gres=gpu:a100:2,craynetwork:1 --gres=none --hint=nomultithread --job-name=a --mail-type=END,FAIL --mail-type=all
--mem=0 --mem=200G --mem-per-gpu=60G --nodelist=n[1-3] --nice --nice=10 --no-requeue --ntasks=8 --ntasks-per-node=4
--open-mode=append --output=%x-%j.out --partition=a,b --qos=q --reservation=r --signal=USR1@300 --signal=B:USR1@300
--signal=RB:SIGTERM@60 --signal=10 --switches=1@10 --threads-per-core=1 --time=10 --time=10:00
--time=1:00:00 --time=1-2 --time=1-2:30 --time=1-02:03:04 --time=UNLIMITED --tmp=10G --wckey=x
--hold -H --requeue --contiguous --comment="two words"
"""
WRONG = {
    "--nodez=2": "sbatch knows no --nodez, did you mean --nodes?",
    "--ntasks-per-nodes=2": "did you mean --ntasks-per-node?",
    "--walltime=1:00:00": "sbatch knows no --walltime",
    "--time=1h": "--time=1h: expected minutes, minutes:seconds",
    "--time=1:2:3:4": "--time=1:2:3:4: expected",
    "--time": "--time needs a value",
    "--time=": "--time=: expected",
    "--ntasks=0": "--ntasks=0: expected a number from 1 on",
    "--ntasks=two": "--ntasks=two: expected",
    "--mem=200GiB": "--mem=200GiB: expected a number, with K, M, G or T",
    "--signal=USR1@": "--signal=USR1@: expected",
    "--signal=X:USR1@3": "expected a signal, as in USR1@300",
    "--array=a": "--array=a: expected indices",
    "--requeue=yes": "--requeue takes no value",
    "--open-mode=a": "expected append or truncate",
    "--gres=gpu:a100:four:5": "expected resources, as in gpu:4",
    "--gpus-per-node=four": "expected a number, or as in a100:4",
    "--mail-type=END;FAIL": "expected BEGIN, END",
    "--partition=a --nonsense": "sbatch knows no --nonsense",
    "partition=a": "'partition=a' is not an option",
    "--account=a b": "'b' is not an option",
    '--account="a': "an unmatched quotation mark",
    "--account=a\u2028": "holds the character U+2028",
    "": "an empty directive",
    "--nodes=2": "--nodes is already in line 2",
    "-N 2": "--nodes is already in line 2",
    "--gpus-per-task=1": "--gpus-per-task needs a number of tasks",
}


def directives(text: str) -> list[str]:
    """Split a text at the begin of each option."""
    words: list[str] = []
    for word in text.split():
        if word.startswith("-"):
            words.append(word)
        else:
            words[-1] += f" {word}"
    return words


def test_directives_of_the_manual_are_accepted() -> None:
    assert len(directives(RIGHT)) > 60
    for directive in directives(RIGHT):
        assert found(f"#SBATCH {directive}") == []
        assert found(f"#SBATCH {directive}   # and a comment, which sbatch knows") == []


def test_wrong_directives_are_reported() -> None:
    for directive, text in WRONG.items():
        (message,) = found(f"#SBATCH {directive}")
        assert message.startswith("line 3: ") and text in message


@pytest.mark.parametrize(
    "line, message",
    [
        (" #SBATCH --time=1", "line 3: not a directive"),
        ("# SBATCH --time=1", "line 3: not a directive"),
        ("#sbatch --time=1", "line 3: not a directive"),
        ("##SBATCH --time=1", None),  # the usual way to disable one
        ("#SBATCHES are nice", None),
        ("# SBATCH lines are nice", None),
        ("", None),
    ],
)
def test_lines_that_resemble_directives_are_reported(line: str, message: str | None) -> None:
    assert [text[: len(message or "")] for text in found(line)] == ([message] if message else [])


@pytest.mark.parametrize(
    "pair",
    ["--mem=1 --mem-per-cpu=1", "--requeue --no-requeue", "--exclusive --oversubscribe", "-c1 --cpus-per-gpu=1"],
)
def test_options_that_exclude_each_other_are_reported(pair: str) -> None:
    (message,) = found(*(f"#SBATCH {directive}" for directive in pair.split()))
    assert message.startswith("line 4: --") and message.endswith("exclude each other")


@pytest.mark.parametrize(
    "lines, message",
    [
        (["--nodes=8-2"], "line 2: --nodes=8-2: expected the smaller number first"),
        (["--nodes=2-8", "--ntasks-per-node=3"], "with --ntasks-per-node=3, Slurm grants at most 6 nodes"),
        (["--comment=x", "-N 2-8 -n 4"], "line 3: --nodes=2-8: with --ntasks=4, Slurm grants at most 4 nodes"),
        (["--nodes=2-8", "--ntasks-per-node=4"], None),
        (["--nodes=2-8", "--ntasks=8"], None),
        (["--nodes=2-8", "--mincpus=4"], None),
        (["--nodes=2", "--ntasks-per-node=1"], None),
        (["--nodes=2-8", f"--ntasks={'9' * 5000}"], None),
    ],
)
def test_nodes_that_are_never_granted_are_reported(lines: list[str], message: str | None) -> None:
    said = problems("\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), "srun true", ""]))
    assert said == [] if message is None else len(said) == 1 and message in said[0]


def test_a_script_without_directives_is_reported() -> None:
    with pytest.raises(UsageError, match="has no directive"):
        problems("#!/bin/bash\necho\n")


def test_directives_of_both_schedulers_are_reported() -> None:
    assert found("#PBS -r y") == ["line 1: directives of Slurm and of PBS in one script: Slurm reads both"]


# Checker of ``#PBS`` lines: examples from qsub(1B) and pbs_resources(7B), and directives that qsub refuses ------------


def found_pbs(*lines: str) -> list[str]:
    """Return the problems of a script with these lines after its first line."""
    return problems("\n".join(["#!/bin/bash", "#PBS -N job", *lines, ""]))


PBS_RIGHT = """
-A account; -a 12312359; -c c=10; -e err; -h; -J 0-7; -J 1-9:2%3; -j oe; -k doe; -l walltime=04:00:00; -l walltime=3600;
-l select=2:ncpus=64:mpiprocs=4:ompthreads=16:ngpus=4; -l select=1:ncpus=1:mem=10gb+3:ncpus=8:host=n1;
-lselect=4:system=polaris,place=scatter:excl,walltime=0:10:00; -l filesystems=home:eagle; -m abe; -M a@b.org,c@d.org;
-o out; -p -10; -P project; -q queue@server; -r n; -S /bin/bash; -v A=1,B; -V; -W depend=afterany:1234.server;
-W block=true; -r y -j oe
"""
PBS_WRONG = {
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


def test_directives_of_the_manual_of_pbs_are_accepted() -> None:
    right = [directive.strip() for directive in PBS_RIGHT.split(";")]
    assert len(right) == 28
    for directive in right:
        assert found_pbs(f"#PBS {directive}") == []


def test_wrong_directives_of_pbs_are_reported() -> None:
    for directive, text in PBS_WRONG.items():
        (message,) = found_pbs(f"#PBS {directive}")
        assert message.startswith("line 3: ") and text in message


def test_chunks_and_the_old_form_cannot_be_mixed() -> None:
    assert found_pbs("#PBS -l select=2", "#PBS -l nodes=2:ppn=4") == [
        "line 4: nodes= is the old form and cannot be mixed with select="
    ]
    assert found_pbs("#PBS -l select=2", "#PBS -l ncpus=4") == [
        "line 4: ncpus belongs in a chunk of select, not beside it"
    ]
    assert found_pbs("#PBS -l walltime=1", "#PBS -l walltime=2") == ["line 4: -l walltime is already in line 3"]


def test_a_name_that_is_too_long_is_reported() -> None:
    assert problems(f"#!/bin/bash\n#PBS -N {'a' * 231}\n") == ["line 2: -N: a name has at most 230 characters"]

"""Generator of the man page of hpctrain from every verb's --help: ``man -l <(python packaging/manpage.py)``.

argparse-manpage omits the epilogs of verbs, which contain the examples; therefore the roff is
written here.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator

from hpctrain._version import __version__
from hpctrain.cli.main import VERBS, parser_with

_DESCRIPTION = """\
hpctrain trains PyTorch models on the ranks that mpirun, mpiexec or srun started. In batch jobs, it saves before the
time limit and resumes. The same command runs as one process on a laptop and as a thousand ranks in a job. One process
needs no MPI.

Verbs that inspect files, print scripts or submit them run on a login node, without PyTorch and without MPI.

hpctrain-python, provided by an environment module, is the Python that has hpctrain and PyTorch. Run your own programs
with it: srun hpctrain-python train.py
"""
_STATUS = {
    "0": "done",
    "1": "a failure, or a check that found a problem",
    "2": "bad input, or the launcher has started other ranks than it announced; nothing was run",
    "75": "saved, please start the same command again",
    "130": "interrupted",
    "143": "terminated before the run had begun; there was nothing to save",
}
_VARIABLES = {
    "HPCTRAIN_TIMEOUT": "seconds that a rank waits for the others before it ends the job (600)",
    "HPCTRAIN_DEADLINE": "end of the job in seconds since 1970; the run saves before it",
    "HPCTRAIN_ASKED_BY": "USR1: every request to end the job reaches the ranks as SIGUSR1; scripts of job set it",
    "HPCTRAIN_CHAIN": "id of the first job of a chain of restarts; scripts of job set it",
    "HPCTRAIN_START": "a different value in each start of a job; scripts of job set it under PBS and with spare nodes",
    "HPCTRAIN_FILE_PATIENCE": "seconds for which file system calls are retried after transient errors (15)",
    "HPCTRAIN_FAULT": "faults to inject into a run, to test that it survives them: kill rank=2 step=7 at=backward",
    "HPCTRAIN_NODES": "set by job scripts with a range of nodes: the range, for the receipt",
    "HPCTRAIN_GPUS_PER_NODE": "set by job scripts with GPUs: their number per node; a rank that sees none is an error",
    "HPCTRAIN_SPARES": "set by job scripts with spare nodes: the number of those that idle, for the receipt",
    "HPCTRAIN_LIVING": "set by job scripts with spare nodes for their own next start: the nodes that answer",
    "HPCTRAIN_WATCHER": "the same: the process that watches the node of the script",
    "HPCTRAIN_CHECK": "order: compare each collective over all ranks before it begins",
    "HPCTRAIN_CALIBRATION": "file with calibrations of the collectives, or a folder of such files",
    "HPCTRAIN_ONESIDED": "mpi, messages or auto: transport between nodes of memory that ranks expose to each other",
    "HPCTRAIN_MALLOC": "0: do not change the thresholds of the C library's malloc",
    "HPCTRAIN_CUDA_AWARE": "1 or 0: MPI gets device pointers, or none",
    "HPCTRAIN_PROFILE": "default site profile of job and submit",
    "HPCTRAIN_ROOT": "folder of the installation of the loaded module; only job and submit read it",
}
_FILES = {
    "RUN/metrics.jsonl": "one JSON object per step",
    "RUN/checkpoints/step_*.h5": "checkpoints, plain HDF5",
    "RUN/run.json": "user, host, versions and end of every attempt",
    "RUN/config.toml": "the settings as used",
    "RUN/faults.jsonl": "one JSON object per injected fault; the same fault does not fire again in this folder",
    "RUN/STOP, RUN/SAVE": "create one of these: the run saves and stops, or saves and continues",
    "~/.config/hpctrain/profiles/*.toml": "your own profiles for job and submit",
}
_SEE = "mpiexec(1), srun(1), sbatch(1), qsub(1), module(1), h5ls(1)"


def main() -> int:
    """Print the page."""
    sys.stdout.write("\n".join(page()) + "\n")
    return 0


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield f'.TH HPCTRAIN 1 "" "hpctrain {__version__}" "hpctrain"'
    yield from (".nh", ".ad l")  # names and options are meant to be copied, so they are not hyphenated
    yield from (".SH NAME", r"hpctrain \- train PyTorch models on the ranks of MPI, in batch jobs on clusters")
    yield from (".SH SYNOPSIS", r"\fBhpctrain\fR \fIVERB\fR [\fIARGUMENTS\fR]", ".br")
    yield r"\fBmpiexec \-n\fR \fIN\fR \fBhpctrain train\fR \fICONFIG.toml\fR"
    yield ".SH DESCRIPTION"
    yield from _prose(_DESCRIPTION)
    yield from _table("VERBS", VERBS)
    parser = parser_with(VERBS)
    for verb in _below(parser).values():
        yield f".SH {_escaped(verb.prog)}"
        yield from _command(verb)
    yield from _table("EXIT STATUS", _STATUS)
    yield from _table("ENVIRONMENT", _VARIABLES)
    yield from _table("FILES", _FILES)
    yield ".SH EXAMPLES"
    yield from _prose(_named(parser, parser.epilog))
    yield from (".SH SEE ALSO", _escaped(_SEE))


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options of one parser, and then those of its subparsers."""
    below = _below(parser)
    if not below:
        usage = " ".join(parser.format_usage().split()).removeprefix(f"usage: {parser.prog}")
        yield from (".HP", rf"\fB{_escaped(parser.prog)}\fR{_escaped(usage)}")
    yield from _prose(_named(parser, parser.description))
    for group in parser._action_groups:
        yield from _options(parser, group)
    yield from _prose(_named(parser, parser.epilog))
    for one in below.values():
        yield f".SS {_escaped(one.prog)}"
        yield from _command(one)


def _named(parser: argparse.ArgumentParser, text: str | None) -> str:
    """Return a text with the command's name inserted, as argparse does it."""
    return (text or "").replace("%(prog)s", parser.prog)


def _options(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> Iterator[str]:
    """Yield arguments and options of a group, with its title if the author gave one."""
    wanted = [one for one in group._group_actions if one.dest != "help" and not hasattr(one, "add_parser")]
    if wanted and group.title not in ("positional arguments", "options"):
        yield from (".PP", f"{_escaped(str(group.title).capitalize())}:")
    for action in wanted:
        value = "" if action.nargs == 0 else rf" \fI{_escaped(_value(action))}\fR"
        flags = ", ".join(rf"\fB{_escaped(flag)}\fR{value}" for flag in action.option_strings)
        text = (action.help or "") % {**vars(action), "prog": parser.prog}
        yield from (".TP", flags or value.strip(), _escaped(text) or r"\&")


def _value(action: argparse.Action) -> str:
    name = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    several = action.nargs in ("*", "+")
    return f"{name if isinstance(name, str) else ' '.join(name)}{' ...' if several else ''}"


def _below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the verbs or actions of a parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _table(title: str, rows: dict[str, str]) -> Iterator[str]:
    yield f".SH {title}"
    for name, text in rows.items():
        yield from (".TP", rf"\fB{_escaped(name)}\fR", _escaped(text))


def _prose(text: str) -> Iterator[str]:
    """Yield paragraphs; indented lines, such as examples, stay unchanged."""
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        lines = paragraph.splitlines()
        flowing = [line for line in lines if not line.startswith(" ")]
        yield from (".PP", *map(_escaped, flowing))
        if kept := [line for line in lines if line.startswith(" ")]:
            yield from (".RS 4", ".nf", *(_escaped(line.strip()) for line in kept), ".fi", ".RE")


def _escaped(text: str) -> str:
    """Return text with roff's special characters escaped: backslashes, dashes, a dot at the start of a line."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{text}" if text.startswith((".", "'")) else text


if __name__ == "__main__":
    sys.exit(main())

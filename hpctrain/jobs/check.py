"""Strict checks of the directives of a job script: sbatch(1) of Slurm 22.05 to 24.11, qsub(1B), pbs_resources(7B).

A scheduler ignores a line that it does not recognize as a directive; the job then runs on one core,
or without a time limit. Therefore a line that looks like a directive, but is not one, is an error
here.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpctrain.errors import UsageError

Message = tuple[int, str]  # line number and text
Directive = tuple[int, tuple[str, ...]]  # line number and words


def problems(script: str) -> list[str]:
    """Return the errors in the directives of a script, in the order of its lines; empty if there are none."""
    slurm, pbs = read(script, "SBATCH"), read(script, "PBS")
    if not slurm[0] and not pbs[0]:
        raise UsageError("the script has no directive: its lines begin with #SBATCH (Slurm) or #PBS (PBS)")
    messages = []
    for check, (directives, ignored) in ((check_slurm, slurm), (check_pbs, pbs)):
        if directives:
            messages += [*ignored, *check(directives)]
    if not script.startswith("#!"):
        messages.append((1, "the first line must name the shell, as in #!/bin/bash"))
    if slurm[0] and pbs[0]:
        messages.append((1, "directives of Slurm and of PBS in one script: Slurm reads both"))
    return [f"line {number}: {text}" for number, text in sorted(messages)]


def read(script: str, marker: str) -> tuple[list[Directive], list[Message]]:
    """Return the directives with this marker (SBATCH or PBS), and messages about lines that will be ignored.

    Directives must precede the first command.
    """
    directives: list[Directive] = []
    ignored: list[Message] = []
    command = 0
    # Not splitlines(): for a scheduler only a line feed ends a line.
    for number, line in enumerate(script.split("\n"), 1):
        if line.startswith(f"#{marker}") and line[len(marker) + 1 : len(marker) + 2] in ("", " ", "\t"):
            words = _words(line[len(marker) + 1 :], marker)
            if command:
                ignored.append((number, f"a directive after the first command (line {command}) is ignored"))
            elif isinstance(words, str):
                ignored.append((number, words))
            else:
                directives.append((number, words))
        elif re.match(rf"\s*#\s*{marker}\s+-", line, re.IGNORECASE):
            ignored.append((number, f"not a directive, which begins with #{marker} at the start of its line"))
        elif line.strip() and not line.lstrip().startswith("#"):
            command = command or number
    return directives, ignored


def _words(text: str, marker: str) -> tuple[str, ...] | str:
    """Return the words of a directive, or what is wrong with it."""
    bad = next((character for character in text if not character.isprintable() and character != "\t"), None)
    if bad is not None:
        return f"holds the character U+{ord(bad):04X}"
    try:
        # sbatch allows comments after a directive; PBS takes them for arguments (its make_argv
        # knows no comments).
        words = shlex.split(text, comments=marker == "SBATCH")
    except ValueError:
        return "an unmatched quotation mark"
    return tuple(words) or "an empty directive"


# sbatch(1) ------------------------------------------------------------------------------------------------------------


_MAILS = "NONE|BEGIN|END|FAIL|REQUEUE|ALL|INVALID_DEPEND|STAGE_OUT|TIME_LIMIT(_90|_80|_50)?|ARRAY_TASKS"

# Grammars of option values: a pattern, and a description of it.
_GRAMMARS = {
    "text": (r".+", "text"),
    "number": (r"[0-9]+", "a number"),
    "count": (r"[1-9][0-9]*", "a number from 1 on"),
    "nodes": (r"[1-9][0-9]*[km]?(-[1-9][0-9]*[km]?)?(:[1-9][0-9]*)?|[0-9]+(,[0-9]+)*", "nodes, as in 2 or 2-4"),
    "time": (
        r"[0-9]+|[0-9]+:[0-5]?[0-9]|[0-9]+:[0-5]?[0-9]:[0-5]?[0-9]|[0-9]+-[0-9]+(:[0-5]?[0-9]){0,2}|INFINITE|UNLIMITED",
        "minutes, minutes:seconds, hours:minutes:seconds or days-hours[:minutes[:seconds]]",
    ),
    "memory": (r"[0-9]+[KMGT]?B?", "a number, with K, M, G or T"),
    "signal": (r"([RB]{1,2}:)?(SIG)?([A-Z]+[0-9]?|[0-9]+)(@[0-9]{1,5})?", "a signal, as in USR1@300 or B:USR1@300"),
    "array": (r"[0-9]+(-[0-9]+(:[0-9]+)?)?(,[0-9]+(-[0-9]+(:[0-9]+)?)?)*(%[0-9]+)?", "indices, as in 0-7 or 1,3,5%2"),
    "name": (r"[^\s,]+", "a name"),
    "names": (r"[^\s,]+(,[^\s,]+)*", "names with commas between them"),
    "path": (r"\S.*", "a path"),
    "gpus": (r"([A-Za-z][\w.-]*:)?[0-9]+(,([A-Za-z][\w.-]*:)?[0-9]+)*", "a number, or as in a100:4"),
    "gres": (
        r"none|help|[A-Za-z]\w*([:=][\w.-]+){0,2}(,[A-Za-z]\w*([:=][\w.-]+){0,2})*",
        "resources, as in gpu:4 or gpu:a100:4",
    ),
    "append": (r"append|truncate", "append or truncate"),
    "dependency": (
        r"singleton|(after(any|ok|notok|corr|burstbuffer)?(:[0-9_]+(\+[0-9]+)?)+)([,?].+)?",
        "as in afterany:1234",
    ),
    "bind": (r"(verbose,|quiet,|v,|q,)?[a-z_]+([:=][\w,.:/x*+-]+)?", "a kind of binding, as in closest"),
    "hint": (r"compute_bound|memory_bound|(no)?multithread|help", "compute_bound, memory_bound or nomultithread"),
    "mail": (rf"(?i:({_MAILS})(,({_MAILS}))*)", "BEGIN, END, FAIL, REQUEUE, ALL, ..."),
    "yesno": (r"yes|no|YES|NO", "yes or no"),
    "exclusive": (r"user|mcs|topo", "user, mcs or topo"),
    "distribution": (
        r"(\*|block|cyclic|arbitrary|plane=[0-9]+)(:(\*|block|cyclic|fcyclic)){0,2}(,(No)?Pack)?",
        "as in block:cyclic",
    ),
}

# Option, its letter (-: none), and the grammar of its value; a question mark marks an optional
# value.
_SLURM_OPTIONS = """
account A name; acctg-freq - text; array a array; batch - text; bb - text; bbf - path; begin b text; chdir D path;
cluster-constraint - text; clusters M names; comment - text; constraint C text; container - path; container-id - name;
contiguous; core-spec S number; cores-per-socket - count; cpu-freq - text; cpus-per-gpu - count;
cpus-per-task c count; deadline - text; delay-boot - number; dependency d dependency; distribution m distribution;
error e path; exclude x text; exclusive - ?exclusive; export - text; export-file - path; extra - text;
extra-node-info B text; get-user-env - ?text; gid - name; gpu-bind - bind; gpu-freq - text; gpus G gpus;
gpus-per-node - gpus; gpus-per-socket - gpus; gpus-per-task - gpus; gres - gres; gres-flags - text; hint - hint;
hold H; ignore-pbs; input i path; job-name J text; kill-on-invalid-dep - yesno; licenses L text; mail-type - mail;
mail-user - name; mcs-label - name; mem - memory; mem-bind - text; mem-per-cpu - memory; mem-per-gpu - memory;
mincpus - count; network - text; nice - ?text; no-kill k ?text; no-requeue; nodefile F path; nodelist w text;
nodes N nodes; ntasks n count; ntasks-per-core - count; ntasks-per-gpu - count; ntasks-per-node - count;
ntasks-per-socket - count; open-mode - append; output o path; overcommit O; oversubscribe s; parsable;
partition p names; power - text; prefer - text; priority - text; profile - text; propagate - ?text; qos q name;
quiet Q; reboot; requeue; reservation - names; segment - count; signal - signal; sockets-per-node - count; spread-job;
stepmgr; switches - text; thread-spec - number; threads-per-core - count; time t time; time-min - time; tmp - memory;
tres-bind - text; tres-per-task - text; uid - name; use-min-nodes; verbose v; wait W; wait-all-nodes - number;
wckey - text
"""

# Groups of mutually exclusive options.
_EITHER = (
    ("mem", "mem-per-cpu", "mem-per-gpu"),
    ("requeue", "no-requeue"),
    ("exclusive", "oversubscribe"),
    ("cpus-per-task", "cpus-per-gpu"),
    ("ntasks-per-gpu", "gpus-per-task"),
    ("ntasks-per-gpu", "gpus-per-node"),
)
_COUNTS = ("ntasks", "ntasks-per-node", "gpus", "ntasks-per-gpu")


@dataclass(frozen=True)
class _Option:
    name: str
    grammar: str | None  # None: the option takes no value
    optional: bool


def _table() -> dict[str, _Option]:
    """Return the options by name and by letter."""
    table = {}
    for entry in _SLURM_OPTIONS.replace("\n", " ").split(";"):
        name, letter, grammar, *_ = [*entry.split(), "", ""]
        option = _Option(name, grammar.lstrip("?") or None, grammar.startswith("?"))
        table[f"--{name}"] = option
        if letter not in ("", "-"):
            table[f"-{letter}"] = option
    return table


_TABLE = _table()


def check_slurm(directives: Sequence[Directive]) -> list[Message]:
    """Return messages on directives that sbatch would reject or misinterpret."""
    messages: list[Message] = []
    seen: dict[str, int] = {}
    values: dict[str, str] = {}
    for line, words in directives:
        for name, value in _slurm_options(line, [*words], messages):
            if name in seen:
                messages.append((line, f"--{name} is already in line {seen[name]}"))
            seen.setdefault(name, line)
            values.setdefault(name, value or "")
            grammar = _TABLE[f"--{name}"].grammar
            if value is not None and grammar and not re.fullmatch(_GRAMMARS[grammar][0], value):
                messages.append((line, f"--{name}={value}: expected {_GRAMMARS[grammar][1]}"))
    return messages + _slurm_contradictions(seen) + _range_of_nodes(seen.get("nodes", 0), values)


def _slurm_options(line: int, words: list[str], messages: list[Message]) -> Iterator[tuple[str, str | None]]:
    """Yield the options of a line, and their values; append a message for words that are no options."""
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            messages.append((line, f"{word!r} is not an option, and everything after it is ignored"))
            return
        name, equals, value = word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
        option = _TABLE.get(name)
        if option is None:
            messages.append((line, _unknown(name)))
            return
        if not equals and option.grammar and not option.optional:
            if not words or words[0].startswith("-"):
                messages.append((line, f"{name} needs a value: {_GRAMMARS[option.grammar][1]}"))
                return
            value = words.pop(0)
        if equals and option.grammar is None:
            messages.append((line, f"{name} takes no value"))
            return
        yield option.name, value if equals or value else None


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, _TABLE, n=1)
    return f"sbatch knows no {name}" + (f", did you mean {close[0]}?" if close else "")


def _slurm_contradictions(seen: dict[str, int]) -> list[Message]:
    messages = []
    for group in _EITHER:
        there = [name for name in group if name in seen]
        if len(there) > 1:
            line = max(seen[name] for name in there)
            messages.append((line, " and ".join(f"--{name}" for name in there) + " exclude each other"))
    if "gpus-per-task" in seen and not any(name in seen for name in _COUNTS):
        messages.append((seen["gpus-per-task"], "--gpus-per-task needs a number of tasks, as by --ntasks-per-node"))
    return messages


def _range_of_nodes(line: int, values: dict[str, str]) -> list[Message]:
    """Return messages on a range that descends, or of which Slurm uses only a part: it grants one node per task."""
    match = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", values.get("nodes", ""))
    least, most = (int(match[1]), int(match[2])) if match else (0, 0)
    if most < least:
        return [(line, f"--nodes={values['nodes']}: expected the smaller number first")]
    for name, nodes in (("ntasks", 1), ("ntasks-per-node", least)):
        tasks = int(values[name]) * nodes if re.fullmatch("[0-9]{1,9}", values.get(name, "")) else most
        if least <= tasks < most:
            advice = f"with --{name}={values[name]}, Slurm grants at most {tasks} nodes; request cores by --mincpus"
            return [(line, f"--nodes={values['nodes']}: {advice}")]
    return []


# qsub(1B) and pbs_resources(7B) of OpenPBS and PBS Professional -------------------------------------------------------


_NAME = r"[\w.+@/-]+"
_VALUE = r"[\w.,+@/:=^-]+"

# By option letter: the pattern of its value, and a description of it; None: the option takes no
# value.
_PBS_OPTIONS: dict[str, tuple[str, str] | None] = {
    "a": (r"([0-9]{2}){4,6}(\.[0-9]{2})?", "a date, as in 12312359"),
    "A": (r"\S+", "an account"),
    "c": (r"[nsu]|c(=[0-9]+)?|w(=[0-9]+)?", "n, s, c, w or u"),
    "C": (r"\S+", "a prefix of directives"),
    "e": (r"\S+", "a path"),
    "f": None,
    "h": None,
    "j": (r"oe|eo|n", "oe, eo or n"),
    "J": (r"[0-9]+-[0-9]+(:[1-9][0-9]*)?(%[1-9][0-9]*)?", "a range of indices, as in 0-7"),
    "k": (r"n|d?[oe]{1,2}|[oe]{1,2}d?", "o, e, oe, n, or with d to write there directly"),
    "l": (r"\S+", "resources"),
    "m": (r"n|j?[abe]{1,3}", "letters of a, b, e, or n"),
    "M": (rf"{_NAME}(,{_NAME})*", "addresses"),
    "N": (r"[A-Za-z0-9_+-][\w.+-]*", "a name without blanks"),
    "o": (r"\S+", "a path"),
    "p": (r"[+-]?[0-9]{1,4}", "a number from -1024 to 1023"),
    "P": (r"\S+", "a project"),
    "q": (r"[\w-]+(@[\w.:-]+)?|@[\w.:-]+", "a queue"),
    "r": (r"y|n", "y or n"),
    "R": (r"[oe]{1,2}", "o, e or oe"),
    "S": (r"/\S+", "the path of a shell"),
    "u": (r"\S+", "a user"),
    "v": (r"[A-Za-z_]\w*(=[^,\s]*)?(,[A-Za-z_]\w*(=[^,\s]*)?)*", "variables, as in A=1,B"),
    "V": None,
    "W": (r"[a-z_]+=\S+", "an attribute, as in depend=afterany:1234"),
    "X": None,
    "z": None,
}
_LONGEST_NAME = 230  # characters: the limit of OpenPBS
# Resources that belong to a chunk of select, and those of the whole job.
_CHUNK = {"ncpus", "mpiprocs", "ompthreads", "mem", "vmem", "naccelerators", "ngpus", "host", "vnode", "arch"}
_TIMES = {"walltime", "cput", "pcput", "min_walltime", "max_walltime"}
_JOB = {*_TIMES, "nice", "place", "select", "nodes", "file", "preempt_targets"}
_TIME = r"[0-9]+|([0-9]+:)?[0-9]+:[0-5][0-9](\.[0-9]+)?"
_PLACE = r"(free|pack|scatter|vscatter)?(:?(excl|shared|exclhost))?(:?group=\w+)?"
_NUMBERS = {"ncpus", "mpiprocs", "ompthreads", "ngpus", "naccelerators"}
_SIZES = {"mem", "vmem"}


def check_pbs(directives: Sequence[Directive]) -> list[Message]:
    """Return messages on directives that qsub would reject or misinterpret."""
    messages: list[Message] = []
    seen: dict[str, int] = {}
    resources: dict[str, int] = {}
    for line, words in directives:
        for letter, value, complaint in _pbs_options([*words]):
            if complaint:
                messages.append((line, complaint))
                continue
            if letter in seen and letter not in "lWv":
                messages.append((line, f"-{letter} is already in line {seen[letter]}"))
            seen.setdefault(letter, line)
            if letter == "l":
                messages += [(line, text) for text in _resources(value, resources, line)]
            elif letter == "N" and len(value) > _LONGEST_NAME:
                messages.append((line, f"-N: a name has at most {_LONGEST_NAME} characters"))
            elif letter == "J" and not _ascends(value):
                messages.append((line, f"-J {value}: an array has at least two indices, the first the lower"))
    return messages + _pbs_contradictions(resources)


def _pbs_options(words: list[str]) -> list[tuple[str, str, str]]:
    """Return the letter, the value and the error (else empty) of every option of a line."""
    found = []
    while words:
        word = words.pop(0)
        letter, value = word[1:2], word[2:]
        if not word.startswith("-") or letter not in _PBS_OPTIONS:
            hint = ": a line of directives takes no comment" if word.startswith("#") else ""
            found.append((letter, "", f"{word!r} is not an option of qsub{hint}"))
            break
        grammar = _PBS_OPTIONS[letter]
        if grammar is None:
            found.append((letter, "", f"-{letter} takes no value" if value else ""))
            continue
        if not value:
            if not words:
                found.append((letter, "", f"-{letter} needs a value: {grammar[1]}"))
                break
            value = words.pop(0)
        fits = re.fullmatch(grammar[0], value)
        found.append((letter, value, "" if fits else f"-{letter} {value}: expected {grammar[1]}"))
    return found


def _resources(text: str, seen: dict[str, int], line: int) -> list[str]:
    """Return the errors of one ``-l``: job-wide resources separated by commas, with chunks within select."""
    messages = []
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or not value or not re.fullmatch(r"[A-Za-z]\w*", name):
            messages.append(f"-l {part}: expected resource=value")
            continue
        if name in seen:
            messages.append(f"-l {name} is already in line {seen[name]}")
        seen.setdefault(name, line)
        messages += _resource(name, value)
    return messages


def _resource(name: str, value: str) -> list[str]:
    if name == "select":
        return [text for chunk in value.split("+") for text in _chunk(chunk)]
    if name == "place":
        return [] if re.fullmatch(_PLACE, value) else [f"-l place={value}: expected as in scatter:excl"]
    if name in _TIMES:
        return [] if re.fullmatch(_TIME, value) else [f"-l {name}={value}: expected hours:minutes:seconds"]
    return [] if re.fullmatch(_VALUE, value) else [f"-l {name}={value}: expected a value without blanks"]


def _chunk(chunk: str) -> list[str]:
    """Return the errors of a chunk: a count and resources, separated by colons."""
    parts = chunk.split(":")
    if re.fullmatch(r"[1-9][0-9]*", parts[0]):
        parts = parts[1:]
    messages = []
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z]\w*", name) or not re.fullmatch(_VALUE, value):
            messages.append(f"select: {part!r} in {chunk!r} is not of the form resource=value")
        elif name in _JOB:
            messages.append(f"select: {name} is of the whole job, not of a chunk: write -l {name}={value}")
        elif name in _NUMBERS and not re.fullmatch(r"[0-9]+", value):
            messages.append(f"select: {part}: expected a number")
        elif name in _SIZES and not re.fullmatch(r"[0-9]+([kmgtp]?[bw])?", value):
            messages.append(f"select: {part}: expected an amount such as 200gb")
    return messages


def _pbs_contradictions(seen: dict[str, int]) -> list[Message]:
    messages = []
    if "select" in seen and "nodes" in seen:
        messages.append((seen["nodes"], "nodes= is the old form and cannot be mixed with select="))
    if "select" in seen or "place" in seen:
        inside = sorted(name for name in seen if name in _CHUNK)
        messages += [(seen[name], f"{name} belongs in a chunk of select, not beside it") for name in inside]
    if "place" in seen and "select" not in seen:
        messages.append((seen["place"], "place= needs select="))
    return messages


def _ascends(text: str) -> bool:
    match = re.match(r"([0-9]+)-([0-9]+)", text)
    return match is not None and int(match[1]) < int(match[2])

"""Checks of ``#SBATCH`` lines, by sbatch(1) of Slurm 22.05 to 24.11."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpctrain.jobs.check.lines import Directive, Message

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
    "mail": (
        rf"(?i:({_MAILS})(,({_MAILS}))*)",
        "BEGIN, END, FAIL, REQUEUE, ALL, ...",
    ),
    "yesno": (r"yes|no|YES|NO", "yes or no"),
    "exclusive": (r"user|mcs|topo", "user, mcs or topo"),
    "distribution": (
        r"(\*|block|cyclic|arbitrary|plane=[0-9]+)(:(\*|block|cyclic|fcyclic)){0,2}(,(No)?Pack)?",
        "as in block:cyclic",
    ),
}

# Option, its letter (-: none), and the grammar of its value; a question mark marks an optional
# value.
_OPTIONS = """
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
    for entry in _OPTIONS.replace("\n", " ").split(";"):
        name, letter, grammar, *_ = [*entry.split(), "", ""]
        option = _Option(name, grammar.lstrip("?") or None, grammar.startswith("?"))
        table[f"--{name}"] = option
        if letter not in ("", "-"):
            table[f"-{letter}"] = option
    return table


_TABLE = _table()


def check(directives: Sequence[Directive]) -> list[Message]:
    """Return messages on directives that sbatch would reject or misinterpret."""
    messages: list[Message] = []
    seen: dict[str, int] = {}
    for directive in directives:
        for name, value in _options(directive, messages):
            if name in seen:
                messages.append((directive.line, f"--{name} is already in line {seen[name]}"))
            seen.setdefault(name, directive.line)
            grammar = _TABLE[f"--{name}"].grammar
            if value is not None and grammar and not re.fullmatch(_GRAMMARS[grammar][0], value):
                messages.append((directive.line, f"--{name}={value}: expected {_GRAMMARS[grammar][1]}"))
    return messages + _contradictions(seen)


def _options(directive: Directive, messages: list[Message]) -> Iterator[tuple[str, str | None]]:
    """Yield the options of a line, and their values; append a message for words that are no options."""
    words = list(directive.words)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            messages.append((directive.line, f"{word!r} is not an option, and everything after it is ignored"))
            return
        name, equals, value = word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
        option = _TABLE.get(name)
        if option is None:
            messages.append((directive.line, _unknown(name)))
            return
        if not equals and option.grammar and not option.optional:
            if not words or words[0].startswith("-"):
                messages.append((directive.line, f"{name} needs a value: {_GRAMMARS[option.grammar][1]}"))
                return
            value = words.pop(0)
        if equals and option.grammar is None:
            messages.append((directive.line, f"{name} takes no value"))
            return
        yield option.name, value if equals or value else None


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, _TABLE, n=1)
    return f"sbatch knows no {name}" + (f", did you mean {close[0]}?" if close else "")


def _contradictions(seen: dict[str, int]) -> list[Message]:
    messages = []
    for group in _EITHER:
        there = [name for name in group if name in seen]
        if len(there) > 1:
            line = max(seen[name] for name in there)
            messages.append((line, " and ".join(f"--{name}" for name in there) + " exclude each other"))
    if "gpus-per-task" in seen and not any(name in seen for name in _COUNTS):
        messages.append((seen["gpus-per-task"], "--gpus-per-task needs a number of tasks, as by --ntasks-per-node"))
    return messages

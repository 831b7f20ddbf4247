"""Checks of ``#PBS`` lines, by qsub(1B) and pbs_resources(7B) of OpenPBS and PBS Professional."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpctrain.jobs.check.lines import Directive, Message

_NAME = r"[\w.+@/-]+"
_VALUE = r"[\w.,+@/:=^-]+"

# By option letter: the pattern of its value, and a description of it; None: the option takes no
# value.
_OPTIONS: dict[str, tuple[str, str] | None] = {
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


def check(directives: Sequence[Directive]) -> list[Message]:
    """Return messages on directives that qsub would reject or misinterpret."""
    messages: list[Message] = []
    seen: dict[str, int] = {}
    resources: dict[str, int] = {}
    for directive in directives:
        line = directive.line
        for letter, value, complaint in _options(directive):
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
    return messages + _contradictions(resources)


def _options(directive: Directive) -> list[tuple[str, str, str]]:
    """Return the letter, the value and the error (else empty) of every option of a line."""
    found = []
    words = list(directive.words)
    while words:
        word = words.pop(0)
        letter, value = word[1:2], word[2:]
        if not word.startswith("-") or letter not in _OPTIONS:
            hint = ": a line of directives takes no comment" if word.startswith("#") else ""
            found.append((letter, "", f"{word!r} is not an option of qsub{hint}"))
            break
        grammar = _OPTIONS[letter]
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


def _contradictions(seen: dict[str, int]) -> list[Message]:
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

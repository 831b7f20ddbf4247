"""Counter of prose that is not the field's English, in docstrings, comments, messages and documentation.

    python packaging/language.py                     hits per folder and rule
    python packaging/language.py hpctrain/train      each hit in a folder or file, as FILE:LINE: rule: text
    python packaging/language.py --json

``tests/test_language.py`` compares the counts with ``tests/golden/language.json``: they may decrease, but not increase.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("hpctrain", "docs", "tests", "benchmarks", "jobs", "modules", "packaging")
PAGES = ("README.md", "CONTRIBUTING.md", "Makefile", "benchmarks/Makefile")
THINGS = (
    "rank|file|step|node|stage|process|window|unit|bucket|layer|pass|message|microbatch|worker|core|element|parameter"
    "|second"
)

# What a rule finds in prose, and what to write instead.
PROSE = {
    "a call by all": (r"\bcalls? by all\b", "'Collective.'"),
    "tell whether": (r"\b[Tt]ell whether\b", "'Return whether'"),
    "nobody": (r"\b[Nn]obody\b", "the positive rule, or 'no rank', 'no process'"),
    "a for per": (
        rf"\b(?:(?:one|once|twice|times|bytes|[KMGT]i?B|lines|messages|elements|[0-9]+) an? (?:{THINGS})"
        r"|one \w+ an? (?:rank|node|stage|process|worker|unit|window))\b",
        "'per'",
    ),
    "lies": (r"\b(?:lies|lying|lay)\b", "'is', 'is stored'"),
    "stands": (r"\bstands?\b(?! (?:in|alone)\b)|\bstand-ins?\b", "'is', 'represents', 'substitute'"),
    "comes to be": (r"\b(?:comes?|came) to (?:be|say|an end|its end)\b", "'becomes', 'ends'"),
    "goes on": (r"\b(?:go|goes|went|gone|going) on\b(?! (?:line|a|the)\b)", "'continues'"),
    "that is none": (r"\b(?:that|which) (?:is|are|was|were) none\b", "'is not a ...'"),
    "who, what": (r"(?:^|[.:;] )(?:Who|What)\b[^?.]*(?:\.(?:\s|$)|$)", "subject, verb, object"),
    "metaphor": (
        r"\b(?:couriers?|desks?|scribes?|farewells?|last words|wish(?:es)?|governors?|vitals|lanes?|seats?"
        r"|summon\w*|dismiss\w*|crowded|announcers?|ledgers?|rehears\w+|tally|tallies|hands (?:it|them) on"
        r"|lend(?:s|ing)?|lent)\b",
        "the field's term (glossary of CONTRIBUTING.md)",
    ),
}
# Docstrings of classes and modules are noun phrases; those of functions begin with a verb that says what is done.
CLASS_START = (
    r"(?:Be|Hold|Say|Know|Keep|Let|Tell|Take|Make|Do|Find|Give|Have|Put|See|Show|Write|Read|Run|Send|Share|Sum|Start"
    r"|Stand|Come|Carry|Bring|Build|Call|Count|Cut|Compute|Choose|Check|Collect|Turn|Want|Wait|Watch|Pass|Move|Measure"
    r"|Who|What|Which|Where|How|Anything|Whatever)\b"
)
_PATTERNS = {rule: re.compile(pattern, re.MULTILINE) for rule, (pattern, _) in PROSE.items()}
FUNCTION_START = r"(?:Be|Say|Know|Stand|Come|What|Who)\b"


class Hit(NamedTuple):
    """One place that a rule found."""

    path: Path
    line: int
    rule: str
    text: str


def hits(root: Path = ROOT, only: Path | None = None) -> list[Hit]:
    """Return all hits below ``root``, in the order of files; of one folder or file only where it is named."""
    found = []
    for path in paths(root):
        if only is None or path == only or only in path.parents:
            found += hits_of(path, root, text := path.read_text(), ast.parse(text) if path.suffix == ".py" else None)
    return found


def counts(found: list[Hit]) -> dict[str, int]:
    """Return the number of hits per top folder; packages of the library count for themselves."""
    return dict(sorted(Counter(_folder(hit.path) for hit in found).items()))


def _folder(path: Path) -> str:
    parts = path.parts[:-1]
    return "/".join(parts[: 2 if parts[:1] == ("hpctrain",) else 1]) or path.name


def paths(root: Path) -> Iterator[Path]:
    """Yield the files whose prose is read."""
    for name in FOLDERS:
        for path in sorted((root / name).rglob("*")):
            hidden = any(part.startswith(".") or part in ("__pycache__", "golden", "results") for part in path.parts)
            if path.suffix in (".py", ".md", ".sh", ".toml", ".lua", ".tcl") and not hidden:
                if path != Path(__file__).resolve() and path.name != "test_language.py":
                    yield path
    yield from (root / name for name in PAGES if (root / name).exists())


def hits_of(path: Path, root: Path, text: str, tree: ast.Module | None) -> list[Hit]:
    """Return the hits in a file; ``tree`` is that of a Python file."""
    name, found = path.relative_to(root), []
    for line, prose, start in _plain(path, text) if tree is None else _python(text, tree):
        for rule, pattern in _PATTERNS.items():
            for match in pattern.finditer(prose):
                around = " ".join(prose[max(0, match.start() - 40) : match.end() + 30].split())
                found.append(Hit(name, line + prose.count("\n", 0, match.start()), rule, around))
        if start and re.match(start, prose):
            found.append(Hit(name, line, "first word", prose.splitlines()[0]))
    return found


def _python(text: str, tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield docstrings, other texts and blocks of comments: the line, the prose, what it must not start with."""
    seen, strings = set(), []
    for node in ast.walk(tree):  # a docstring comes after what it describes
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if (docstring := ast.get_docstring(node)) and isinstance(body := node.body[0], ast.Expr):
                seen.add(id(body.value))
                start = FUNCTION_START if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else CLASS_START
                yield body.lineno, docstring, start
        elif isinstance(node, (ast.Constant, ast.JoinedStr)):
            value = getattr(node, "value", "")
            if not isinstance(value, (str, bytes)):
                continue
            strings.append(node)
            if isinstance(value, str) and id(node) not in seen and " " in value.strip():
                yield node.lineno, value, ""
    block: list[str] = []
    last = -1
    for line, comment in _comments(text, strings):
        if line != last + 1 and block:
            yield last - len(block) + 1, "\n".join(block), ""
            block = []
        block.append(comment.lstrip("# "))
        last = line
    if block:
        yield last - len(block) + 1, "\n".join(block), ""


def _comments(text: str, strings: Iterable[ast.Constant | ast.JoinedStr]) -> Iterator[tuple[int, str]]:
    """Yield the comments with their lines, as ``tokenize`` does, in a thirtieth of the time.

    They begin at the first # of a line that is not inside a string. Strings that are joined over
    several lines may have comments between them, so their file is tokenized.
    """
    lines = text.encode().split(b"\n")
    inside: dict[int, list[tuple[int, int]]] = {}
    for node in strings:
        first, end = node.lineno, node.end_lineno or node.lineno
        for number in range(first, end + 1):
            if b"#" in lines[number - 1]:
                if first != end and not _is_one_string(lines, node):
                    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
                    yield from ((one.start[0], one.string) for one in tokens if one.type == tokenize.COMMENT)
                    return
                begin = node.col_offset if number == first else 0
                close = (node.end_col_offset or 0) if number == end else len(lines[number - 1])
                inside.setdefault(number, []).append((begin, close))
    for number, line in enumerate(lines, 1):
        place = line.find(b"#")
        while place >= 0 and any(begin <= place < end for begin, end in inside.get(number, ())):
            place = line.find(b"#", place + 1)
        if place >= 0:
            yield number, line[place:].decode()


def _is_one_string(lines: list[bytes], node: ast.Constant | ast.JoinedStr) -> bool:
    """Return whether a string over several lines is a single one, in three quotes."""
    span = lines[node.lineno - 1 : node.end_lineno]
    source = b"\n".join([*span[:-1], span[-1][: node.end_col_offset]])[node.col_offset :].lstrip(b"rRbBfFuU")
    return source[:3] == source[-3:] and source[:3] in (b"'''", b'"""') and source.count(source[:3]) == 2


def _plain(path: Path, text: str) -> Iterator[tuple[int, str, str]]:
    """Yield a page, or the comments of a script."""
    if path.suffix == ".md":
        for line, one in enumerate(re.sub(r"`[^`\n]*`", "`x`", text).splitlines(), 1):
            yield line, one.lstrip("#*-> |"), ""
        return
    for line, one in enumerate(text.splitlines(), 1):
        if (found := re.search(r"(?:#|--)\s(.*)", one)) is not None:
            yield line, found[1], ""


def main() -> None:
    """Print what is found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", nargs="?", type=Path, help="folder or file whose hits are listed")
    parser.add_argument("--json", action="store_true", help="counts per folder as JSON")
    options = parser.parse_args()
    found = hits(only=options.path.resolve() if options.path else None)
    if options.json:
        print(json.dumps(counts(found), indent=1))
    elif options.path:
        for hit in found:
            print(f"{hit.path}:{hit.line}: {hit.rule}: {hit.text}")
    else:
        rules = Counter((_folder(hit.path), hit.rule) for hit in found)
        for folder, total in counts(found).items():
            parts = (f"{rule} {number}" for (one, rule), number in rules.most_common() if one == folder)
            print(f"{folder:24s} {total:5d}  {', '.join(parts)}")
        print(f"{'all':24s} {len(found):5d}")


if __name__ == "__main__":
    main()

"""Counts of code that is hard to follow: small modules, duplicate names, cycles, tests that access private members.

    python packaging/structure.py            a table
    python packaging/structure.py --json

``tests/test_structure.py`` compares the counts with ``tests/golden/structure.json``: they may
decrease, but not increase.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "hpctrain"
FOLDERS = (PACKAGE, "tests", "benchmarks")
SMALL, LARGE, LONGEST_FUNCTION = 60, 400, 60  # lines
_OWN = {"self", "cls", "super"}
_PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit"}  # public in Python, in spite of their names


class Facts(NamedTuple):
    """Facts about one file."""

    lines: int
    classes: list[str]  # at the top level
    imports: list[str]  # at runtime, without those for type checking
    long_functions: int
    private: set[str]  # private names that it accesses on other objects
    patches: int


def counts(root: Path = ROOT) -> dict[str, int]:
    """Return all counts."""
    return counts_of({path: facts_of(text := path.read_text(), ast.parse(text)) for path in paths(root)}, root)


def paths(root: Path) -> Iterator[Path]:
    """Yield the files that are counted."""
    for name in FOLDERS:
        yield from (path for path in sorted((root / name).rglob("*.py")) if "/." not in str(path.relative_to(root)))


def facts_of(text: str, tree: ast.Module) -> Facts:
    """Return the facts about a file, from one pass over its nodes."""
    functions, classes, attributes, patches = [], [], [], 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            attributes.append(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions.append(node)
        elif isinstance(node, ast.ClassDef):
            classes.append(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            patched = node.func.attr in {"setattr", "delattr"} and _base(node.func) in {
                "monkeypatch",
                "patch",
                "patched",
            }
            patches += patched
    own = {node.name for node in (*functions, *classes)}
    own |= {node.attr for node in attributes if _base(node) in _OWN}
    private = {
        node.attr
        for node in attributes
        if node.attr.startswith("_") and not node.attr.startswith("__") and _base(node) not in _OWN
    }
    return Facts(
        lines=text.count("\n"),
        classes=[node.name for node in tree.body if isinstance(node, ast.ClassDef)],
        imports=list(_imports(tree)),
        long_functions=sum((node.end_lineno or node.lineno) - node.lineno >= LONGEST_FUNCTION for node in functions),
        private=private - own - _PUBLIC,
        patches=patches,
    )


def _base(node: ast.Attribute) -> str:
    return node.value.id if isinstance(node.value, ast.Name) else ""


def counts_of(facts: Mapping[Path, Facts], root: Path) -> dict[str, int]:
    """Return the counts of files with these facts."""
    library, tests, benchmarks = (
        {path: one for path, one in facts.items() if root / name in path.parents} for name in FOLDERS
    )
    modules = [one.lines for path, one in library.items() if path.name != "__init__.py"]
    graph = graph_of(library, root)
    return {
        "lines of the library": sum(one.lines for one in library.values()),
        "lines of tests": sum(one.lines for one in tests.values()),
        "lines of benchmarks": sum(one.lines for one in benchmarks.values()),
        "modules": len(modules),
        f"modules under {SMALL} lines": sum(number < SMALL for number in modules),
        f"modules over {LARGE} lines": sum(number > LARGE for number in modules),
        "modules with one importer": _with_one_importer(graph),
        f"functions over {LONGEST_FUNCTION} lines": sum(one.long_functions for one in library.values()),
        "class names used twice": len(names_used_twice(library)),
        "import cycles inside packages": len(cycles(graph)),
        "private members that tests access": len(
            {(path.name, each) for path, one in tests.items() for each in one.private}
        ),
        "attributes that tests patch": sum(one.patches for one in tests.values()),
    }


def names_used_twice(library: Mapping[Path, Facts]) -> list[str]:
    """Return the names of classes that more than one module defines at its top level."""
    found = Counter(name for one in library.values() for name in one.classes)
    return sorted(name for name, number in found.items() if number > 1)


# Imports --------------------------------------------------------------------------------------------------------------


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield the runtime imports of a module, which are statements: expressions are not searched."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
        else:
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                parts = getattr(node, field, ())
                waiting += parts if isinstance(parts, list) else ()


def graph_of(library: Mapping[Path, Facts], root: Path) -> dict[str, set[str]]:
    """Return the modules that each module of the library imports."""
    named = {_name(path, root): one.imports for path, one in library.items()}
    return {name: {_module(each, named) for each in found} - {name, ""} for name, found in named.items()}


def _name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _module(name: str, named: Iterable[str]) -> str:
    above = name.rpartition(".")[0]
    return name if name in named else above if above in named else ""


def _with_one_importer(graph: Mapping[str, set[str]]) -> int:
    """Return the number of modules with a single importer in the same package."""
    importers = defaultdict(set)
    for name, targets in graph.items():
        for target in targets:
            importers[target].add(name)
    own = {name: next(iter(found)) for name, found in importers.items() if len(found) == 1}
    return sum(name.rpartition(".")[0] == other.rpartition(".")[0] for name, other in own.items())


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return groups of modules or packages within one package that import each other in a cycle."""
    packages = {name.rpartition(".")[0] for name in graph} - {""}
    found = []
    for package in sorted(packages):
        inner: dict[str, set[str]] = defaultdict(set)
        for name, targets in graph.items():
            part = _part(name, package)
            for target in targets if part else ():
                other = _part(target, package)
                if other and other != part:
                    inner[part].add(other)
        found += [sorted(group) for group in _circles(inner)]
    return found


def _part(name: str, package: str) -> str:
    """Return the part of a package that contains a module; empty for the package's own module and for others."""
    return ".".join(name.split(".")[: package.count(".") + 2]) if name.startswith(package + ".") else ""


def _circles(graph: dict[str, set[str]]) -> list[set[str]]:
    reached = {name: _reach(name, graph) for name in graph}
    groups = {frozenset({other for other in reached[name] if name in reached.get(other, ())}) for name in graph}
    return [set(group) for group in groups if len(group) > 1]


def _reach(name: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        for other in graph.get(waiting.pop(), set()) - seen:
            seen.add(other)
            waiting.append(other)
    return seen


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--names", action="store_true", help="name the classes and cycles that are counted")
    args = parser.parse_args()
    facts = {path: facts_of(text := path.read_text(), ast.parse(text)) for path in paths(ROOT)}
    found = counts_of(facts, ROOT)
    if args.json:
        print(json.dumps(found, indent=2))
        return
    for name, number in found.items():
        print(f"{number:8,}  {name}")
    if args.names:
        library = {path: one for path, one in facts.items() if ROOT / PACKAGE in path.parents}
        print("\nclass names used twice:", ", ".join(names_used_twice(library)))
        for group in cycles(graph_of(library, ROOT)):
            print("cycle:", " ".join(group))


if __name__ == "__main__":
    main()

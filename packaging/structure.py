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
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "hpctrain"
SMALL, LARGE, LONGEST_FUNCTION = 60, 400, 60  # lines
_OWN = {"self", "cls", "super"}
_PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit"}  # public in Python, in spite of their names


def counts(root: Path = ROOT) -> dict[str, int]:
    """Return all counts."""
    library, tests, benchmarks = (_trees(root / name) for name in (PACKAGE, "tests", "benchmarks"))
    lines = {path: text.count("\n") for path, (text, _) in library.items()}
    modules = {path: number for path, number in lines.items() if path.name != "__init__.py"}
    return {
        "lines of the library": sum(lines.values()),
        "lines of tests": _lines(tests),
        "lines of benchmarks": _lines(benchmarks),
        "modules": len(modules),
        f"modules under {SMALL} lines": sum(number < SMALL for number in modules.values()),
        f"modules over {LARGE} lines": sum(number > LARGE for number in modules.values()),
        "modules with one importer": _with_one_importer(library, root),
        f"functions over {LONGEST_FUNCTION} lines": sum(1 for _ in _long_functions(library)),
        "class names used twice": len(names_used_twice(library)),
        "import cycles inside packages": len(cycles(library, root)),
        "private members that tests access": len(private_access(tests)),
        "attributes that tests patch": sum(_patches(tree) for _, tree in tests.values()),
    }


Sources = dict[Path, tuple[str, ast.Module]]


def _trees(folder: Path) -> Sources:
    paths = (path for path in sorted(folder.rglob("*.py")) if "/." not in str(path.relative_to(folder.parent)))
    return {path: (text := path.read_text(), ast.parse(text)) for path in paths}


def _lines(sources: Sources) -> int:
    return sum(text.count("\n") for text, _ in sources.values())


def names_used_twice(library: Sources) -> list[str]:
    """Return the names of classes that more than one module defines at its top level."""
    found = Counter(
        node.name for _, tree in library.values() for node in tree.body if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, number in found.items() if number > 1)


def _long_functions(library: Sources) -> Iterator[ast.AST]:
    for _, tree in library.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if (node.end_lineno or node.lineno) - node.lineno >= LONGEST_FUNCTION:
                    yield node


# Imports --------------------------------------------------------------------------------------------------------------


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield the runtime imports of a module, without those for type checking."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield from (f"{node.module}.{each.name}" for each in node.names)
        else:
            waiting += ast.iter_child_nodes(node)


def _graph(library: Sources, root: Path) -> dict[str, set[str]]:
    """Return the modules that each module of the library imports."""
    named = {_name(path, root): tree for path, (_, tree) in library.items()}
    graph: dict[str, set[str]] = {}
    for name, tree in named.items():
        targets = {found for each in _imports(tree) if (found := _module(each, named))}
        graph[name] = targets - {name}
    return graph


def _name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _module(name: str, named: Iterable[str]) -> str | None:
    if name in named:
        return name
    above = name.rpartition(".")[0]
    return above if above in named else None


def _with_one_importer(library: Sources, root: Path) -> int:
    """Return the number of modules with a single importer in the same package."""
    importers = defaultdict(set)
    for name, targets in _graph(library, root).items():
        for target in targets:
            importers[target].add(name)
    own = {name: next(iter(found)) for name, found in importers.items() if len(found) == 1}
    return sum(name.rpartition(".")[0] == other.rpartition(".")[0] for name, other in own.items())


def cycles(library: Sources, root: Path) -> list[list[str]]:
    """Return groups of modules or packages within one package that import each other in a cycle."""
    graph = _graph(library, root)
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


# Tests ----------------------------------------------------------------------------------------------------------------


def private_access(tests: Sources) -> set[tuple[str, str]]:
    """Return the private names that tests access on other objects, by file."""
    found = set()
    for path, (_, tree) in tests.items():
        own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _base(node) in _OWN}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                if _base(node) not in _OWN and node.attr not in own | _PUBLIC:
                    found.add((path.name, node.attr))
    return found


def _base(node: ast.Attribute) -> str:
    return node.value.id if isinstance(node.value, ast.Name) else ""


def _patches(tree: ast.Module) -> int:
    return sum(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"setattr", "delattr"}
        and _base(node.func) in {"monkeypatch", "patch", "patched"}
        for node in ast.walk(tree)
    )


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--names", action="store_true", help="name the classes and cycles that are counted")
    args = parser.parse_args()
    found = counts()
    if args.json:
        print(json.dumps(found, indent=2))
        return
    for name, number in found.items():
        print(f"{number:8,}  {name}")
    if args.names:
        library = _trees(ROOT / PACKAGE)
        print("\nclass names used twice:", ", ".join(names_used_twice(library)))
        for group in cycles(library, ROOT):
            print("cycle:", " ".join(group))


if __name__ == "__main__":
    main()

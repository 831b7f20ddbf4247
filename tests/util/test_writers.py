"""Rules of the sources: only util/atomic.py opens files for writing; no child has the current folder on its path."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpctrain

PACKAGE = Path(hpctrain.__file__).parent
# Modules that write in another way, and the reason.
ALLOWED = {
    "util/atomic.py",  # the writer
    "train/lock.py",  # links its file into place, so that only one process succeeds
    "stage/local.py",  # renames complete folders in a private one
    "comm/transport/reserve.py",  # opens memory of another process, which is no file of a file system
}
WRITING_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND", "O_TRUNC"}
WRITING_METHODS = {"write_text", "write_bytes", "touch", "symlink_to", "hardlink_to"}
NAMED = {"os.rename", "os.replace", "os.link", "os.symlink", "os.truncate", "shutil.copy", "shutil.move"}
SAVERS = {"savefig": 0, "torch.save": 1, "np.save": 0, "np.savez": 0, "h5py.File": 0}
# These functions receive a file object of util/atomic.py, memory, or a file opened for reading.
FILE_OBJECTS = {"out", "sink", "self._image"}


def name_of(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def problems(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called, method = name_of(node.func), node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if called == "os.open" and any(flag in (text := ast.unparse(node)) for flag in WRITING_FLAGS):
            if "devnull" in text:
                continue
            yield node.lineno, "os.open for writing"
        elif called == "open" or method == "open":
            at = 1 if called == "open" else 0
            named = next((keyword.value for keyword in node.keywords if keyword.arg == "mode"), None)
            mode = node.args[at] if len(node.args) > at else named
            text = mode.value if isinstance(mode, ast.Constant) and isinstance(mode.value, str) else ""
            handle = called == "open" and ast.unparse(node).startswith("open(atomic.")
            if set(text) & set("wax+") and set(text) <= set("rwaxbt+") and not handle and called != "archive.open":
                yield node.lineno, f"open(..., {text!r})"
        elif method in WRITING_METHODS and not called.startswith("atomic."):
            yield node.lineno, method
        elif called in NAMED:
            yield node.lineno, called
        elif method in {"rename", "replace"} and len(node.args) == 1 and not node.keywords:
            yield node.lineno, f"Path.{method}"
        elif (called in SAVERS or method in SAVERS) and node.args:
            target = ast.unparse(node.args[SAVERS[called if called in SAVERS else method]])
            reads = called == "h5py.File" and len(node.args) > 1 and ast.unparse(node.args[1]) == "'r'"
            if target not in FILE_OBJECTS and not reads:
                yield node.lineno, f"{called or method}({target})"


def children(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.List, ast.Tuple)) and node.elts and name_of(node.elts[0]) == "sys.executable":
            yield node.lineno, "a child process without util.probe.python"


@functools.cache
def sources() -> list[tuple[str, ast.AST]]:
    paths = sorted(path for path in PACKAGE.rglob("*.py") if "templates" not in path.parts)
    return [(str(path.relative_to(PACKAGE)), ast.parse(path.read_text())) for path in paths]


@pytest.mark.xdist_group("sources")
def test_only_one_module_opens_files_for_writing() -> None:
    found = [
        f"{name}:{line}: {what}" for name, tree in sources() if name not in ALLOWED for line, what in problems(tree)
    ]
    assert not found, "write through hpctrain/util/atomic.py"


@pytest.mark.xdist_group("sources")
def test_only_one_module_starts_this_interpreter() -> None:
    found = [
        f"{name}:{line}: {what}" for name, tree in sources() if name != "util/probe.py" for line, what in children(tree)
    ]
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        "open(path, 'w')",
        "path.open('a')",
        "open(file=path, mode='xb')",
        "os.open(path, os.O_RDWR)",
        "path.write_text('x')",
        "os.replace(a, b)",
        "a.rename(b)",
        "torch.save(model, path)",
        "figure.savefig(path)",
        "h5py.File(path, 'w')",
        "np.save(path, array)",
    ],
)
def test_the_search_finds_writes(text: str) -> None:
    assert list(problems(ast.parse(text)))


@pytest.mark.parametrize("text", ["open(path)", "path.open('rb')", "h5py.File(path, 'r')", "word.replace('a', 'b')"])
def test_the_search_accepts_reads(text: str) -> None:
    assert not list(problems(ast.parse(text)))

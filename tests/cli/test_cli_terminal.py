"""Terminal output of text from elsewhere: plain, without escape sequences or control characters."""

from __future__ import annotations

import ast
import json
import logging
from pathlib import Path

import h5py
import pytest

import hpctrain
from hpctrain import log
from hpctrain.cli.main import main
from hpctrain.data.pack import pack

ESCAPE = "\x1b]0;title\x07\x9b31m\u202e"
PACKAGE = Path(hpctrain.__file__).parent
PLAIN = {"printable", "printable_lines", "json.dumps"}


def test_every_print_is_plain_text() -> None:
    """Arguments of ``print`` are constants, JSON (which escapes), or pass through util/text.py."""
    found = []
    for path in [*sorted((PACKAGE / "cli").rglob("*.py")), PACKAGE / "train/recipe.py", PACKAGE / "train/exit.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "tqdm.write"):
                found += [f"{path.name}:{node.lineno}" for each in node.args if not plain(each, path.read_text())]
    assert not found


def plain(node: ast.expr, source: str) -> bool:
    if isinstance(node, ast.IfExp):
        return plain(node.body, source) and plain(node.orelse, source)
    if isinstance(node, ast.JoinedStr):
        return all(isinstance(one, ast.Constant) or plain(one.value, source) for one in node.values)  # type: ignore
    if isinstance(node, ast.Name):  # a variable that is assigned from one of these
        return any(f"{node.id} = {name}(" in source for name in PLAIN)
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return isinstance(node, ast.Constant) or called in PLAIN or called == "_verdict_line"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Plant the escape sequence in every file that other users may write; return a folder whose name contains it."""
    monkeypatch.chdir(tmp_path)
    run = f"run{ESCAPE}"
    Path(run).mkdir()
    attempt = {
        "status": ESCAPE, "reason": ESCAPE, "host": ESCAPE, "job_id": ESCAPE, "scheduler": ESCAPE, "started": ESCAPE,
        "pid": ESCAPE, "folder": ESCAPE, "failed_rank": ESCAPE,
    }  # fmt: skip
    attempts = [attempt | {"status": status} for status in ("failed", "stopped", "killed", "running", ESCAPE)]
    Path(run, "run.json").write_text(json.dumps({"status": ESCAPE, "attempts": attempts}))
    Path(run, "lock.json").write_text(json.dumps({"job_id": ESCAPE, "host": ESCAPE, "pid": 1}))
    Path(run, "failure.json").write_text(json.dumps({"reason": ESCAPE, "unix_time": 1.0, "host": ESCAPE}))
    spans = [
        {"ph": "M", "name": "thread_name", "tid": 0, "pid": 0, "args": {"name": ESCAPE}},
        {"ph": "X", "name": "step", "ts": 0, "dur": 9, "args": {"rank": 0, "step": 1}},
        {"ph": "X", "name": "forward", "ts": 1, "dur": 5, "args": {"rank": 0, "chunk": ESCAPE, "microbatch": ESCAPE}},
    ]
    Path(run, "trace.json").write_text(json.dumps({"traceEvents": spans}))
    Path("a.toml").write_text(f'[run]\n"{json.dumps(ESCAPE)[1:-1]}" = 1\n')
    Path("model.toml").write_text(f"[model]\nname = {json.dumps(ESCAPE)}\n")
    Path(f"a{ESCAPE}.txt").write_text("text enough to be packed, " * 20)
    pack([f"a{ESCAPE}.txt"], f"a{ESCAPE}.h5", progress=False)
    with h5py.File("names.h5", "w") as file:
        file.attrs["format"] = "hpctrain-tokens"
        file[f"train/{ESCAPE}"] = [1]
    Path("job.sbatch").write_text(f"#!/bin/bash\n#SBATCH --{ESCAPE}\n#SBATCH --time={ESCAPE}\n")
    return run


@pytest.mark.parametrize(
    "words",
    [
        ["receipt", "RUN"],
        ["receipt", "RUN", "RUN"],
        ["receipt", "RUN", "--json"],
        ["report", "RUN"],
        ["report", "RUN", "-o", ESCAPE],
        ["stage", "pack", ESCAPE],
        ["stage", "copy", "--data", f"a{ESCAPE}.h5", "--to", "."],
        ["stage", "remove", "--to", ESCAPE],
        ["watch", "RUN", "--once"],
        ["watch", "RUN", "RUN", "--once"],
        ["watch", "RUN", "--json"],
        ["plan", "--measured", "RUN"],
        ["plan", "a.toml"],
        ["plan", "model.toml"],
        ["plan", ESCAPE],
        ["train", "a.toml"],
        ["job", "slurm", "a.toml", "--time", "01:00:00"],
        ["job", "check", "job.sbatch"],
        ["checkpoint", "ls", "RUN"],
        ["checkpoint", "show", "RUN"],
        ["checkpoint", "verify", "names.h5"],
        ["checkpoint", "verify", ESCAPE],
        ["data", "show", f"a{ESCAPE}.h5"],
        ["data", "show", "names.h5"],
        ["data", "pack", f"a{ESCAPE}.txt", "-o", f"b{ESCAPE}.h5"],
        ["bench", "show", "RUN"],
        [ESCAPE],
    ],
)
def test_no_verb_prints_an_escape_sequence(
    hostile: str, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    main([hostile if word == "RUN" else word for word in words])
    printed = capfd.readouterr()
    seen = (printed.out + printed.err).replace("\n", "").replace("\t", "")
    assert seen and seen.isprintable()


def test_no_log_message_prints_an_escape_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    before = list(log.logger.handlers), log.logger.level, log.logger.propagate
    try:
        log.configure()
        capsys.readouterr()  # earlier messages, which waited for a place to print
        logging.getLogger("hpctrain").warning("a folder %s\nand a line", ESCAPE)
        assert capsys.readouterr().err == "warning: a folder \\x1b]0;title\\x07\\x9b31m\\u202e\nand a line\n"
    finally:
        log.logger.handlers[:], log.logger.level, log.logger.propagate = before

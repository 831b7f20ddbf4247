"""Hostile words on the command line: one line of at most 200 characters, exit code 2, without delay."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch  # noqa: F401  (its import would count as time of the first verb)
from support.commands import arguments_of, has_actions, parsers

from hpctrain.cli.bench import SUITE
from hpctrain.cli.main import main
from hpctrain.errors import HpctrainError
from hpctrain.train.config import Settings, load
from hpctrain.util.text import LINE, fit_message

BYTES = os.fsdecode(b"\xff\xfe\x80.toml")
WORDS = {
    "bytes": BYTES,
    "long": "x" * 3000,
    "long path": "/".join(["y" * 200] * 15),
    "terminal": "\x1b]0;title\x07\x9b31m",
    "lines": "a\nb\rc",
    "digits": "9" * 5000,
    "huge": str(2**63 - 1),
    "negative": "-9223372036854775809",
    "nothing": "",
    "pipe": "odd/pipe",
    "socket": "odd/socket",
    "folder": "odd",
    "device": "/dev/zero",
    "loop": "odd/loop",
    "infinite": "1e999",
}
# Required arguments of a verb besides the word under test. Files are those of the fixture.
NEEDED = {
    "train": ["a.toml"],
    "data pack": ["a.txt", "-o", "new.h5"],
    "data show": ["a.h5"],
    "checkpoint ls": ["run"],
    "checkpoint best": ["run"],
    "checkpoint show": ["a.h5"],
    "checkpoint verify": ["a.h5"],
    "checkpoint diff": ["a.h5", "a.h5"],
    "checkpoint export": ["a.h5", "--to", "npz"],
    "checkpoint import": ["a.safetensors", "-o", "new.h5"],
    "checkpoint plot": ["a.h5", "-o", "new.svg"],
    "plan": ["a.toml", "--machine", "A100"],
    "job slurm": ["a.toml", "--time", "01:00:00"],
    "job pbs": ["a.toml", "--time", "01:00:00"],
    "job check": ["a.txt"],
    "job profiles": [],
    "submit slurm": ["a.toml", "--time", "01:00:00"],
    "submit pbs": ["a.toml", "--time", "01:00:00"],
    "modulefile lua": ["--root", "/apps/x"],
    "modulefile tcl": ["--root", "/apps/x"],
    "doctor": [],
    "docs": [],
    "receipt": ["run"],
    "run": ["a.txt"],
    "stage pack": ["run"],
    "stage copy": ["--data", "a.h5", "--to", "new"],
    "stage remove": ["--to", "new"],
    "watch": ["run"],
    "report": ["run"],
    "bench calibrate": [],
    "bench show": [],
    "bench report": ["run"],
}
# These verbs measure or start processes if the word is accepted: only options that are checked earlier are tested.
BEFORE = {
    "doctor": {"--script", "--seconds", "--device", "--picture"},
    "bench calibrate": {"--seconds", "--sizes"},
    "run": {"--backend"},
}
# Words that may be valid: a name, a text, a folder to create, a file that is looked for and not found.
TAKEN = {0, 1, 2}


PARSERS = {one.prog.removeprefix("hpctrain "): one for one in parsers()}
# Benchmarks parse their words themselves, and measure if these are accepted.
LEAVES = [name for name, one in PARSERS.items() if not has_actions(one) and name.removeprefix("bench ") not in SUITE]


def tried(name: str, word: str) -> Iterator[list[str]]:
    """Yield command lines of a verb with the word at each place that accepts one."""
    verb, needed = name.split(), NEEDED[name]
    for one in arguments_of(PARSERS[name]):
        if name in BEFORE and not set(one.option_strings) & BEFORE[name]:
            continue
        if one.nargs == 0:
            continue
        if one.option_strings:
            option = one.option_strings[-1]
            rest = list(needed)
            for other in one.option_strings:
                if other in rest:
                    del rest[rest.index(other) : rest.index(other) + 2]
            yield [*verb, *rest, f"{option}={word}"]
        else:
            near = lambda at: needed[max(at - 1, 0) : at + 1]
            given = [at for at in range(len(needed)) if not any(each.startswith("-") for each in near(at))]
            yield [*verb, *needed[: given[0]], word, *needed[given[0] + 1 :]] if given else [*verb, word]
    yield [*verb, *needed, f"--{word}"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create small valid files of each kind, and invalid ones."""
    import numpy as np
    from support.malformed_files import sound_file

    from hpctrain.checkpoint.tools import safetensors

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    Path("a.toml").write_text("[run]\nfolder = 'new'\n[train]\nsteps = 1\n[data]\nfiles = 'none.h5'\n")
    Path("a.txt").write_text("#!/bin/bash\n#SBATCH --nodes=1\n")
    Path("run").mkdir()
    Path("run/run.json").write_text('{"status": "finished", "attempts": [{"status": "finished"}]}')
    sound_file(Path("a.h5"))
    sound_file(Path("run/step_00000003.h5"))
    with open("a.safetensors", "wb") as file:
        safetensors.write(file, [("w", (2,), "float32")], [[np.ones(2, "<f4")]], {})
    Path("odd").mkdir()
    os.mkfifo("odd/pipe")
    os.symlink("loop", "odd/loop")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("odd/socket")
    return tmp_path


@pytest.mark.few(8)
@pytest.mark.limit(120)
@pytest.mark.parametrize("name", LEAVES)
def test_every_word_is_accepted_or_one_line_of_error(
    name: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = []
    for kind, word in WORDS.items():
        for words in tried(name, word):
            capsys.readouterr()
            began = time.process_time()  # other processes use this machine, too; the time limit ends a hang
            try:
                code: object = main(words)
            except BaseException as error:
                code = f"{type(error).__name__}: {error}"[:200]
            took, (out, err) = time.process_time() - began, capsys.readouterr()
            lines = [line for line in err.splitlines() if line.startswith("hpctrain: error: ")]
            good = code in TAKEN and (took < 2 or code != 2) and (out + err).replace("\n", "").isprintable()
            if code == 2:
                good = good and len(lines) == 1 and (not word or len(lines[0]) <= LINE) and err.count("\n") == 1
            if not good:
                wrong.append((kind, [each[:60] for each in words], code, round(took, 1), err[:300], len(err)))
    assert not wrong, "\n".join(map(str, wrong))


# Settings -------------------------------------------------------------------------------------------------------------

HOSTILE = [
    *("'" + "x" * 3000 + "'", "'\\u001b]0;x'", "[" * 300, "{a = 1}", "[1, 'a', 2.5]", "9" * 5000, "1e999", "nan", "-1"),
    *(str(2**32), str(2**53 + 1), str(2**63 - 1), str(-(2**63)), str(2**64), "true", "''", "2026-01-01", BYTES),
]
SETTINGS = [
    f"{section.name}.{each.name}" for section in fields(Settings) for each in fields(getattr(Settings(), section.name))
]


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_accepted_or_one_line_of_error(name: str, files: Path) -> None:
    for value in HOSTILE:
        began = time.process_time()
        try:
            load("a.toml", [f"{name}={value}"])
        except HpctrainError as error:
            said = fit_message(str(error), [value])
            assert error.exit_code == 2 and len(said) <= 330 and said.isprintable(), said
        assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "words",
    [
        ["--set", "model.layers=10000000"],
        ["--set", "model.vocab_size=4294967296"],
        ["--set", "model.width=1099511627776"],
        ["--set", "train.batch=9223372036854775807"],
        ["--set", "train.batch=2147483648"],
        ["--ranks", "1000000000000"],
        ["--ranks", "4", "--ranks-per-node", "9223372036854775807"],
        ["--set", "model.name=mlp", "--set", "model.options={hidden=[9223372036854775807]}"],
    ],
)
def test_absurd_sizes_are_one_line_of_error(words: list[str], files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    assert main(["plan", "a.toml", "--machine", "A100", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and len(err) <= LINE + 1 and time.process_time() - began < 2


@pytest.mark.parametrize(
    "words",
    [
        ["--pipe", "1000000000", "--microbatches", "2"],
        ["--pipe", "2", "--microbatches", "1000000000"],
        ["--pipe", "1024", "--microbatches", "1000000"],
    ],
)
def test_absurd_schedules_are_one_line_of_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    assert main(["plan", "--schedule", "1f1b", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and len(err) <= LINE + 1 and time.process_time() - began < 2


@pytest.mark.limit(30)
def test_words_that_are_not_valid_text_are_one_line_of_error(files: Path) -> None:
    command = [sys.executable, "-m", "hpctrain", "receipt", b"\xff\xfe"]
    done = subprocess.run(command, capture_output=True, timeout=25, env={**os.environ, "LC_ALL": "C"})
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"\\xff" in done.stderr

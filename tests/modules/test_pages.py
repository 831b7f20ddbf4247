"""Man page (the content of every ``--help``) and bash completion of the command."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hpctrain.cli.main import VERBS, main

ROOT = Path(__file__).resolve().parents[2]
needs_man = pytest.mark.skipif(not shutil.which("man"), reason="needs man (Debian: man-db)")


def helps(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """Return the help of these words and of all actions below, as the command prints it."""
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    text = re.split(r"\n(?=usage: )", capsys.readouterr().out)[0]  # a benchmark adds its own help
    found = {" ".join(words): text}
    positional = re.search(r"^(?:positional arguments|verbs):\n  [A-Z]+\n((?:    .*\n)+)", text, re.MULTILINE)
    for action in re.findall(r"^    ([\w-]+)", positional[1], re.MULTILINE) if positional else []:
        found |= helps(capsys, *words, action)
    return found


@pytest.fixture
def all_helps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return the help of the command, of its verbs and of their actions."""
    monkeypatch.setenv("COLUMNS", "200")
    found = helps(capsys)
    assert VERBS.keys() < found.keys() and len(found) > 20
    return found


@pytest.fixture
def shown(tmp_path: Path, pages: tuple[str, str]) -> str:
    """Return the rendered page, and assert that man reports no error."""
    (tmp_path / "hpctrain.1").write_text(pages[0])
    environ = {"PATH": "/usr/bin:/bin", "MANWIDTH": "250", "LC_ALL": "C.UTF-8", "MAN_KEEP_FORMATTING": ""}
    command = ["man", "--warnings", "-P", "cat", "-l", str(tmp_path / "hpctrain.1")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout


@needs_man
def test_the_page_contains_every_verb_option_and_example(shown: str, all_helps: dict[str, str]) -> None:
    words, lines = set(shown.replace(",", " ").split()), {" ".join(line.split()) for line in shown.splitlines()}
    for said in all_helps.values():
        assert set(re.findall(r"^  (?:-\w.*?, )?(--[a-z][\w-]+)", said, re.MULTILINE)) - {"--help"} <= words
        for example in re.findall(r"^  ((?:hpctrain|mpiexec|srun) .*)$", said, re.MULTILINE):
            assert " ".join(example.split()) in lines


@needs_man
def test_the_page_has_the_usual_sections(shown: str) -> None:
    sections = [line for line in shown.splitlines() if line and not line.startswith(" ")][1:-1]
    fixed = ["NAME", "SYNOPSIS", "DESCRIPTION", "VERBS"]
    ends = ["EXIT STATUS", "ENVIRONMENT", "FILES", "EXAMPLES", "SEE ALSO"]
    assert sections == [*fixed, *(f"hpctrain {verb}" for verb in VERBS), *ends]
    settings = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(HPCTRAIN_\w+)`", settings, re.MULTILINE)) <= set(shown.split())
    for code in ("0", "1", "2", "75", "130", "143"):
        assert re.search(rf"^       {code} ", shown, re.MULTILINE)


def test_special_characters_are_escaped(pages: tuple[str, str]) -> None:
    page = pages[0]
    assert not [line for line in page.splitlines() if re.search(r"(?<!\\)-[a-z]", line) and not line.startswith(".TH")]
    requests = {line.split()[0] for line in page.splitlines() if line.startswith((".", "'"))}
    assert requests <= {".TH", ".SH", ".SS", ".TP", ".HP", ".PP", ".RS", ".RE", ".nf", ".fi", ".nh", ".ad", ".br"}


def complete(completion: str, folder: Path, *lines: str) -> list[list[str]]:
    """Return the completions of bash at the end of each line."""
    script = [completion, "compopt() { :; }"]
    for line in lines:
        words = line.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        script.append(f"COMP_WORDS=({quoted}) COMP_CWORD={len(words) - 1} COMPREPLY=()")
        script.append('_shtab_hpctrain; echo "${COMPREPLY[*]}"')
    done = subprocess.run(
        ["bash", "--norc"], input="\n".join(script), cwd=folder, capture_output=True, text=True, check=True
    )
    assert not done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_bash_completes_verbs_actions_options_choices_and_files(pages: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "a.toml").touch()
    (tmp_path / "step_1.h5").touch()
    verbs, some, actions, files, file, options, choices, output = complete(
        pages[1],
        tmp_path,
        "hpctrain ",
        "hpctrain m",
        "hpctrain checkpoint ",
        "hpctrain train ",
        "hpctrain checkpoint verify step",
        "hpctrain train a.toml --re",
        "hpctrain checkpoint export step_1.h5 --to ",
        "hpctrain modulefile lua --root /apps -o a",
    )
    assert verbs == list(VERBS) and some == ["modulefile"]
    assert actions == ["ls", "best", "show", "verify", "diff", "export", "import", "plot"]
    assert sorted(files) == ["a.toml", "step_1.h5"] and file == ["step_1.h5"]
    assert options == ["--resume"] and choices == ["safetensors", "npz", "torch", "hf"] and output == ["a.toml"]


def test_all_names_defined_in_bash_have_the_prefix(pages: tuple[str, str]) -> None:
    state = "{ declare -F | cut -d' ' -f3; compgen -v; } | sort >"
    script = f"cd $(mktemp -d); {state}before; {pages[1]}\n{state}after; comm -13 before after; rm before after"
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True)
    new = {name for name in done.stdout.split() if name not in ("PIPESTATUS", "BASH_LINENO", "_")}
    assert len(new) > 50 and {name for name in new if not name.startswith("_shtab_hpctrain")} == set()

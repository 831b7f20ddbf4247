"""References in the documentation: files, headings, targets of make."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
ALIASES = {"floors"}  # earlier names of targets, which still work
VERB = re.compile(r"(?:^|`|\$ )make((?: +-C +[\w./-]+)?(?: +[\w./~=:-]+)+)", re.MULTILINE)

pages = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def anchors(page: Path) -> set[str]:
    """Return GitHub's anchors of the headings of a page."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def targets(makefile: Path) -> set[str]:
    """Return the targets of a makefile; patterns are not expanded."""
    return set(re.findall(r"^([a-z][\w%-]*):(?!=)", makefile.read_text(encoding="utf-8"), re.MULTILINE))


def missing_links(page: Path) -> list[str]:
    missing = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            missing.append(link)
    return missing


def missing_verbs(page: Path) -> list[str]:
    missing = []
    for words in VERB.findall(page.read_text(encoding="utf-8")):
        folder, rest = ROOT, words.split()
        if rest[0] == "-C":
            folder, rest = ROOT / rest[1], rest[2:]
        known = targets(folder / "Makefile") - ALIASES
        for word in rest:
            pattern = re.sub(r"-(\d+|N)$", "-%", word)
            if "=" not in word and word not in known and pattern not in known:
                missing.append(f"make {word}")
    return missing


@pages
def test_links_have_targets(page: Path) -> None:
    assert missing_links(page) == []


@pages
def test_targets_of_make_exist(page: Path) -> None:
    assert missing_verbs(page) == []


def test_broken_links_and_targets_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading, here\n[a](page.md) [b](lost.md) [c](#a-heading-here) [d](#lost) [e](https://example.org/)\n"
        "`make test-3 MPI=openmpi` and `make tset`\n```\nmake train lnit\n```\nThey make a plan.\n"
    )
    assert missing_links(page) == ["lost.md", "#lost"]
    assert missing_verbs(page) == ["make tset", "make lnit"]


def test_make_help_lists_every_target_and_variable() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = set(re.findall(r"^  make ([\w-]+)", done.stdout, re.MULTILINE))
    assert listed == {verb.replace("%", "N") for verb in targets(ROOT / "Makefile")} - ALIASES
    verbs = "help env train digits test test-N test-jobs test-multinode test-slurm test-gpu lint types layers"
    for verb in [*verbs.split(), "bench", "docs", "clean"]:
        assert re.search(rf"^  make {verb} +[a-z]", done.stdout, re.MULTILINE)
    for variable in ("PYTHON", "MPI", "NP", "TORCH", "CORPUS", "RUN", "REQUIRED"):
        assert re.search(rf"^  {variable} += ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["MPI=lam", "env"], "unknown MPI=lam: allowed are mpich, openmpi, site"),
        (["MPI=site", "MPICC=", "-B", "env"], "MPI=site needs mpicc in PATH"),
        (["PYTHON=false", "-B", "env"], "hpctrain needs Python 3.11 or newer"),
    ],
)
def test_make_reports_wrong_arguments(arguments: list[str], message: str) -> None:
    done = subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stdout + done.stderr

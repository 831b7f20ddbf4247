"""Output that cannot be written, streams that are closed, packages that are missing: one line each, no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.cli.main import VERBS
from hpctrain.errors import EXIT_FAILURE, EXIT_USAGE

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = """
import sys
for name in sys.argv.pop(1).split(","):
    sys.modules[name] = None  # its import fails
from hpctrain.cli.main import main
sys.exit(main())
"""


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a shell's line, in which ``hpctrain`` is this one."""
    text = f'hpctrain() {{ "{sys.executable}" -m hpctrain "$@"; }}; {line}'
    return subprocess.run(["sh", "-c", text], capture_output=True, text=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize("words", ["--help", "--version", "docs", "job profiles", "docs settings", "train --help"])
def test_a_full_disk_is_one_line(words: str) -> None:
    done = shell(f"hpctrain {words} > /dev/full")
    assert done.returncode == EXIT_FAILURE
    assert done.stderr == "hpctrain: error: cannot write the output: No space left on device\n"


@pytest.mark.parametrize("words", ["--help", "docs", "docs settings", "job profiles"])
@pytest.mark.parametrize("closed", [">&-", "<&- >&-", ">&- 2>&-"])
def test_closed_streams_are_no_error(words: str, closed: str) -> None:
    done = shell(f"hpctrain {words} {closed}")
    assert (done.returncode, done.stderr) == (0, "")


def test_files_are_not_opened_in_the_place_of_the_output(tmp_path: Path) -> None:
    """The first file that a process opens gets the number of the closed output, unless that is opened before."""
    done = shell(f"hpctrain modulefile tcl --root /apps/x -o {tmp_path}/module >&-")
    assert done.returncode == 0 and (tmp_path / "module").read_text().startswith("#%Module")


def test_a_reader_that_ends_early_is_no_error() -> None:
    done = shell("hpctrain docs settings | head -n 1")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("# ")


@pytest.mark.parametrize("verb", VERBS)
def test_missing_packages_are_one_line_for_each_verb(verb: str) -> None:
    """Also for the help of a verb, if that needs them."""
    command = [sys.executable, "-c", WITHOUT, "h5py,numpy,tqdm,torch,isal,mpi4py", verb, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    if done.returncode == 0:
        assert done.stdout.startswith("usage: hpctrain") and not done.stderr
        return
    assert done.returncode == EXIT_USAGE and done.stderr.count("\n") == 1
    assert "hpctrain: error: there is no " in done.stderr and "and hpctrain needs it; install it there" in done.stderr


@pytest.mark.parametrize("name", ["h5py", "numpy", "tqdm"])
def test_a_missing_package_is_named(name: str) -> None:
    command = [sys.executable, "-c", WITHOUT, name, "data", "pack", "README.md", "-o", "/dev/null/x.h5"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == EXIT_USAGE
    assert done.stderr.startswith(f"hpctrain: error: there is no {name} in {sys.prefix}, and hpctrain needs it")


def test_help_fits_the_terminal() -> None:
    """Lines of examples are not wrapped; all others are."""
    for columns in (60, 90):
        said = shell(f"COLUMNS={columns} hpctrain doctor --help").stdout.partition("examples:")[0]
        assert max(map(len, said.splitlines())) <= columns

"""``hpctrain doctor``: printed findings and exit codes; the login-node checks load neither torch nor MPI."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.doctoring import report

from hpctrain.cli import doctor
from hpctrain.cli.main import main, make_parser
from hpctrain.doctor.findings import Finding, error, ok, warning
from hpctrain.doctor.preflight.report import findings

WELL = [ok("torch", "2.13")]
WARNED = [*WELL, warning("MPI", "odd", "why", "do")]
BROKEN = [*WARNED, error("HDF5", "gone", "why", "do")]


def looked(findings: list[Finding], *options: str) -> int:
    """Print these findings with the options of a command line; return the exit code."""
    args = make_parser(["doctor"]).parse_args(["doctor", *options])
    return doctor.print_login(args, {"host": "here"}, findings)


@pytest.mark.parametrize(
    "findings, options, code",
    [
        (WELL, [], 0),
        (WARNED, [], 0),
        (WARNED, ["--strict"], 1),
        (BROKEN, [], 1),
    ],
)
def test_exit_code_depends_on_findings_and_strictness(
    findings: list[Finding], options: list[str], code: int, capsys: Any
) -> None:
    assert looked(findings, *options) == code
    said = capsys.readouterr().out
    lines = 2 + sum(1 if finding.level == "ok" else 3 for finding in findings)
    assert said.startswith("ok      torch") and said.count("\n") == lines


def test_json_is_the_same_on_the_screen_and_in_a_file(capsys: Any, tmp_path: Path) -> None:
    assert looked(BROKEN, "--json", "-o", str(tmp_path / "found.json")) == 1
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads((tmp_path / "found.json").read_text())
    assert said["kind"] == "login" and said["host"] == "here" and said["counts"]["error"] == 1
    assert said["findings"][2] == {"level": "error", "topic": "HDF5", "found": "gone", "why": "why", "advice": "do"}


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for name, value in {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 0 and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--seconds 5", "--seconds needs --preflight"),
        ("--picture a.svg", "--picture needs --preflight"),
        ("--preflight --script a.sbatch", "--script has no effect with --preflight: remove one of them"),
        ("--preflight --picture a.jpg", "cannot draw a.jpg: its name must end in .png, .svg, .pdf"),
        ("--preflight --seconds 0", "'0' is not a number of seconds >= 1"),
        ("--preflight --seconds nan", "'nan' is not a number of seconds >= 1"),
        ("-o /no/such/folder/a.json", "cannot write /no/such/folder/a.json: no such folder: /no/such/folder"),
        ("--script /no/such.sbatch", "cannot read the script /no/such.sbatch: No such file or directory"),
    ],
)
def test_bad_input_is_one_line_of_error(arguments: str, message: str, capsys: Any) -> None:
    assert main(["doctor", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and message in err


@pytest.mark.limit(120)
def test_login_checks_load_neither_torch_nor_mpi(tmp_path: Path) -> None:
    """Both are made impossible to import in this process; its child processes can import them."""
    code = f"""
import sys
sys.modules['torch'] = sys.modules['mpi4py'] = sys.modules['h5py'] = None
from hpctrain.cli.main import main
code = main(["doctor", "--json", "-o", {str(tmp_path / "found.json")!r}])
print([name for name in ("numpy", "tqdm", "matplotlib") if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert done.stderr == "[]\n"
    found = json.loads(done.stdout)
    assert found["torch"]["version"] and found["hdf5"]["h5py"] and found["kind"] == "login"
    topics = {one["topic"] for one in found["findings"]}
    assert {"node", "Python", "torch", "GPUs", "MPI", "HDF5", "modules", "cores", "memory", "node memory"} <= topics
    assert done.returncode == (1 if found["counts"]["error"] else 0)
    assert found["counts"] == {
        level: sum(one["level"] == level for one in found["findings"]) for level in ("ok", "note", "warning", "error")
    }


# Preflight ------------------------------------------------------------------------------------------------------------


def telling(tmp_path: Path, **options: Any) -> argparse.Namespace:
    usual = {"json": False, "output": tmp_path / "found.json", "picture": tmp_path / "found.svg"}
    return argparse.Namespace(**{**usual, **options})


def test_a_preflight_is_printed_and_written(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    found = report(4, 1, products=[1e11, 1e11, 4e10, 1e11])
    doctor.print_preflight(telling(tmp_path), found, findings(found))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "--exclude=n3" and "2 warnings, 0 errors; measured in 12.0 s" in lines[-2]
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["kind"] == "preflight" and written["exclude"] == "n3" and len(written["ranks"]) == 4
    assert (tmp_path / "found.svg").read_text().rstrip().endswith("</svg>")


def test_progress_is_one_line_per_stage(capsys: Any) -> None:
    progress = doctor.StageProgress(shown=True)
    for what in ("clocks", "messages, round 1 of 3", "messages, round 2 of 3", "all_reduce"):
        progress(what)
    doctor.StageProgress(shown=False)("silence")
    assert capsys.readouterr().err.splitlines() == [
        "preflight: clocks", "preflight: messages, round 1 of 3", "preflight: all_reduce"
    ]  # fmt: skip


@pytest.mark.limit(150)
def test_a_whole_preflight_on_two_ranks(launch: Any, tmp_path: Path) -> None:
    code = "import sys\nfrom hpctrain.cli.main import main\nsys.exit(main(sys.argv[1:]))\n"
    done = launch(2, code, "doctor", "--preflight", "--seconds", "1", "--json", "--folder", tmp_path / "..", timeout=90)
    assert done.returncode in (0, 1), done
    found = json.loads(done.stdout)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1] and found["all_reduce"][0]["wrong"] == []
    assert done.returncode == (1 if found["counts"]["error"] else 0)
    assert "preflight: finding ranks and nodes" in done.stderr

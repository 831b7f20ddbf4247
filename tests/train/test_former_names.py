"""Former names of the settings of asynchronous workers still work: ``[server]``, ``server``, ``ServerSettings``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hpctrain
from hpctrain import log
from hpctrain.cli.main import main
from hpctrain.errors import SettingsError
from hpctrain.parallel.asynchronous.config import AsynchronousSettings, asynchronous_settings
from hpctrain.train.config import Settings, load

SECTION = "warning: the settings [server] are now named [asynchronous]; the former name still works\n"
ARGUMENT = "warning: the argument server is now named asynchronous; the former name still works\n"
CLASS = "warning: hpctrain.ServerSettings is now named hpctrain.AsynchronousSettings; the former name still works\n"
TWO_SECTIONS = (
    r"^\[server\] and \[asynchronous\] are two names of one section of the settings: use \[asynchronous\] only$"
)
TWO_ARGUMENTS = "^server and asynchronous are two names of one argument: give asynchronous only$"


@pytest.fixture(autouse=True)
def first_use() -> None:
    """Log as rank 0 of a process that has not warned yet."""
    log.configure(0)
    log.warned.clear()


def read(folder: Path, text: str, *assignments: str) -> Settings:
    path = folder / "run.toml"
    path.write_text(text)
    return load(path, assignments)


@pytest.mark.parametrize(
    "text, assignments",
    [
        ('[server]\nmode = "asynchronous"\nperiod = 3\n', []),
        ("", ["server.mode=asynchronous", "server.period=3"]),
        ("[server]\nperiod = 3\n", ["server.mode=asynchronous"]),
    ],
    ids=["file", "assignments", "both"],
)
def test_the_former_section_has_the_same_meaning_and_warns_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, assignments: list[str]
) -> None:
    found = [read(tmp_path, text, *assignments) for _ in range(2)]
    assert capsys.readouterr().err == SECTION
    present = read(tmp_path, "", "asynchronous.mode=asynchronous", "asynchronous.period=3")
    assert found == [present, present] and present.asynchronous == AsynchronousSettings(mode="asynchronous", period=3)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "text, assignments",
    [
        ("[server]\nperiod = 3\n[asynchronous]\nrho = 1.0\n", []),
        ("[server]\nperiod = 3\n", ["asynchronous.rho=1.0"]),
        ("[asynchronous]\nperiod = 3\n", ["server.period=3"]),
    ],
)
def test_two_names_of_the_section_are_refused(tmp_path: Path, text: str, assignments: list[str]) -> None:
    with pytest.raises(SettingsError, match=TWO_SECTIONS):
        read(tmp_path, text, *assignments)


def test_two_names_of_the_section_end_a_verb_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("[server]\nperiod = 3\n[asynchronous]\nrho = 1.0\n")
    assert main(["train", str(tmp_path / "run.toml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hpctrain: error: [server] and [asynchronous] are two names")


def test_a_plan_warns_too(tmp_path: Path) -> None:
    code = "import sys; from hpctrain.cli.main import main; sys.exit(main(sys.argv[1:]))"
    (tmp_path / "run.toml").write_text("[server]\nperiod = 1\n")
    words = [sys.executable, "-c", code, "plan", str(tmp_path / "run.toml"), "--machine", "A100"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, SECTION), done


def test_errors_name_the_present_section(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="^setting asynchronous.period = 0: must be at least 1$"):
        read(tmp_path, "[server]\nperiod = 0\n")
    with pytest.raises(SettingsError, match=r"^unknown setting asynchronous.perod: did you mean period\?"):
        read(tmp_path, "[server]\nperod = 1\n")


@pytest.mark.parametrize("value", [{"period": 3}, AsynchronousSettings(period=3)])
def test_the_former_argument_has_the_same_meaning_and_warns_once(
    capsys: pytest.CaptureFixture[str], value: Any
) -> None:
    assert asynchronous_settings(None, value) == asynchronous_settings(None, value) == AsynchronousSettings(period=3)
    assert capsys.readouterr().err == ARGUMENT


def test_two_names_of_the_argument_are_refused() -> None:
    with pytest.raises(SettingsError, match=TWO_ARGUMENTS):
        asynchronous_settings({"period": 3}, {"period": 3})


def test_the_former_class_is_the_present_one_and_warns_once(capsys: pytest.CaptureFixture[str]) -> None:
    former: Any = getattr(hpctrain, "ServerSettings")
    assert former is getattr(hpctrain, "ServerSettings") is hpctrain.AsynchronousSettings
    assert capsys.readouterr().err == CLASS
    assert "ServerSettings" not in hpctrain.__all__  # a star import does not warn


PROGRAM = """
from torch import nn
import hpctrain
from hpctrain import ServerSettings

job = hpctrain.init(server=ServerSettings(period=3))
for period in (5, 7):
    job.wrap(nn.Linear(2, 2), "easgd", server={"period": period})
assert job.asynchronous == job.server == hpctrain.AsynchronousSettings(period=3)
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_program_with_former_names_runs_with_one_warning_for_each(launch: Any, ranks: int) -> None:
    done = launch(ranks, PROGRAM)
    assert (done.returncode, done.stderr) == (0, CLASS + ARGUMENT), done


def test_a_program_with_both_names_ends_with_one_line(launch: Any) -> None:
    done = launch(2, "import hpctrain; hpctrain.init(server={'period': 3}, asynchronous={'period': 3})")
    error = "hpctrain: error: server and asynchronous are two names of one argument: give asynchronous only\n"
    assert done.returncode == 2 and done.stderr.startswith(error), done
    assert done.stderr.count("hpctrain") == 1, done


def test_a_section_among_the_compared_settings_is_refused_under_both_names(launch: Any) -> None:
    for name in ("server", "asynchronous"):
        done = launch(0, f"import hpctrain; hpctrain.init(settings={{{name!r}: {{'period': 3}}}})")
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done
        assert "give hpctrain.init(asynchronous=...)" in done.stderr, done

"""Ownership of a module's code, found without importing it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hpctrain.cli.main import main
from hpctrain.errors import SettingsError
from hpctrain.forecast.earlier import check_functions
from hpctrain.settings import check_code, function_named
from hpctrain.train.config import load
from hpctrain.util.owner import files_of, foreign_file, is_standard

OTHER = os.geteuid() + 1  # another user, to whom this user's files are foreign


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create modules that leave a mark when they run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    mark = "open('ran', 'w').close()\n"
    Path("marked_models").mkdir()
    for name in ("marked_one.py", "marked_models/__init__.py", "marked_models/small.py"):
        Path(name).write_text(mark + "import os\ndef make(): return 3\n")
    Path("marked_space").mkdir()
    Path("marked_space/inner.py").write_text(mark)
    for name in ("marked_one", "marked_models", "marked_models.small", "marked_space", "marked_space.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize("name", ["marked_one", "marked_models", "marked_models.small", "marked_space.inner"])
def test_files_are_found_without_running_them(here: Path, name: str) -> None:
    assert [Path(path).parts[-1] for path in files_of(name)]
    assert foreign_file(name) == ""
    assert str(here) in foreign_file(name, uid=OTHER) if os.geteuid() else foreign_file(name, uid=OTHER) == ""
    assert not Path("ran").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to somebody else")
@pytest.mark.parametrize("name", ["marked_one.py", "marked_models/__init__.py"])
def test_code_of_another_user_needs_allow_code(here: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    os.chown(name, 12345, -1)
    module = name.partition(".")[0].partition("/")[0]
    Path("a.toml").write_text(f'[model]\nfactory = "{module}:make"\ncontext = 8\n')
    assert main(["plan", "a.toml", "--machine", "A100"]) == 2
    err = capsys.readouterr().err
    assert "which belongs to user 12345" in err and "--allow-code" in err and err.count("\n") == 1
    assert not Path("ran").exists()
    assert main(["plan", "a.toml", "--machine", "A100", "--allow-code"]) == 2
    assert "returned int, expected a torch.nn.Module" in capsys.readouterr().err and Path("ran").exists()


def test_world_writable_code_needs_allow_code(here: Path) -> None:
    os.chmod("marked_one.py", 0o666)
    with pytest.raises(SettingsError, match="which every user may write: allowed is code of yours"):
        check_code("marked_one:make", "model.factory")
    assert not Path("ran").exists()


@pytest.mark.parametrize("path", ["os:system", "marked_one:os.system", "builtins:eval", "torch:os.dup"])
def test_functions_of_the_standard_library_are_refused_as_factories(here: Path, path: str) -> None:
    with pytest.raises(SettingsError, match="is of Python's standard library"):
        function_named(path, "model.factory")


@pytest.mark.parametrize("factory", ["os:system", "torch.hub:load", "torch:load"])
@pytest.mark.parametrize("setting", ["model.factory", "optimizer.factory", "train.loss"])
def test_plan_calls_no_function_that_runs_other_code(
    here: Path, setting: str, factory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.toml").write_text("[train]\nbatch = 2\n")
    assert main(["plan", "a.toml", "--machine", "A100", "--set", f"{setting}={factory}"]) == 2
    err = capsys.readouterr().err
    assert f"{setting} {factory} is " in err and err.count("\n") == 1


def test_code_of_the_environment_and_of_the_user_is_called(here: Path) -> None:
    check_code("torch.nn:Linear", "model.factory")
    text = "[train]\nloss = 'torch.nn.functional:l1_loss'\n[optimizer]\nfactory = 'torch.optim:Adam'\n"
    Path("a.toml").write_text(text)
    check_functions(load("a.toml"))
    check_code("marked_models.small:make", "model.factory")
    check_code("not_there_at_all.x:make", "model.factory")  # the import will report the error
    assert function_named("marked_one:make", "model.factory")() == 3
    assert is_standard("os.path") and not is_standard("torch")

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain import __version__
from hpctrain.cli.main import main
from hpctrain.jobs.modulefile import Module, modulefile


def test_the_modulefile_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "bin/hpctrain"
    program.parent.mkdir()
    program.touch()
    assert main(["modulefile", "lua", "--root", str(tmp_path)]) == 0
    assert capsys.readouterr() == (modulefile("lua", Module(str(tmp_path), __version__)), "")


def test_the_modulefile_is_written_and_a_missing_installation_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--root", "/apps/x", "--version", "2.0", "--depends-on", "a", "b/1", "--depends-on", "c"]
    assert main(["modulefile", "tcl", *words, "-o", str(tmp_path / "m/2.0")]) == 0
    assert (tmp_path / "m/2.0").read_text() == modulefile("tcl", Module("/apps/x", "2.0", ("a", "b/1", "c")))
    out, err = capsys.readouterr()
    assert not out and err == "/apps/x/bin/hpctrain does not exist: create it with make install PREFIX=/apps/x\n"


@pytest.mark.parametrize(
    "words, said",
    [
        (["lua"], "required: --root"),
        (["fish", "--root", "/a"], "invalid choice: 'fish'"),
        (["lua", "--root", "apps"], "--root = 'apps': must be an absolute path to a folder"),
        (["lua", "--root", "/a b"], "--root = '/a b': allowed is letters, digits"),
        (["lua", "--root", "/a", "--depends-on", "x;y"], "--depends-on = 'x;y'"),
        (["lua", "--root", "/a", "-o", "/dev/null/x"], "cannot write /dev/null/x: "),
    ],
)
def test_invalid_words_are_one_line_of_error(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["modulefile", *words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("hpctrain: error: ") and said in err and err.count("\n") == 1


def test_a_job_that_loads_the_module_passes_its_mpi_to_srun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "venv/lib/python3.11/site-packages/mpich-5.0.2.dist-info").mkdir(parents=True)
    (tmp_path / "a.toml").touch()
    monkeypatch.setenv("HPCTRAIN_ROOT", str(tmp_path))
    monkeypatch.setenv("LOADEDMODULES", "hpctrain/1.0")
    scripts = []
    for module in ("hpctrain/1.0", "hpctrain/2.0"):
        assert main(["job", "slurm", str(tmp_path / "a.toml"), "--time", "01:00:00", "--module", module]) == 0
        scripts.append(capsys.readouterr().out)
    loaded, other = scripts
    assert "module load hpctrain/1.0\n" in loaded and "PATH=" not in loaded and "srun --mpi=pmi2 " in loaded
    assert "module load hpctrain/2.0\n" in other and "--mpi" not in other

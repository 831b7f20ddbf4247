"""``hpctrain train``: a user error is one line over all ranks, exit code 2, and leaves no file."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.machine import quiet_watchdog
from support.corpus import make_project
from support.training_fixtures import give_back_process

from hpctrain.cli.main import main
from hpctrain.train import watchdog
from hpctrain.train.control import SIGNALS

HPCTRAIN = "import sys; from hpctrain.cli.main import main; sys.exit(main())\n"


@pytest.fixture
def project(shared_tmp_path: Path, comm: Any) -> Iterator[Path]:
    """Return a folder with a corpus, a model and configs, valid and invalid; all ranks get the same folder."""
    folder = shared_tmp_path / "project"
    if comm.rank == 0:
        folder.mkdir()
        make_project(folder)
        (folder / "model.toml").write_text('[model]\nname = "gtp-tiny"\n')
        data = '[data]\nfiles = ["corpus.h5"]\nvalidation_samples = 8\n'
        (folder / "gpt.toml").write_text(f'{data}[model]\nname = "gpt-tiny"\n[train]\nbatch = 12\n')
    comm.barrier()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    with give_back_process():
        yield folder
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def refused(launch: Any, project: Path) -> Any:
    """Return a function that runs ``hpctrain train`` on n ranks, checks that it is refused, and returns the line."""
    before = sorted(path.name for path in project.rglob("*"))

    def run(n: int, *words: str, timeout: float = 30) -> str:
        result = launch(n, HPCTRAIN, "train", *words, cwd=project, timeout=timeout)
        assert result.returncode == 2 and "Traceback" not in result.stderr and not result.stdout, result
        lines = [line for line in result.stderr.splitlines() if line.startswith("hpctrain:")]
        assert len(lines) == 1 and lines[0].startswith("hpctrain: error: "), result
        assert sorted(path.name for path in project.rglob("*") if "__pycache__" not in str(path)) == before
        return str(lines[0])

    return run


@pytest.fixture
def refused_here(comm: Any, project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Return a function like that of ``refused``, which runs on the ranks of this session, where torch is loaded."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(str(project))
    monkeypatch.delitem(sys.modules, "bytes_model", raising=False)
    monkeypatch.setattr(watchdog, "Watchdog", lambda transport: quiet_watchdog())
    before = sorted(path.name for path in project.rglob("*"))

    def run(*words: str) -> str:
        ended = comm.all_gather_object((main(["train", *words]), *capfd.readouterr()))
        assert all(code == 2 and not out for code, out, _ in ended), ended
        (line,) = "".join(err for _, _, err in ended).splitlines()
        assert line.startswith("hpctrain: error: ") and ended[0][2], ended
        assert sorted(path.name for path in project.rglob("*") if "__pycache__" not in str(path)) == before
        return line

    return run


@pytest.mark.parametrize(
    "words, said",
    [
        (["nowhere.toml"], "cannot read settings from nowhere.toml: No such file or directory"),
        (["corpus.h5"], "corpus.h5 is not a TOML file: it is not UTF-8 text"),
        (["bytes_model.py"], "bytes_model.py is a program, hpctrain train takes the settings of a run (.toml); "),
        (["lost.py"], "python lost.py, mpiexec -n 4 python lost.py, or hpctrain submit slurm lost.py --folder runs/a"),
        (["tiny.toml", "--set", "train.stepz=3"], "unknown setting train.stepz: did you mean steps? known are accu"),
        (["tiny.toml", "--set", "trian.steps=3"], "unknown setting trian: did you mean train? known are asynchronous"),
        (["tiny.toml", "--set", "train.steps"], "write it as section.key=value"),
        (["tiny.toml", "--set", "train.steps=many"], "setting train.steps = 'many': expected a whole number"),
        (["tiny.toml", "--set", "train.batch=0"], "setting train.batch = 0: must be at least 1"),
        (["tiny.toml", "--walltime", "90"], "a walltime of '90': write it as 04:00:00"),
        (["tiny.toml", "--walltime=04:00:00", "--resume", "maybe"], "setting run.resume = 'maybe': allowed are auto"),
        (["tiny.toml", "--set", "model.factory=x"], "write it as package.module:function"),
        (["tiny.toml", "--set", "parallel.schedule=2f2b"], "allowed are naive, gpipe, 1f1b"),
        (["model.toml"], "unknown model.name 'gtp-tiny': did you mean gpt-tiny? known are convnet, gpt-25m"),
    ],
)
def test_an_invalid_setting_is_one_line_of_error(
    project: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    before = sorted(project.rglob("*"))
    assert main(["train", *words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("hpctrain: error: ") and said in err and err.count("\n") == 1
    assert sorted(project.rglob("*")) == before


def test_an_unknown_setting_on_several_ranks_is_one_line_of_error(refused: Any) -> None:
    assert "unknown setting train.stepz: did you mean steps?" in refused(2, "tiny.toml", "--set", "train.stepz=3")


def test_a_batch_not_divisible_by_the_ranks_is_refused(refused: Any) -> None:
    said = refused(2, "tiny.toml", "--set", "train.batch=3")
    assert "a batch of 3 samples cannot be divided evenly over 2 ranks: nearest are 2 and 4 samples" in said


def test_the_folder_is_named_after_the_config(launch: Any, tmp_path: Path) -> None:
    make_project(tmp_path)
    result = launch(0, HPCTRAIN, "train", "tiny.toml", "--set", "train.steps=2", "-v", cwd=tmp_path, timeout=30)
    assert result.returncode == 0, result
    assert (tmp_path / "runs/tiny/checkpoints/step_00000002.h5").exists()
    assert "hpctrain checkpoint show runs/tiny/checkpoints/step_00000002.h5" in result.stdout
    assert "local rank" in result.stderr  # the binding table


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "words, said",
    [
        (["tiny.toml", "data.files=nowhere.h5"], "no data file nowhere.h5: create one with hpctrain data pack"),
        (["tiny.toml", "parallel.pipe=2"], "class Model cannot be cut into stages: write a method layers()"),
        (["gpt.toml", "model.heads=1", "parallel.tensor=2"], "1 heads cannot be split over 2 tensor ranks"),
    ],
)
def test_unsuitable_data_and_models_are_refused(refused_here: Any, words: list[str], said: str) -> None:
    assert said in refused_here(words[0], *(part for word in words[1:] for part in ("--set", word)))


def test_a_run_of_replicas_ends_without_messages_of_mpi(launch: Any, tmp_path: Path) -> None:
    make_project(tmp_path)
    words = ["tiny.toml", "--set", "parallel.data=easgd", "--set", "train.steps=6"]
    result = launch(2, HPCTRAIN, "train", *words, cwd=tmp_path, timeout=50)
    first, *lines = result.stderr.splitlines()
    assert result.returncode == 0 and " parameters, " in first, result
    assert all(line.startswith("step ") for line in lines), result

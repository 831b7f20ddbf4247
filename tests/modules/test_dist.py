"""``make dist``: the wheel and the source archive, installed and used in a clean environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.watched_runs import write_run

from hpctrain import __version__

ROOT = Path(__file__).resolve().parents[2]
WHEEL, SOURCES = f"hpctrain-{__version__}-py3-none-any.whl", f"hpctrain-{__version__}.tar.gz"
pytestmark = [pytest.mark.dist, pytest.mark.limit(400)]


def run(*words: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked() -> list[str]:
    """Return the files of the project."""
    return run("git", "ls-files", cwd=ROOT).splitlines()


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder that ``make dist`` fills, in a copy of the project."""
    copy = tmp_path_factory.mktemp("dist") / "project"
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    said = run("make", "--no-print-directory", "_dist", f"BIN={sys.prefix}/bin", cwd=copy)
    assert said.count("PASSED") == 2, said
    yield copy / "dist"
    shutil.rmtree(copy)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, dist: Path) -> Path:
    """Return a Python of an environment with the wheel; other packages are those of this environment."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder, cwd=folder)
    run(folder / "bin/pip", "install", "--quiet", "--no-deps", "--no-index", dist / WHEEL, cwd=folder)
    # Files ending in .pth in this folder, such as that of the project itself, have no effect there.
    (site,) = folder.glob("lib/python3.*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    found = run(folder / "bin/python", "-c", "import hpctrain; print(hpctrain.__file__)", cwd=folder)
    assert found.startswith(str(site))
    return folder / "bin/python"


def test_the_archives_hold_what_is_needed(dist: Path) -> None:
    assert sorted(path.name for path in dist.iterdir()) == [WHEEL, SOURCES]
    with tarfile.open(dist / SOURCES) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    links = {name for name in tracked() if (ROOT / name).is_symlink()}
    missing = [name for name in tracked() if name not in sources and name not in links]
    assert not missing, "name it in MANIFEST.in"
    assert not [name for name in sources if "__pycache__" in name or name.startswith((".venv", "runs/"))]
    with zipfile.ZipFile(dist / WHEEL) as wheel:
        packed = {name for name in wheel.namelist() if not name.startswith(f"hpctrain-{__version__}.dist-info/")}
    modules = {name for name in tracked() if name.startswith("hpctrain/") and name not in links}
    share = f"hpctrain-{__version__}.data/data/share/"
    assert modules <= packed and all(name.startswith(("hpctrain/", share)) for name in packed)
    assert {f"{share}man/man1/hpctrain.1", f"{share}bash-completion/completions/hpctrain"} <= packed
    assert {"hpctrain/jobs/templates/gpt-tiny.toml", "hpctrain/docs/settings.md"} <= packed
    assert {"hpctrain/benchmarks/communication.py", "hpctrain/benchmarks/harness/run.py"} <= packed
    assert "hpctrain/report/page.html" in packed and "hpctrain/jobs/templates/slurm/train.sbatch.in" in packed


def test_the_wheel_writes_job_scripts_and_pages(clean: Path, tmp_path: Path) -> None:
    hpctrain = clean.parent / "hpctrain"
    assert run(hpctrain, "--version", cwd=tmp_path).strip().endswith(__version__)
    (tmp_path / "run.toml").write_text('[run]\nfolder = "run"\n')
    assert (clean.parents[1] / "share/man/man1/hpctrain.1").read_text().startswith(".TH HPCTRAIN 1")
    assert run(hpctrain, "docs", "stage", cwd=tmp_path) == (ROOT / "docs/stage.md").read_text()
    assert "[model]" in run(hpctrain, "train", "--example", cwd=tmp_path)
    script = run(hpctrain, "job", "slurm", "run.toml", "--time", "01:00:00", cwd=tmp_path)
    assert script.startswith("#!/bin/bash") and "#SBATCH" in script
    write_run(tmp_path / "run", status="finished")
    assert run(hpctrain, "report", "run", cwd=tmp_path).startswith("wrote run/report.html")
    assert "finished" in run(hpctrain, "watch", "run", "--once", cwd=tmp_path)


def test_the_wheel_trains(clean: Path, tmp_path: Path) -> None:
    hpctrain, text = clean.parent / "hpctrain", tmp_path / "texts"
    text.mkdir()
    (text / "a.txt").write_text("a line of text that is repeated\n" * 2000)
    run(hpctrain, "data", "pack", text, "-o", "text.h5", cwd=tmp_path)
    words = [f"--set={one}" for one in ("data.files=text.h5", "run.folder=run", "train.steps=3", "train.batch=4")]
    (tmp_path / "run.toml").write_text('[model]\nname = "gpt-tiny"\n')
    said = run(hpctrain, "train", "run.toml", *words, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert "run folder" in said and (tmp_path / "run" / "checkpoints" / "step_00000003.h5").exists()


def test_the_source_archive_builds_the_same_wheel_and_holds_its_tests(dist: Path, tmp_path: Path) -> None:
    with tarfile.open(dist / SOURCES) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path / "again", unpacked, cwd=tmp_path)
    names = []
    for path in (dist / WHEEL, tmp_path / "again" / WHEEL):
        with zipfile.ZipFile(path) as wheel:
            names.append({info.filename: info.CRC for info in wheel.infolist() if "dist-info" not in info.filename})
    assert names[0] == names[1]
    tests = ["tests/test_settings.py", "tests/jobs/test_template.py", "tests/test_docs.py"]
    said = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=unpacked)
    assert " passed" in said

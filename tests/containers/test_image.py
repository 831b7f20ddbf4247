"""The recipes of ``packaging/container``: one builds an image, in which ranks train as outside of it.

Buildah builds the image, from a base of Debian's packages. A program in place of Apptainer enters it as that does: with
the folders of the host, its variables and its open files, by which launchers reach their ranks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.errors import EXIT_USAGE

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "packaging" / "container"
PROGRAMS = ("buildah", "mmdebstrap", "unshare", "chroot")
PROGRAM = """#!/bin/sh
# apptainer exec OPTIONS IMAGE COMMAND; the image is a folder
[ "$1" = exec ] || exit 3
shift
while [ "${1#--}" != "$1" ]; do shift; done
[ -d "$1/usr" ] || { echo "FATAL: could not open image $1" >&2; exit 255; }
exec unshare --mount sh -ec '
    root=$1; shift
    for folder in dev proc sys tmp; do mount --rbind /$folder $root/$folder; done
    mkdir -p "$root$PWD"
    case $PWD in /tmp/* | /dev/*) ;; *) mount --bind "$PWD" "$root$PWD" ;; esac
    exec chroot "$root" env -C "$PWD" APPTAINER_CONTAINER="$root" PATH=/opt/hpctrain/bin:/usr/bin:/bin "$@"
' sh "$@"
"""
CONFIG = """
[run]
folder = "FOLDER"
[data]
files = ["text.h5"]
[model]
name = "gpt-tiny"
layers = 1
width = 32
heads = 2
context = 32
[train]
steps = 5
batch = 8
"""


def test_both_recipes_install_the_same() -> None:
    lines = (RECIPES / "Containerfile").read_text().replace("\\\n", "").splitlines()
    (run,) = [line.removeprefix("RUN ") for line in lines if line.startswith("RUN ")]
    steps = [" ".join(step.split()) for step in run.split("&&")]
    definition = (RECIPES / "hpctrain.def").read_text()
    post = definition.partition("%post\n")[2].partition("\n\n")[0]
    assert [re.sub(r"\{\{ (\w+) \}\}", r"${\1}", line.strip()) for line in post.splitlines()] == steps
    defaults = {line.removeprefix("ARG ") for line in lines if line.startswith("ARG ")}
    assert set(definition.partition("%arguments\n")[2].partition("\n\n")[0].split()) == defaults


pytestmark = [pytest.mark.limit(600)]
built = pytest.mark.container


def needed() -> None:
    """Skip the test where no image can be built; fail if make says that it must be."""
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    why = f"needs {', '.join(missing)}" if missing else "" if os.geteuid() == 0 else "needs root"
    if why and os.environ.get("REQUIRED"):
        pytest.fail(why)
    if why:
        pytest.skip(why)


def run(*words: str | Path, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in words]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **environ}, capture_output=True, text=True, timeout=400)


def done(*words: str | Path, cwd: Path, **environ: str) -> str:
    found = run(*words, cwd=cwd, **environ)
    assert found.returncode == 0, f"{words}\n{found.stdout[-3000:]}\n{found.stderr[-3000:]}"
    return found.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the files of an image that the recipe has built."""
    needed()
    folder = tmp_path_factory.mktemp("image")
    wheels, context = folder / "wheels", folder / "context"
    pip = [sys.executable, "-m", "pip"]
    done(*pip, "wheel", "-q", "--no-deps", "-w", context / "dist", ROOT, cwd=folder)
    (wheel,) = (context / "dist").iterdir()
    torch = f"torch=={done(sys.executable, '-c', 'import torch; print(torch.__version__)', cwd=folder).split('+')[0]}"
    done(*pip, "download", "-q", "-d", wheels, torch.strip(), f"{wheel}[mpich,plot]", cwd=folder)
    release = re.findall(r"^VERSION_CODENAME=(\w+)$", Path("/etc/os-release").read_text(), re.MULTILINE)[0]
    packages = "--include=python3,python3-venv"
    done("mmdebstrap", "--variant=minbase", packages, release, folder / "base.tar", cwd=folder)
    (folder / "Base").write_text("FROM scratch\nADD base.tar /\n")
    buildah = ["buildah", "--root", folder / "store", "--runroot", folder / "run", "--storage-driver", "vfs"]
    build = [*buildah, "build", "--isolation", "chroot", "--layers=false", "--pull=never"]
    done(*build, "-t", "base", "-f", "Base", ".", cwd=folder)
    (folder / "base.tar").unlink()
    given = {"BASE": "localhost/base", "TORCH": torch.strip(), "EXTRA": "--no-index --find-links /wheels"}
    words = [word for name, value in given.items() for word in ("--build-arg", f"{name}={value}")]
    recipe = ["-v", f"{wheels}:/wheels:ro", "-t", "hpctrain", "-f", RECIPES / "Containerfile", context]
    done(*build, *words, *recipe, cwd=folder)
    container = done(*buildah, "from", "--pull=never", "localhost/hpctrain", cwd=folder).strip()
    yield Path(done(*buildah, "mount", container, cwd=folder).strip())
    done(*buildah, "rm", "--all", cwd=folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def apptainer(tmp_path: Path) -> Path:
    """Return the program in place of Apptainer, with a profile ``site.toml`` beside it that names it."""
    path = tmp_path / "apptainer"
    path.write_text(PROGRAM)
    path.chmod(0o755)
    (tmp_path / "site.toml").write_text(f'base = "generic-slurm"\ncontainer_program = "{path}"\n')
    return path


@built
def test_ranks_train_in_the_image_as_outside(image: Path, apptainer: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a line of text that is repeated\n" * 2000)
    inside = [apptainer, "exec", image]
    done(*inside, "hpctrain", "data", "pack", "text.txt", "-o", "text.h5", cwd=tmp_path)
    mpiexec = [Path(sys.executable).parent / "mpiexec", "-n", "2"]
    rows = []
    for name, start in (("inside", inside), ("outside", [sys.executable, "-m"])):
        (tmp_path / f"{name}.toml").write_text(CONFIG.replace("FOLDER", name))
        done(*mpiexec, *start, "hpctrain", "train", f"{name}.toml", cwd=tmp_path, OMP_NUM_THREADS="1")
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows.append([(row["step"], row["loss"], row.get("fingerprint")) for row in map(json.loads, lines)])
    assert rows[0] == rows[1] and rows[0][-1][0] == 5


@built
def test_the_doctor_compares_the_image_with_the_launcher(image: Path, apptainer: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hpctrain", "doctor", "--json", "--container", image, "--profile", "site.toml"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    found = json.loads(run(*command, cwd=tmp_path, PATH=path).stdout)["findings"]
    levels = {each["topic"]: (each["level"], each["found"]) for each in found if each["topic"].startswith("container")}
    assert levels["container"][0] == levels["container torch"][0] == "ok", levels
    level, text = levels["container mpiexec"]
    assert level in ("ok", "note") and levels["container MPI"][1].startswith("MPICH 5"), (text, levels)


@built
def test_a_job_with_gpus_does_not_train_on_cpus(image: Path, apptainer: Path, tmp_path: Path) -> None:
    code = "import hpctrain; hpctrain.init()"
    ended = run(apptainer, "exec", "--nv", image, "python", "-c", code, cwd=tmp_path, HPCTRAIN_GPUS_PER_NODE="4")
    assert ended.returncode == EXIT_USAGE
    assert "requested 4 GPUs per node, and this rank sees none" in ended.stderr
    assert "is a build for CPUs: install one for CUDA or ROCm" in ended.stderr

"""Scripts of jobs that copy environment and data to the nodes before the ranks start."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cli.main import main
from hpctrain.errors import UsageError
from hpctrain.jobs import profile as profiles
from hpctrain.jobs.profile import Profile
from hpctrain.jobs.render import render
from hpctrain.jobs.request import Request

NOWHERE = {"HOME": "/nowhere"}
STAGED = Request(
    config="a.toml",
    folder="runs/a",
    time="04:00:00",
    nodes=3,
    ranks_per_node=4,
    cpus_per_rank=2,
    stage_env="/home/me/env-1.tar.gz",
    stage_data=("a.h5", "b.h5"),
)


def profile(scheduler: str, launcher: str) -> Profile:
    return replace(profiles.load(f"generic-{scheduler}", NOWHERE)[0], launcher=launcher)


def staging(script: str) -> tuple[list[str], list[str]]:
    """Return the words of the commands that copy and remove."""
    (copy,) = re.findall(r"^staged=\$\((.*) \| tail -n 1\)$", script, re.MULTILINE)
    (remove,) = re.findall(r"^(.*hpctrain stage remove) \|\| true", script, re.MULTILINE)
    return shlex.split(copy), shlex.split(remove)


@pytest.mark.parametrize(
    ("scheduler", "launcher", "placed"),
    [
        ("slurm", "srun", "--nodes=3 --ntasks=3 --ntasks-per-node=1"),
        ("slurm", "openmpi", "-n 3 --map-by ppr:1:node:PE=8"),
        ("slurm", "hydra", "-n 3 -ppn 1 -bind-to core:8"),
        ("pbs", "hydra", "-n 3 -ppn 1 -bind-to none"),
        ("pbs", "openmpi", "--map-by ppr:1:node --bind-to none"),
        ("pbs", "pals", "-n 3 --ppn 1 --depth 8 --cpu-bind depth"),
    ],
)
def test_one_process_per_node_copies(scheduler: str, launcher: str, placed: str) -> None:
    script = render(STAGED, profile(scheduler, launcher))
    copy, remove = staging(script)
    assert placed in " ".join(copy) and placed in " ".join(remove)
    assert " ".join(copy).endswith("hpctrain stage copy --env /home/me/env-1.tar.gz --data a.h5 b.h5")
    assert """sh -c '[ -r "$0" ] && . "$0"; exec "$@"' "$staged" hpctrain train a.toml""" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    order = [script.index(word) for word in ("staged=$(", "hpctrain train a.toml", "stage remove", 'exit "$code"')]
    assert order == sorted(order)


def test_the_program_beside_the_archive_copies_and_removes() -> None:
    script = render(replace(STAGED, stage_program="/home/me/env-1.run"), profile("slurm", "srun"))
    assert "/home/me/env-1.run copy --env /home/me/env-1.tar.gz --data a.h5 b.h5 | tail" in script
    assert "/home/me/env-1.run remove || true" in script and "hpctrain stage" not in script


@pytest.mark.parametrize("options", [(), ("--bind /data:/mnt", "--nv")])
def test_a_container_runs_from_its_copy(options: tuple[str, ...], tmp_path: Path) -> None:
    """The words of the script, run by a shell, with a program that prints its arguments in the place of Apptainer."""
    request = replace(STAGED, stage_env="", stage_container=True, container="images/a.sif")
    script = render(request, replace(profile("slurm", "srun"), container_options=options))
    copy, _ = staging(script)
    flags = [word for option in options for word in option.split(" ", 1)]
    staged_words = ["hpctrain", "stage", "copy", "--data", "a.h5", "b.h5", "--container", "images/a.sif"]
    assert copy[copy.index("apptainer") :] == ["apptainer", "exec", *flags, "images/a.sif", *staged_words]
    (line,) = [line for line in script.splitlines() if '"$staged" hpctrain' in line]
    fake = tmp_path / "apptainer"
    fake.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    fake.chmod(0o755)
    (tmp_path / "job-1.sh").write_text("export HPCTRAIN_CONTAINER='/local/the copy.sif'\n")
    for staged, image in ((tmp_path / "job-1.sh", "/local/the copy.sif"), (tmp_path / "missing", "images/a.sif")):
        run = f"PATH={tmp_path}:$PATH; staged={staged}; {line.removesuffix(' &')}"
        said = subprocess.check_output(["bash", "-c", run], text=True).splitlines()
        assert said == ["exec", *flags, image, "hpctrain", "train", "a.toml", "--set", "run.resume=auto"]


def test_a_range_of_nodes_copies_to_those_of_this_start() -> None:
    copy, _ = staging(render(replace(STAGED, most_nodes=8), profile("slurm", "srun")))
    assert "--nodes=$nodes --ntasks=$nodes --ntasks-per-node=1" in " ".join(copy)


def test_spare_nodes_get_no_copies() -> None:
    copy, _ = staging(render(replace(STAGED, spares=1), profile("slurm", "srun")))
    assert "--nodes=3 --ntasks=3 --ntasks-per-node=1 --nodelist=$hosts" in " ".join(copy)


def test_without_the_option_nothing_changes() -> None:
    plain = render(replace(STAGED, stage_env="", stage_data=()), profile("slurm", "srun"))
    assert "stage" not in plain and "sh -c" not in plain


def test_the_ranks_run_with_and_without_copies(tmp_path: Path) -> None:
    """The words of the script, run by a shell: on a node without copies there is no such file."""
    script = render(STAGED, profile("slurm", "srun"))
    (line,) = [line for line in script.splitlines() if '"$staged" hpctrain' in line]
    (tmp_path / "job-1.sh").write_text("export VALUE=copied\n")
    words = line.partition("hpctrain")[0]
    for staged, said in ((tmp_path / "job-1.sh", "copied"), ("", "none"), (tmp_path / "missing", "none")):
        run = f"staged={shlex.quote(str(staged))}; {words} sh -c 'echo ${{VALUE:-none}} $0' 'a b'"
        assert subprocess.check_output(["bash", "-c", run], text=True) == f"{said} a b\n"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"container": "image.sif"}, "the ranks run in a container, which has its own environment"),
        ({"stage_container": True}, "there is no container; name it with --container"),
        ({"template": "benchmark"}, "a benchmark reads no data"),
        ({"stage_env": "a b"}, "stage_env = 'a b': allowed is"),
    ],
)
def test_what_cannot_be_staged_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        render(replace(STAGED, **changed), profile("slurm", "srun"))


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("missing.h5", "--stage missing.h5: no such file; allowed are env, data, container, and files"),
        ("data,missing.h5", "--stage a.h5: no such file"),
        ("env", "--stage env: the job has no virtual environment of its own"),
        ("", None),
    ],
)
def test_wrong_words_are_one_line(
    stage: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text('[data]\nfiles = ["a.h5"]\n[model]\nname = "gpt-tiny"\n')
    words = ["job", "slurm", "a.toml", "--time", "01:00:00", "--venv", "none", "--stage", stage]
    assert main(words) == (0 if said is None else 2)
    assert said is None or said in capsys.readouterr().err


def test_data_are_the_files_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text('[data]\nfiles = ["a.h5"]\n[model]\nname = "gpt-tiny"\n')
    Path("a.h5").write_text("x")
    Path("more.bin").write_text("x")
    words = ["job", "slurm", "a.toml", "--time", "01:00:00", "--venv", "none"]
    assert main([*words, "--stage", "data,more.bin,a.h5"]) == 0
    assert "hpctrain stage copy --data a.h5 more.bin | tail" in capsys.readouterr().out
    assert main(["job", "slurm", "p.py", "--folder", "r", "--time", "01:00:00", "--stage", "data"]) == 2

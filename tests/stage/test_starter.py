"""The program beside an archive that starts ``hpctrain stage`` from one file."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.environments import MakeEnvironment, packed

from hpctrain.stage.archive import starter_of
from hpctrain.stage.environment import Environment, find_environment
from hpctrain.stage.starter import write_starter

RUN = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
MOST = 60  # files of the environment that a node opens before it has a copy


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program for the environment of the tests; its archive is not needed."""
    archive = tmp_path_factory.mktemp("a folder") / "env-0123456789abcdef.tar.gz"
    assert write_starter(Environment(Path(sys.prefix), None, "venv"), archive) == ""
    assert os.listdir(archive.parent) == ["env-0123456789abcdef.run"]
    return starter_of(archive)


@pytest.mark.limit(60)
def test_ranks_copy_by_it(launch: Any, starter: Path, tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"content" * 1000)
    words = ("copy", "--data", tmp_path / "data.bin", "--to", tmp_path, "--job", "7", "--json")
    done = launch(2, RUN, starter, *words, env={"PYTHONPATH": "/nowhere"})
    assert done.returncode == 0, done
    found = json.loads(done.stdout)
    (copy,) = found["results"][0]["copies"].values()
    assert Path(copy).read_bytes() == b"content" * 1000 and found["nodes"] == 1
    removed = launch(0, RUN, starter, "remove", "--to", tmp_path, "--job", "7")
    assert removed.returncode == 0 and "removed from" in removed.stderr and not Path(copy).exists(), removed


def test_its_errors_are_one_line(starter: Path) -> None:
    done = subprocess.run([starter, "copy", "--env", "missing.tar.gz"], capture_output=True, text=True, timeout=50)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "cannot use the archive missing.tar.gz: No such file" in line


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.limit(60)
def test_few_files_are_opened(starter: Path, tmp_path: Path) -> None:
    """Each open is some requests to the server of the shared file system, from every node."""
    (tmp_path / "data.bin").write_bytes(b"content")
    trace = ["strace", "-f", "-e", "trace=openat,open,execve", "-o", tmp_path / "trace"]
    command = [*trace, starter, "copy", "--data", tmp_path / "data.bin", "--to", tmp_path, "--job", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 0, done
    roots = tuple(map(os.path.realpath, (sys.prefix, sys.base_prefix)))
    names = re.findall(r'(?:openat|execve)\((?:AT_FDCWD, )?"([^"]+)".* = (?!-1)', (tmp_path / "trace").read_text())
    shared = [name for name in names if os.path.realpath(name).startswith(roots)]
    assert 0 < len(shared) <= MOST and not [name for name in shared if "hpctrain" in name], shared


def test_a_python_that_cannot_run_it_has_none(make_environment: MakeEnvironment, tmp_path: Path) -> None:
    prefix = make_environment()
    archive = packed(prefix, tmp_path / "a")
    assert "python does not run hpctrain" in write_starter(find_environment(prefix), archive)
    (prefix / "bin/python").unlink()
    (prefix / "bin/python").write_text("#!/bin/sh\necho 'No module named mpi4py' >&2; exit 1\n")
    (prefix / "bin/python").chmod(0o755)
    assert write_starter(find_environment(prefix), archive) == "No module named mpi4py"
    (prefix / "bin/python").unlink()
    assert "No such file" in write_starter(find_environment(prefix), archive)
    assert not starter_of(archive).exists() and len(os.listdir(tmp_path / "a")) == 2

"""``hpctrain stage`` as users call it: pack, copy, run without the original, remove."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support.environments import MakeEnvironment
from support.jobs import in_small_shm

from hpctrain.cli.main import main

SCRIPT = """
import json, os, sqlite3, ssl, sys, thing
maps = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
files = {module.__file__ for module in sys.modules.values() if getattr(module, "__file__", None)}
print(json.dumps({"prefix": sys.prefix, "base": sys.base_prefix, "value": thing.value, "files": sorted(maps | files)}))
"""


@pytest.mark.limit(120)
def test_a_program_runs_without_the_original(launch: Any, tmp_path: Path) -> None:
    """All files that the process has opened are those of the copy, or of the system."""
    prefix, node = tmp_path / "venv", tmp_path / "node"
    node.mkdir()
    subprocess.run([os.path.realpath(sys.executable), "-m", "venv", "--without-pip", prefix], check=True, timeout=60)
    (packages,) = prefix.glob("lib/python3.*/site-packages")
    (packages / "thing.py").write_text("value = 7\n")
    (prefix / "bin/tool").write_text(f"#!{prefix}/bin/python\n{SCRIPT}")
    (prefix / "bin/tool").chmod(0o755)
    packed = launch(0, "-m", "hpctrain", "stage", "pack", prefix, "-o", tmp_path / "archives", timeout=100)
    assert packed.returncode == 0, packed
    archive = Path(packed.stdout.strip())
    words = ("stage", "copy", "--env", archive, "--to", node, "--job", "7")
    copied = launch(2, "-m", "hpctrain", *words, timeout=100)
    assert copied.returncode == 0 and "staged 1 file on 1 node in" in copied.stderr, copied
    script = Path(copied.stdout.strip())
    shutil.rmtree(prefix)
    archive.unlink()
    run = ["sh", "-c", '. "$0"; exec "$@"', str(script), "tool"]
    done = subprocess.run(
        run, capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin:/bin", "PYTHONHOME": "/x"}
    )
    assert done.returncode == 0, done
    found = json.loads(done.stdout)
    place = f"{node}/hpctrain-stage-{os.geteuid()}/{archive.name.partition('.')[0]}"
    assert found["value"] == 7 and found["prefix"] == f"{place}/env"
    system = ("/usr/", "/lib", "/etc/", "/proc/", "/dev/", "/SYSV", "frozen")
    elsewhere = [path for path in found["files"] if not path.startswith((place, *system))]
    assert not elsewhere, "only the copy is opened"
    removed = launch(0, "-m", "hpctrain", "stage", "remove", "--to", node, "--job", "7")
    assert removed.returncode == 0 and archive.name.partition(".")[0] in removed.stderr, removed
    assert os.listdir(node / f"hpctrain-stage-{os.geteuid()}") == []


FAULTY = """
import sys, threading
import hpctrain.stage.staging as staging
from hpctrain.cli.main import main

def fails(*_):
    raise MemoryError("no memory")

def hangs(*_):
    threading.Event().wait()

kind, *words = sys.argv[1:]
if kind == "fails":
    staging.JobStaging._existing = fails
else:
    staging.pieces_of = hangs
sys.exit(main(words))
"""


@pytest.mark.limit(60)
@pytest.mark.parametrize(("kind", "said"), [("fails", "MemoryError: no memory"), ("hangs", "has not moved for 1 s")])
def test_no_process_waits_without_end(launch: Any, tmp_path: Path, kind: str, said: str) -> None:
    """The other process of the node waits for the one that copies."""
    (tmp_path / "data").write_text("x")
    words = ("stage", "copy", "--data", tmp_path / "data", "--to", tmp_path, "--job", "7")
    done = launch(2, FAULTY, kind, *words, timeout=40, env={"HPCTRAIN_TIMEOUT": "1"})
    assert done.returncode != 0 and said in done.stderr and not done.stdout, done


@pytest.mark.limit(60)
def test_a_full_disk_is_a_warning_and_the_original_is_used(launch: Any) -> None:
    with tempfile.NamedTemporaryFile(dir="/var/tmp", suffix=".bin") as data:
        data.truncate(8 * 1024 * 1024)
        words = ("stage", "copy", "--data", data.name, "--to", "/dev/shm", "--job", "7")
        done = launch(0, "-m", "hpctrain", *words, prefix=in_small_shm(66))
    assert done.returncode == 0, done
    place = f"/dev/shm/hpctrain-stage-{os.geteuid()}"
    assert f"uses the original of {data.name}: {place} has room for" in done.stderr, done
    assert done.stdout.strip().endswith("job-7.sh"), "other copies of this node would be used"


def test_copies_are_told_as_json(
    make_environment: MakeEnvironment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stage", "pack", str(make_environment()), "-o", str(tmp_path), "--json"]) == 0
    archive = json.loads(capsys.readouterr().out)["archive"]
    words = ["stage", "copy", "--env", archive, "--to", str(tmp_path), "--job", "a", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nodes"] == 1 and found["nbytes"] == os.path.getsize(archive) and found["failed"] == []
    (node,) = found["results"]
    assert list(node["copies"]) == [archive] and Path(node["script"]).read_text().startswith("# Read by the ranks")
    assert main(["stage", "remove", "--to", str(tmp_path), "--all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == [Path(archive).name.partition(".")[0]]
    assert main(["stage", "remove", "--to", str(tmp_path / "none")]) == 0


def test_the_copy_of_a_container_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "image.sif").write_text("image")
    (tmp_path / "a.h5").write_text("data")
    words = ["--data", str(tmp_path / "a.h5"), "--container", str(tmp_path / "image.sif"), "--to", str(tmp_path)]
    assert main(["stage", "copy", *words, "--job", "a"]) == 0
    run = ["sh", "-c", '. "$0"; cat "$HPCTRAIN_CONTAINER"', capsys.readouterr().out.strip()]
    assert subprocess.check_output(run, text=True) == "image"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["copy"], "nothing to copy: name --env FILE, --data FILE or --container IMAGE"),
        (["copy", "--data", "missing"], "cannot stage missing: No such file"),
        (["copy", "--env", "missing.tar.gz"], "cannot use the archive missing.tar.gz: No such file"),
        (["copy", "--data", "x", "--job", "../a"], "--job ../a: allowed are letters, digits"),
        (["pack", "missing"], "missing is no environment"),
        (["remove", "--job", ".hidden"], "--job .hidden: allowed are"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["stage", *words, *(["--to", str(tmp_path)] if words[0] == "copy" else [])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line

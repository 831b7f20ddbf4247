"""Archives of environments: what they contain, that they are the same for the same files, what is refused."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest
from support.environments import MakeEnvironment, packed

from hpctrain.errors import UsageError
from hpctrain.stage.archive import index_path, read_index
from hpctrain.stage.local import NodeStorage
from hpctrain.stage.staging import EnvironmentCopy


def unpacked(archive: Path, folder: Path) -> Path:
    """Return the copy of an environment that arrives in small pieces."""
    folder.mkdir()
    index = read_index(archive)
    copy = EnvironmentCopy(NodeStorage(folder), index)
    content = archive.read_bytes()
    for begin in range(0, len(content), 777):
        copy.take(content[begin : begin + 777])
    return copy.complete(index.digest)


def test_a_copy_has_the_files_and_its_own_paths(make_environment: MakeEnvironment, tmp_path: Path) -> None:
    prefix = make_environment()
    copy = unpacked(packed(prefix, tmp_path / "archives"), tmp_path / "node")
    env, base = copy / "env", copy / "base"
    assert (env / "lib/python3.11/site-packages/one.py").read_text() == "value = 1\n"
    assert (env / "lib/python3.11/site-packages/one.py").stat().st_mtime == 1_700_000_000, "known to compiled files"
    assert (env / "lib/python3.11/site-packages/linked.txt").read_text() == "elsewhere\n"
    assert not (env / "lib/python3.11/site-packages/linked.txt").is_symlink()
    assert (env / "lib64").resolve() == env / "lib"
    assert (env / "bin/python3").resolve() == base / "bin/python3.11"
    assert subprocess.check_output([env / "bin/python3", "x"]) == b"python x\n"
    assert (env / "bin/tool").read_text() == f"#!{env}/bin/python\nprint('{env}')\n"
    assert os.access(env / "bin/tool", os.X_OK) and not os.access(env / "pyvenv.cfg", os.X_OK)
    assert (env / "pyvenv.cfg").read_text().splitlines()[0] == f"home = {base}/bin"
    names = {str(path.relative_to(base)) for path in base.rglob("*") if not path.is_dir()}
    assert names == {"bin/python3.11", "lib/libpython3.11.so", "lib/libpython3.11.so.1.0", "lib/python3.11/os.py"}
    assert stat.S_IMODE(copy.stat().st_mode) == 0o700
    links = [path for path in copy.rglob("*") if path.is_symlink() and os.path.isabs(os.readlink(path))]
    assert not links, "nothing leads to the shared file system"


def test_the_same_files_give_the_same_archive(make_environment: MakeEnvironment, tmp_path: Path) -> None:
    prefix = make_environment()
    first = packed(prefix, tmp_path / "a")
    assert packed(prefix, tmp_path / "b").read_bytes() == first.read_bytes()
    before = first.stat().st_mtime_ns
    assert packed(prefix, tmp_path / "a") == first and first.stat().st_mtime_ns == before, "not packed again"
    (prefix / "lib/python3.11/site-packages/one.py").write_text("value = 2\n")
    second = packed(prefix, tmp_path / "a")
    assert second != first and first.exists()
    assert second.name == f"env-{read_index(second).digest[:16]}.tar.gz"
    assert sorted(os.listdir(tmp_path / "a")) == sorted(
        [read_index(each).name + end for each in (first, second) for end in (".tar.gz", ".json")]
    )


def test_other_programs_read_it(make_environment: MakeEnvironment, tmp_path: Path) -> None:
    archive = packed(make_environment(), tmp_path / "a")
    with tarfile.open(archive) as found:
        names = found.getnames()
    listed = subprocess.run(["tar", "tzf", archive], capture_output=True, text=True, check=True).stdout
    assert [name.rstrip("/") for name in listed.splitlines()] == names and "env/bin/tool" in names


def test_progress_reaches_the_size(make_environment: MakeEnvironment, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    packed(make_environment(), tmp_path / "a", lambda done, total: seen.append((done, total)))
    assert seen[-1][0] >= seen[-1][1] > 0 and [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_the_python_of_the_system_stays(make_environment: MakeEnvironment, tmp_path: Path) -> None:
    prefix = make_environment()
    (prefix / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (prefix / "bin/python").unlink()
    (prefix / "bin/python").symlink_to("/usr/bin/env")
    archive = packed(prefix, tmp_path / "a")
    assert read_index(archive).base is None
    with tarfile.open(archive) as found:
        assert {name.partition("/")[0] for name in found.getnames()} == {"env"}


def test_packages_of_the_python_are_packed_if_they_are_used(make_environment: MakeEnvironment, tmp_path: Path) -> None:
    prefix = make_environment()
    config = prefix / "pyvenv.cfg"
    config.write_text(config.read_text().replace("= false", "= true"))
    copy = unpacked(packed(prefix, tmp_path / "a"), tmp_path / "node")
    assert (copy / "base/lib/python3.11/site-packages/x.py").exists()
    assert not (copy / "base/lib/python3.11/test").exists()


def test_texts_of_conda_have_the_new_path(tmp_path: Path) -> None:
    prefix = tmp_path / "conda"
    (prefix / "conda-meta").mkdir(parents=True)
    (prefix / "etc").mkdir()
    (prefix / "etc/tool.conf").write_text(f"path={prefix}/share\n")
    (prefix / "etc/other.conf").write_text(f"path={prefix}/share\n")
    paths = [
        {"_path": "etc/tool.conf", "prefix_placeholder": "/opt/x", "file_mode": "text"},
        {"_path": "etc/other.conf"},
    ]
    (prefix / "conda-meta/tool-1.json").write_text(json.dumps({"paths_data": {"paths": paths}}))
    copy = unpacked(packed(prefix, tmp_path / "a"), tmp_path / "node")
    assert (copy / "env/etc/tool.conf").read_text() == f"path={copy}/env/share\n"
    assert (copy / "env/etc/other.conf").read_text() == f"path={prefix}/share\n", "conda did not write it"


# Bad input ------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_packed_is_named(make_environment: MakeEnvironment, tmp_path: Path) -> None:
    prefix = make_environment()
    packages = prefix / "lib/python3.11/site-packages"
    with pytest.raises(UsageError, match="is no environment: it has neither pyvenv.cfg nor conda-meta"):
        packed(tmp_path, tmp_path / "a")
    (packages / "mine-1.0.dist-info").mkdir()
    direct = packages / "mine-1.0.dist-info/direct_url.json"
    direct.write_text(json.dumps({"url": "file:///home/me/mine", "dir_info": {"editable": True}}))
    with pytest.raises(UsageError, match="uses packages in folders elsewhere.*: mine; install them without -e"):
        packed(prefix, tmp_path / "a")
    direct.write_text("{}")
    (packages / "path.pth").write_text("/home/me/more\n")
    with pytest.raises(UsageError, match="elsewhere.*: /home/me/more;"):
        packed(prefix, tmp_path / "a")
    (packages / "path.pth").unlink()
    (packages / "folder").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="site-packages/folder is a link to the folder .* outside of the environment"):
        packed(prefix, tmp_path / "a")
    (packages / "folder").unlink()
    (prefix / "pyvenv.cfg").write_text("home = /nowhere/bin\n")
    with pytest.raises(UsageError, match="names no folder of a Python"):
        packed(prefix, tmp_path / "a")
    assert not (tmp_path / "a").exists() or not os.listdir(tmp_path / "a")


def test_a_folder_that_cannot_be_written_is_named(make_environment: MakeEnvironment, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot pack .*shared/venv into .*file: File exists: .*file"):
        packed(make_environment(), tmp_path / "file")


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (None, "No such file or directory"),
        ("{}", "not an index of hpctrain-environment"),
        ("[", "not an index"),
        ('{"format": "hpctrain-environment"}', "not an index"),
    ],
)
def test_an_archive_without_its_index_is_refused(tmp_path: Path, index: str | None, said: str) -> None:
    archive = tmp_path / "env-0123456789abcdef.tar.gz"
    archive.write_bytes(b"x")
    if index is not None:
        index_path(archive).write_text(index)
    with pytest.raises(UsageError, match=f"cannot use the archive .*{said}.*hpctrain stage pack makes one"):
        read_index(archive)


def test_a_shorter_archive_is_refused(make_environment: MakeEnvironment, tmp_path: Path) -> None:
    archive = packed(make_environment(), tmp_path / "a")
    os.truncate(archive, 100)
    with pytest.raises(UsageError, match="it has 100 bytes, not .*; pack it again"):
        read_index(archive)

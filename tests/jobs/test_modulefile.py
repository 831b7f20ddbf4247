"""Modulefiles in Lua and Tcl: they contain the requested settings and execute nothing else, whatever a field contains.

Real Lua and Tcl interpreters run them here, with commands that only record their calls; tests/modules has real systems.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as some

from hpctrain.errors import UsageError
from hpctrain.jobs.modulefile import LANGUAGES, Module, home_page, modulefile, read_template, venv_of
from hpctrain.jobs.template import publish

ROOT = Path(__file__).resolve().parents[2]
# Every command writes its name and arguments, one line per call; values contain no line ends.
LUA = """
local function note(...) for _, word in ipairs({...}) do io.write(tostring(word), " ") end io.write("\\n") end
for _, name in ipairs({"help", "whatis", "conflict", "depends_on", "setenv", "prepend_path"}) do
    _G[name] = function(...) note(name, ...) end
end
function myShellName() return "bash" end
function execute(what) note("execute", what.modeA[1], what.cmd) end
os.execute = function(...) note("CANARY", ...) end
dofile(arg[1])
"""
TCL = """
proc note {args} { puts [join $args " "] }
foreach name {module-whatis conflict depends-on setenv prepend-path} {
    proc $name {args} "note [string map {module- {} - _} $name] {*}\\$args"
}
proc module-info {what args} { if {$what eq "mode"} { return [expr {$args eq $::mode}] } else { return bash } }
proc exec {args} { note CANARY {*}$args }
rename puts say
proc puts {args} {
    if {[llength $args] == 2} { say "execute $::mode [string trimright [lindex $args 1] {;}]" } else { say {*}$args }
}
set mode load; source -encoding utf-8 [lindex $argv 0]
"""
readers = {
    "lua": (LUA, next((name for name in ("lua5.3", "lua5.4", "lua") if shutil.which(name)), "")),
    "tcl": (TCL, "tclsh"),
}
both = pytest.mark.parametrize("language", LANGUAGES)


def calls(language: str, module: Module, folder: Path) -> list[str]:
    """Return the calls that loading a modulefile makes."""
    reader, program = readers[language]
    if not shutil.which(program):
        pytest.skip(f"needs {language} (Debian: lua5.3, tcl)")
    (folder / "file").write_text(modulefile(language, module), encoding="utf-8")
    (folder / "reader").write_text(reader)
    environ = {"PATH": os.defpath, "LC_ALL": "C.UTF-8", "MANPATH": "/usr/share/man"}
    command = [program, str(folder / "reader"), str(folder / "file")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert not done.stderr
    return [line.strip() for line in done.stdout.splitlines()]


@both
def test_a_module_sets_paths_dependencies_and_description(language: str, tmp_path: Path) -> None:
    module = Module("/apps/hpctrain/1.0/", "1.0", ("gcc/13.2", "mpi"), "https://example.org/hpctrain")
    done = calls(language, module, tmp_path)
    facts = [line.removeprefix("whatis ") for line in done if line.startswith("whatis ")]
    assert [fact.split(": ")[0] for fact in facts] == ["Name", "Version", "Category", "Keywords", "URL", "Description"]
    assert "Version: 1.0" in facts and "URL: https://example.org/hpctrain" in facts
    acts = [line for line in done if line.split(" ")[0] in ("conflict", "depends_on", "setenv", "prepend_path")]
    assert acts == [
        "conflict hpctrain",
        "depends_on gcc/13.2",
        "depends_on mpi",
        "setenv HPCTRAIN_ROOT /apps/hpctrain/1.0",
        "prepend_path PATH /apps/hpctrain/1.0/bin",
        "prepend_path MANPATH /apps/hpctrain/1.0/share/man",
    ]
    words = "/apps/hpctrain/1.0/share/bash-completion/completions/hpctrain"
    assert f"execute load case $- in *i*) [ ! -r {words} ] || . {words} ;; esac" in done


@both
def test_no_placeholder_of_the_template_remains(language: str) -> None:
    text, template = modulefile(language, Module("/apps/a", "1")), read_template(language)
    hidden = LANGUAGES[language].strip()
    assert "@" not in text.replace("shtab_hpctrain@", "") and "By hand" in template and "By hand" not in text
    assert not [line for line in text.splitlines() if line == hidden or line.startswith(hidden + " ")]
    assert "URL" not in text and "LD_LIBRARY_PATH" not in text
    assert text.startswith({"lua": "-- -*- lua -*-\n", "tcl": "#%Module1.0\n"}[language])


@both
def test_its_description_is_that_of_the_package(language: str) -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert f"Description: {config['metadata']['description']}" in read_template(language)
    assert home_page() == config["metadata"].get("url", "")


NAMES = "abzAZ09_.+=@/-" + "äßé日"
UNSEEN = ("\n", "\r", "\t", "\0", "\x1b", "\u2028", "\u202e")
HOSTILE = [*"$`\"'\\{}[]();#%&|<>*?!~^,: ", *UNSEEN, "]]", "$(canary)", "[exec canary]"]
quick = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("piece", HOSTILE)
def test_lua_tcl_and_shell_syntax_is_refused_with_the_option_name(piece: str) -> None:
    for place in (f"/apps/{piece}", f"/apps/{piece}x", f"{piece}/apps"):
        with pytest.raises(UsageError, match="^--root "):
            Module(place)
    with pytest.raises(UsageError, match="^--version "):
        Module("/apps/a", f"1{piece}")
    with pytest.raises(UsageError, match="^--depends-on "):
        Module("/apps/a", "1", ("gcc", f"mpi{piece}"))


@pytest.mark.parametrize(
    "wrong, message",
    [
        # A root is an absolute path, and a version the name of a file.
        *(({"root": root}, "^--root ") for root in ("", "apps", "-x", "--root", "/", "//", "/apps/../etc", "~/apps")),
        *(({"version": version}, "^--version ") for version in ("", "a/b", "-1", ".hidden", "ä")),
        *(({"depends_on": (name,)}, "cannot depend on itself") for name in ("hpctrain", "hpctrain/2.0")),
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Module(**{"root": "/apps/a", "version": "1", **wrong})


def test_other_languages_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown language 'fish': allowed are lua, tcl"):
        modulefile("fish", Module("/apps/a"))


@quick
@given(name=some.text(some.sampled_from(NAMES), min_size=1, max_size=12))
@example(name="@root@")
@example(name="=@version@=")
@pytest.mark.parametrize("language", LANGUAGES)
def test_allowed_values_arrive_unchanged(language: str, name: str, tmp_path: Path) -> None:
    try:
        module = Module(f"/apps/{name}", "1")
    except UsageError:
        assert ".." in name
        return
    done = calls(language, module, tmp_path)
    assert f"setenv HPCTRAIN_ROOT {module.root}" in done
    assert not [line for line in done if "CANARY" in line]


def test_a_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "new/hpctrain/1.0.lua"
    before = os.umask(0o022)
    try:
        publish("one\n", path)
        publish("two\n", path)
    finally:
        os.umask(before)
    assert path.read_text() == "two\n" and os.listdir(path.parent) == ["1.0.lua"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match=r"^cannot write .*a/b: .*"):
        publish("text", tmp_path / "a/b")
    with pytest.raises(UsageError, match=r"^cannot write .*folder: Is a directory"):
        publish("text", tmp_path / "folder")
    assert sorted(os.listdir(tmp_path)) == ["a", "folder"]


def test_the_environment_of_a_loaded_module_is_found() -> None:
    loaded = {"HPCTRAIN_ROOT": "/apps/a", "LOADEDMODULES": "gcc/13:hpctrain/1.0"}
    assert venv_of(["gcc/13", "hpctrain/1.0"], loaded) == venv_of(["hpctrain"], loaded) == "/apps/a/venv"
    # Another version may have another MPI.
    assert venv_of(["hpctrain/2.0"], loaded) == venv_of(["gcc/13"], loaded) == venv_of([], loaded) == ""
    assert venv_of(["hpctrain"], {}) == ""

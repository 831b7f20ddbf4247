"""Benchmark of compiled models at small size on two ranks: its output, its compiler, its target and result files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import compile_step
import pytest
import torch
from benchmark_helpers import FOLDER, PROVENANCE
from compile_step import AOT_EAGER, INDUCTOR, Compiler, Name, gains, targets, usable_compiler
from support.jobs import JobStarter
from torch import nn


@pytest.mark.benchmark
@pytest.mark.limit(400)
def test_compiled_steps_are_timed_next_to_those_without_the_compiler(launch: JobStarter, tmp_path: Path) -> None:
    words = (
        "--quick",
        "--rounds",
        "2",
        "--compiler",
        AOT_EAGER,
        "--without",
        "ddp,zero1,zero2,plain-alone",
        "--out",
        tmp_path,
    )
    done = launch(2, FOLDER / "compile_step.py", *words, timeout=380)
    assert done.returncode == 0, done
    (path,) = tmp_path.glob("compile-np2-*.json")
    found = json.loads(path.read_text())
    compiled = [Name.ALONE, Name.FSDP, Name.TORCH_FSDP]
    assert list(found["seconds"]) == [*compiled, Name.PLAIN_FSDP, Name.PLAIN_TORCH_FSDP]
    assert found["graphs"] == dict.fromkeys(compiled, 1)  # the whole model, or a block for all blocks
    assert list(found["first_step_seconds"]) == compiled and found["compiler"] == AOT_EAGER
    # Under a graph that has missed a hook, the ranks would train different models.
    drift = found["largest_relative_loss_differences"]
    assert set(drift) == {Name.FSDP, Name.TORCH_FSDP, Name.PLAIN_FSDP} and max(drift.values()) < 1e-6
    medians = {name: time["median"] for name, time in found["seconds"].items()}
    gain = found["compiled_gain"]
    assert gain[Name.FSDP] == pytest.approx(medians[Name.PLAIN_FSDP] / medians[Name.FSDP])
    (target,) = found["targets"]
    assert target["value"] == pytest.approx(medians[Name.FSDP] / medians[Name.ALONE])
    assert PROVENANCE <= found["provenance"].keys() and found["complete"]
    assert "compiled by aot_eager" in done.stdout and done.stdout.index("target") < done.stdout.index("median ms")
    assert path.with_suffix(".png").stat().st_size > 1000 and path.with_suffix(".csv").exists()


def test_the_target_is_the_same_compiled_model_alone() -> None:
    times: dict[str, dict[str, float]] = {
        Name.ALONE: {"median": 0.1},
        Name.FSDP: {"median": 0.09},
        Name.PLAIN_FSDP: {"median": 0.18},
    }
    (target,) = targets(times)
    assert target.value == pytest.approx(0.9) and target.met and target.wanted == "<= 1"
    assert gains(times) == {Name.FSDP: pytest.approx(2.0)}
    assert not list(targets({Name.FSDP: times[Name.FSDP]}))


@pytest.mark.parametrize("there, name", [(True, INDUCTOR), (False, AOT_EAGER)])
def test_inductor_needs_a_compiler(there: bool, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if there:
        (tmp_path / "g++").symlink_to(shutil.which("true", path="/usr/bin:/bin") or "")
    assert usable_compiler() == name == compile_step.parse([]).compiler
    assert compile_step.parse(["--compiler", AOT_EAGER]).compiler == AOT_EAGER


@pytest.mark.benchmark
def test_each_candidate_has_graphs_of_its_own() -> None:
    """Torch does not look at hooks of modules inside a model when it finds a graph of another model of its class."""
    torch.compiler.reset()
    seen: list[str] = []
    plain, hooked = (nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
    hooked[0].register_forward_hook(lambda *_: seen.append("hook"))
    compilers = [Compiler("eager"), Compiler("eager")]
    for model, compiler in zip((plain, hooked), compilers):
        torch.compile(model, backend=compiler)(torch.zeros(1, 2))
    assert [one.graphs for one in compilers] == [1, 1] and seen == ["hook"]
    torch.compiler.reset()

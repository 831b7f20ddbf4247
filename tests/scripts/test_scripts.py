"""Training programs written from the documentation alone, each compared with its twin in plain PyTorch.

A program imports torch and public names of hpctrain only. Its twin does not know hpctrain: on any number of ranks, with
any strategy, and killed and resumed on another number of ranks, the program ends with the twin's weights.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hpctrain

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
NAMES = sorted(path.name.removesuffix("_plain.py") for path in PROGRAMS.glob("*_plain.py"))
ONE_REPLICA = {"ema"}  # torch's AveragedModel copies a model, and a sharded model cannot be copied
NOT_TRAINING = {"evaluate"}
TOLERANCE = 1e-5  # over whole runs of Adam; most end within 1e-6
HALT = 7  # update


def _weights(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(path)
    return found


def _largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert list(one) == list(other)
    return max(
        float((_decided(name, one[name]) - _decided(name, other[name])).abs().max())
        for name in one
        if one[name].numel()
    )


def _decided(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a weight that its gradient determines.

    The bias of an attention's keys adds the same to all scores of a query, which does not change the softmax: its
    gradient is only rounding error, and Adam turns it into full steps.
    """
    if name.endswith("in_proj_bias"):
        queries, _, values = tensor.double().chunk(3)
        return torch.cat([queries, values])
    return tensor.double()


def _run(launch: Any, ranks: int, out: Path, strategy: str, names: list[str], halt: int = 0) -> dict[str, str]:
    words = [str(HERE / "run_all.py"), str(out), strategy, str(halt), *names]
    result = launch(ranks, *words, timeout=150, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr + result.stdout
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith("program ")]
    return {words[1]: words[2] for words in lines}


def _long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """Return the weights of all twins, which run in a child process without hpctrain."""
    out = tmp_path_factory.mktemp("twins")
    words = [sys.executable, str(HERE / "run_all.py"), str(out), "plain", "0", *NAMES]
    subprocess.run(words, check=True, timeout=150, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=out)
    return {name: _weights(out / f"{name}.plain.pt") for name in NAMES}


def _compare(twins: dict[str, dict[str, torch.Tensor]], out: Path, strategy: str, names: list[str]) -> None:
    found = {name: _largest_difference(_weights(out / f"{name}.{strategy}.pt"), twins[name]) for name in names}
    assert {name: value for name, value in found.items() if not value < TOLERANCE} == {}


def test_there_are_at_least_twelve_pairs_of_programs() -> None:
    assert len(NAMES) >= 12 and all((PROGRAMS / f"{name}.py").exists() for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_programs_import_only_public_names(name: str) -> None:
    tree = ast.parse((PROGRAMS / f"{name}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for each in names:
            assert not each.startswith("hpctrain.") or each.split(".")[1] in hpctrain.__all__
    plain = (PROGRAMS / f"{name}_plain.py").read_text()
    assert "import hpctrain" not in plain and "from hpctrain" not in plain


@pytest.mark.limit(200)
@pytest.mark.parametrize("strategy, ranks", [("fsdp", 2), _long("ddp", 2), _long("ddp", 4), _long("zero2", 3)])
def test_programs_end_with_the_weights_of_their_twins(
    launch: Any, twins: Any, tmp_path: Path, strategy: str, ranks: int
) -> None:
    names = [name for name in NAMES if strategy == "ddp" or name not in ONE_REPLICA]
    assert set(_run(launch, ranks, tmp_path, strategy, names).values()) == {"done"}
    _compare(twins, tmp_path, strategy, names)


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    "strategy, before, after, every",
    [("ddp", 2, 3, 3), _long("ddp", 2, 3, 1), _long("zero1", 3, 1, 1), _long("fsdp", 2, 4, 1)],
)
def test_halted_programs_resume_on_another_number_of_ranks(
    launch: Any, twins: Any, tmp_path: Path, strategy: str, before: int, after: int, every: int
) -> None:
    names = [name for name in NAMES if name not in NOT_TRAINING and (strategy == "ddp" or name not in ONE_REPLICA)]
    names = names[::every]
    assert set(_run(launch, before, tmp_path, strategy, names, HALT).values()) == {"halted"}
    assert set(_run(launch, after, tmp_path, strategy, names).values()) == {"done"}
    _compare(twins, tmp_path, strategy, names)

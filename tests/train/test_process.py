"""malloc's thresholds: low during the allocations that stay, high afterwards, unchanged if users set them."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from typing import Any

import pytest
import torch

from hpctrain.train.process import HIGH, LOW, UPDATES, Allocator, library

GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")


class Recorded:
    """C library that records the calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def mallopt(self, name: int, value: int) -> int:
        self.calls.append((name, value))
        return 1

    def malloc_trim(self, pad: int) -> int:
        self.calls.append("trim")
        return 1


def thresholds(libc: Recorded) -> list[int]:
    return [call[1] for call in libc.calls if call != "trim" and call[0] == -3]


def test_the_threshold_rises_after_the_second_update() -> None:
    libc = Recorded()
    allocator = Allocator(libc)
    allocator.start()
    allocator.start()  # once
    assert thresholds(libc) == [LOW] and "trim" not in libc.calls
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for update in range(UPDATES + 2):
        assert thresholds(libc) == ([LOW] if update < UPDATES else [LOW, HIGH])
        parameter.grad = torch.ones(2)
        optimizer.step()
    assert thresholds(libc) == [LOW, HIGH] and libc.calls.count("trim") == 1


@GLIBC
@pytest.mark.parametrize(
    "environ, left_alone",
    [
        ({}, False),
        ({"HPCTRAIN_MALLOC": "1"}, False),
        ({"HPCTRAIN_MALLOC": "0"}, True),
        ({"MALLOC_MMAP_THRESHOLD_": "1000000"}, True),
        ({"MALLOC_TRIM_THRESHOLD_": "1000000"}, True),
        ({"MALLOC_ARENA_MAX": "2"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1000000"}, True),
        ({"GLIBC_TUNABLES": "glibc.cpu.x86_ibt=on"}, False),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, True),
    ],
)
def test_settings_of_the_user_are_respected(environ: dict[str, str], left_alone: bool) -> None:
    assert (library(environ) is None) is left_alone


def test_without_a_library_the_allocator_does_nothing() -> None:
    allocator = Allocator(None)
    allocator.start()
    allocator.raise_threshold()  # no call of a library


@GLIBC
def test_large_memory_is_returned_while_the_threshold_is_low() -> None:
    """Memory freed at the bottom of the heap stays with the process unless it was allocated by mmap."""
    code = (
        "import sys, torch; from hpctrain.train.process import Allocator, library\n"
        "lines = lambda: open('/proc/self/status').read().splitlines()\n"
        "field = lambda: next(int(line.split()[1]) for line in lines() if line.startswith('RssAnon'))\n"
        "if sys.argv[1] == 'low': Allocator(library({})).start()\n"
        "warm = torch.zeros(30 * 2**18); del warm  # raises glibc's own threshold to 30 MiB\n"
        "before = field(); kept = []\n"
        "for _ in range(8):\n"
        "    passing = torch.zeros(2**20); kept.append(torch.zeros(2**15)); passing.fill_(1); kept.append(passing)\n"
        "kept = kept[::2]; print((field() - before) / 1024)"
    )
    held = {
        how: float(subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True).stdout)
        for how in ("low", "default")
    }
    assert held["low"] < 8 and held["default"] > 20  # MiB, of which 5 stay allocated


def test_the_library_has_mallopt() -> None:
    libc = library({})
    assert libc is None or libc.mallopt(ctypes.c_int(-3), ctypes.c_int(HIGH)) == 1


# Substitute of torch's compiler: it saves the import, and is replaced completely when the compiler is used ------------


TRAIN = """
import sys, torch
from hpctrain.train.process import defer_compiler
defer_compiler()
def trained():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    return model.weight.detach().clone()
before = trained()
"""

RECOMPUTE = """
from torch.utils.checkpoint import checkpoint
x = torch.ones(2, requires_grad=True)
checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
assert torch.equal(x.grad, torch.cos(x.detach()))
"""

RECOMPUTE_OFTEN = """
import gc
from torch.utils.checkpoint import checkpoint
def functions():
    gc.collect()
    return sum(callable(one) and hasattr(one, "__code__") for one in gc.get_objects())
def passes(count):
    for _ in range(count):
        x = torch.ones(2, requires_grad=True)
        checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
passes(2)
before_passes = functions()
passes(20)
assert functions() - before_passes < 5, functions() - before_passes
"""

THEN_SET_A_FLAG = """
torch._dynamo.config.suppress_errors = True
assert torch._dynamo.__file__ and torch._dynamo.config.suppress_errors
"""

# Only the substitute of the compiler is loaded; after a call of torch.compile all parts are the real ones.
THEN_COMPILE = """
assert [name for name in sys.modules if name.startswith("torch._dynamo")] == ["torch._dynamo"]
assert not getattr(torch._dynamo, "__dict__", {}).get("__path__")
double = torch.compile(lambda x: 2 * x, backend="eager", fullgraph=True)
assert double(torch.ones(2)).tolist() == [2.0, 2.0]
real = sys.modules["torch._dynamo"]
assert real is torch._dynamo and real.__file__ and real.__path__
raw = torch.optim.Optimizer.add_param_group.__wrapped__
assert "__dynamo_disable" not in raw.__dict__
assert torch.equal(trained(), before)
assert raw.__dict__["__dynamo_disable"] is not raw
"""

THEN_IMPORT = """
import torch._dynamo.config as config
assert config.__file__
from torch._dynamo import reset
reset()
"""

# Imports that look through all modules of the process, as for the place of a new operator, do not load the compiler.
THEN_IMPORT_OPERATORS = """
import torch.distributed.tensor
assert not hasattr(sys.modules["torch._dynamo"], "__file__")
assert torch.distributed.tensor.DeviceMesh
"""

# A function that a program excludes from graphs before it compiles anything stays outside of them.
EXCLUDED_BEFORE = """
from hpctrain.train.process import defer_compiler
defer_compiler()
import torch
@torch.compiler.disable
def outside(x):
    return x + float(torch.compiler.is_compiling())
@torch.compiler.disable(recursive=False)
def also(x):
    return x + float(torch.compiler.is_compiling())
inside = torch.compile(lambda x: also(outside(2 * x)), backend="eager")
assert inside(torch.ones(2)).tolist() == [2.0, 2.0]
"""

LOADED_BEFORE = """
assert torch._dynamo is real and sys.modules["torch._dynamo"] is real
"""


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        TRAIN + RECOMPUTE + THEN_COMPILE,
        TRAIN + RECOMPUTE_OFTEN,
        TRAIN + THEN_IMPORT,
        TRAIN + THEN_SET_A_FLAG,
        TRAIN + THEN_IMPORT_OPERATORS,
        "import sys, torch" + EXCLUDED_BEFORE,
        "import torch._dynamo; real = torch._dynamo" + TRAIN + LOADED_BEFORE,
    ],
    ids=[
        "then compile",
        "nothing is kept of passes",
        "then import a part",
        "then set a flag",
        "then import operators",
        "excluded before",
        "loaded before",
    ],
)
def test_the_substitute_is_replaced_by_the_compiler(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr

"""Substitute of torch's compiler: it saves the import, and is replaced completely when the compiler is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
        "import torch._dynamo; real = torch._dynamo" + TRAIN + LOADED_BEFORE,
    ],
    ids=["then compile", "nothing is kept of passes", "then import a part", "then set a flag", "loaded before"],
)
def test_the_substitute_is_replaced_by_the_compiler(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr

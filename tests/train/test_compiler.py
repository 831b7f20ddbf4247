"""The compiler's stand-in saves its import and leaves no trace once the compiler is wanted."""

from __future__ import annotations

import subprocess
import sys

PUT_OFF = """
import sys, torch
from hpctrain.train.compiler import put_off
put_off()
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


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_optimizer_trains_without_the_compiler() -> None:
    loaded = run(PUT_OFF + "print(sorted(name for name in sys.modules if name.startswith('torch._dynamo')))")
    assert loaded.strip() == "['torch._dynamo']"  # the stand-in and nothing below it


def test_whoever_compiles_gets_the_compiler() -> None:
    checks = """
double = torch.compile(lambda x: 2 * x, backend="eager", fullgraph=True)
assert double(torch.ones(2)).tolist() == [2.0, 2.0]
real = sys.modules["torch._dynamo"]
assert real is torch._dynamo and real.__file__ and real.__path__
# What passed the stand-in is disabled by the real one from its next use on.
raw = torch.optim.Optimizer.add_param_group.__wrapped__
assert "__dynamo_disable" not in raw.__dict__
assert torch.equal(trained(), before)
assert raw.__dict__["__dynamo_disable"] is not raw
"""
    run(PUT_OFF + checks)


def test_submodules_can_be_imported() -> None:
    run(PUT_OFF + "import torch._dynamo.config as config; assert config.__file__")
    run(PUT_OFF + "from torch._dynamo import reset; reset()")


def test_a_compiler_that_is_loaded_stays() -> None:
    run("import torch._dynamo; real = torch._dynamo\n" + PUT_OFF + "assert torch._dynamo is real")

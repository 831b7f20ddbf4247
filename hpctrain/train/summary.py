"""Summary printed at the end of a run: losses, a text sample, and the run folder."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpctrain.models.gpt import GPT
from hpctrain.models.gpt import generate
from hpctrain.train.receipt import render
from hpctrain.util.text import printable_lines

if TYPE_CHECKING:
    from hpctrain.train.run import Run

LENGTH = 300  # bytes of generated text
BYTES = 256  # vocabulary of a byte-level model


def sample_text(model: nn.Module, prompt: str, device: torch.device, multiple: int = 1) -> str | None:
    """Return the text that a byte-level GPT generates after the prompt; None without a prompt or such a model.

    Sequence lengths must be multiples of ``multiple``, because sequences may be split over ranks.
    """
    if not prompt or not isinstance(model, GPT) or model.config.vocab_size != BYTES:
        return None
    tokens = torch.tensor(list(prompt.encode()), dtype=torch.int64, device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    written = generate(model, tokens, LENGTH, temperature=0.7, top_k=40, generator=generator, multiple=multiple)
    return bytes(written.tolist()).decode(errors="replace")


def _program() -> str:
    """Return how to call the command from this folder: its name if it is in PATH, otherwise its path."""
    if shutil.which("hpctrain"):
        return "hpctrain"
    script = Path(sys.executable).with_name("hpctrain")
    return os.path.relpath(script) if script.exists() else f"{sys.executable} -m hpctrain"


def _in_bits(value: float, facts: Mapping[str, Any], loss: str) -> str:
    """Return a loss with its unit; only the cross entropy has one."""
    if loss != "cross_entropy":
        return f"{value:.4f}"
    unit = " per byte" if facts.get("vocab_size") == BYTES else ""
    return f"{value:.4f} nats{unit} = {value / math.log(2):.4f} bits{unit}"


def summarise(run: Run, facts: Mapping[str, Any], text: str | None, *, resumed: bool, loss: str) -> None:
    """Print the last losses, the sample, and where to find more; ``loss`` names the loss function."""
    if resumed:
        print(printable_lines(f"{run.folder} is finished: {run.step} steps are done; increase train.steps to continue"))
    losses = run.state.curves.columns
    if losses.get("loss"):
        nats = " nats" if loss == "cross_entropy" else ""
        print(printable_lines(f"training loss    {losses['loss'][-1]:.4f}{nats} after step {run.step}"))
    if losses.get("validation_loss"):
        print(printable_lines(f"validation loss  {_in_bits(losses['validation_loss'][-1], facts, loss)}"))
    if text is not None:
        print("\nThe model continues the prompt:\n")
        print(printable_lines("\n".join(f"    {line}" for line in text.splitlines())))
        print()
    print(printable_lines(f"run folder       {run.folder}"))
    best = run.state.retention.best()
    if best is not None:
        print(printable_lines(f"best checkpoint  {best} (by {run.options.keep_best})"))
    consumed = render.summary(run.folder)
    if consumed is not None:
        print(printable_lines(f"efficiency       {consumed}"))
    print(printable_lines(f"inspect          {_program()} checkpoint show {run.state.path(run.step)}"))
    sys.stdout.flush()

"""Actions ``hpctrain checkpoint export``, ``import`` and ``plot``: conversion to and from other formats, and plots."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.tools import convert, curves
from hpctrain.cli.checkpoint.text import chosen, print_json, progress, size
from hpctrain.cli.options import action
from hpctrain.util.plotting import KINDS
from hpctrain.util.text import printable

_EXPORT_EPILOG = """\
examples:
  hpctrain checkpoint export runs/a/checkpoints/step_00001200.h5 --to safetensors --model-only -o gpt.safetensors
  hpctrain checkpoint export runs/a/checkpoints/step_00001200.h5 --to torch     a dict: model, optimizer, train, config
  hpctrain checkpoint export runs/a/checkpoints/step_00001200.h5 --to npz

Without --model-only, tensors of safetensors and npz are named by their path: model/head.weight,
optimizer/head.weight/exp_avg. npz holds bfloat16 as float32. Only --to torch needs torch.
"""
_IMPORT_EPILOG = """\
examples:
  hpctrain checkpoint import gpt.safetensors -o gpt.h5
  hpctrain checkpoint import ddp.pt -o gpt.h5 --strip module.

A file of torch.save must hold a dict of tensors, or one under model, state_dict, model_state_dict or module. It is
read without running code from it. hpctrain.checkpoint.load("gpt.h5", model=model) loads the result.
"""
_PLOT_EPILOG = """\
examples:
  hpctrain checkpoint plot runs/a -o loss.png      from its newest valid checkpoint
  hpctrain checkpoint plot runs/a/checkpoints/step_00001200.h5 -o loss.pdf

For asynchronous training, the picture includes the staleness of updates. Needs matplotlib:
pip install 'hpctrain[plot]'. hpctrain checkpoint show prints the same curves as text.
"""


def add_actions(actions: Any) -> None:
    """Add the three actions to the command line."""
    out = action(actions, "export", "convert a checkpoint to another format", _EXPORT_EPILOG, _export)
    out.add_argument("file", metavar="FILE", help="a checkpoint, or the folder of a run")
    out.add_argument("--to", required=True, choices=convert.EXPORT_SUFFIXES, help="the format")
    out.add_argument("-o", "--output", metavar="OUT", help="the file to write (default: beside FILE, with its name)")
    out.add_argument("--model-only", action="store_true", help="only the model, under its own names")
    out.add_argument("--force", action="store_true", help="replace OUT")
    back = action(actions, "import", "convert another program's model file to a checkpoint", _IMPORT_EPILOG, _import)
    back.add_argument("file", metavar="FILE", help=f"a file that ends in {', '.join(convert.IMPORT_SUFFIXES)}")
    back.add_argument("-o", "--output", metavar="OUT.h5", required=True, help="the checkpoint to write")
    back.add_argument("--step", type=int, default=0, metavar="N", help="the step to record in it (default: 0)")
    back.add_argument("--strip", default="", metavar="PREFIX", help="remove this prefix from all names")
    back.add_argument("--force", action="store_true", help="replace OUT.h5")
    drawing = action(actions, "plot", "plot the curves of a run from its checkpoint", _PLOT_EPILOG, _plot)
    drawing.add_argument("file", metavar="FILE", help="a checkpoint, or the folder of a run")
    drawing.add_argument("-o", "--output", metavar="OUT", required=True, help=f"a picture: {', '.join(KINDS)}")


def _export(args: argparse.Namespace) -> int:
    file = chosen(args.file)
    beside = Path(file).with_suffix(convert.EXPORT_SUFFIXES[args.to])
    output = beside if args.output is None else Path(args.output)
    with progress([file]) as on_bytes:
        count = convert.export(file, args.to, output, model_only=args.model_only, force=args.force, progress=on_bytes)
    return _written(output, args.json, tensors=count)


def _import(args: argparse.Namespace) -> int:
    names = convert.ingest(args.file, args.output, step=args.step, strip=args.strip, force=args.force)
    return _written(Path(args.output), args.json, tensors=len(names))


def _plot(args: argparse.Namespace) -> int:
    curves.plot(chosen(args.file), args.output)
    return _written(Path(args.output), args.json)


def _written(path: Path, as_json: bool, **facts: int) -> int:
    """Print which file was written and return the exit code."""
    length = path.stat().st_size
    if as_json:
        print_json({"file": str(path), "bytes": length, **facts})
    else:
        counted = "".join(f", {count} {name}" for name, count in facts.items())
        print(printable(f"{path}  {size(length)}{counted}"))
    return 0

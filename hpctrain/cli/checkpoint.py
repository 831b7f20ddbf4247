"""Verb ``hpctrain checkpoint``: lists, shows, verifies, compares, converts and draws checkpoints.

Needs only h5py and NumPy, so it runs on a login node. torch is loaded for ``--to torch`` and to
import files that torch saved, matplotlib for pictures.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.retention import step_of
from hpctrain.checkpoint.tools import inspect
from hpctrain.checkpoint.tools.curves import is_steps, sparkline
from hpctrain.checkpoint.tools.inspect import Contents, Entry, TensorStats, judge
from hpctrain.cli import checkpoint_files
from hpctrain.cli.checkpoint_files import chosen, one_line, print_json, progress
from hpctrain.cli.main import add_action, add_verb
from hpctrain.errors import UsageError
from hpctrain.util.text import columns, counted, format_bytes, printable, printable_lines

_EPILOG = """\
examples:
  hpctrain checkpoint ls runs/a            steps, sizes, losses
  hpctrain checkpoint show runs/a          tensors of the newest one, settings, curves
  hpctrain checkpoint verify runs/a        is every bit as it was written?
  hpctrain checkpoint export runs/a --to safetensors --model-only -o model.safetensors
"""
_LS_EPILOG = """\
examples:
  hpctrain checkpoint ls runs/a
  hpctrain checkpoint ls runs/a/checkpoints --json

The best is marked if the run keeps its best checkpoint (checkpoint.keep_best). The structure of each file is checked;
hpctrain checkpoint verify also reads every byte of the tensors.
"""
_SHOW_EPILOG = """\
examples:
  hpctrain checkpoint show runs/a      the newest valid checkpoint of the run
  hpctrain checkpoint show runs/a/checkpoints/step_00001200.h5
  hpctrain checkpoint show runs/a/checkpoints/step_00001200.h5 head.weight      a tensor and its optimizer state
  hpctrain checkpoint show runs/a/checkpoints/step_00001200.h5 /rng --json
"""
_BEST_EPILOG = """\
examples:
  hpctrain checkpoint best runs/a      by the value of checkpoint.keep_best
  hpctrain checkpoint best runs/a --by accuracy --highest
  hpctrain checkpoint best runs/a --json

exit code: 0 if the path was printed, 2 if the best cannot be determined
"""
_OMITTED = ("NX_class", "signal", "axes", "step")  # keys of /train that are for viewers or shown above


def add_parser(subparsers: Any) -> None:
    what = "List, show, verify, compare, convert and plot checkpoints."
    parser = add_verb(subparsers, "checkpoint", what, _EPILOG)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = add_action(actions, "ls", "list the checkpoints of a run", _LS_EPILOG, _ls)
    listing.add_argument("folder", metavar="RUN", help="the folder of a run, or one with step_*.h5 files")
    judging = add_action(actions, "best", "print the path of the best checkpoint of a run", _BEST_EPILOG, _best)
    judging.add_argument("folder", metavar="RUN", help="the folder of a run, or one with step_*.h5 files")
    judging.add_argument("--by", default="", metavar="NAME", help="a value that the run logged (default: keep_best)")
    which = judging.add_mutually_exclusive_group()
    which.add_argument("--lowest", dest="which", action="store_const", const="lowest", help="the lowest is best")
    which.add_argument("--highest", dest="which", action="store_const", const="highest", help="the highest is best")
    showing = add_action(actions, "show", "show the content of a checkpoint", _SHOW_EPILOG, _show)
    showing.add_argument("file", metavar="FILE", help="a checkpoint, or the folder of a run")
    showing.add_argument("name", metavar="NAME", nargs="?", help="a tensor, parameter or group (default: everything)")
    checkpoint_files.add_actions(actions)


def _ls(args: argparse.Namespace) -> int:
    entries = inspect.ls(args.folder)
    if args.json:
        print_json([dataclasses.asdict(entry) for entry in entries])
    elif entries:
        print(printable_lines("\n".join(columns([_entry_row(entry) for entry in entries]))))
    else:
        print(printable_lines(f"no checkpoints in {args.folder}"))
    return 0


def _best(args: argparse.Namespace) -> int:
    if not Path(args.folder).is_dir():
        raise UsageError(f"{args.folder} is not a folder: give the folder of a run")
    found = judge(args.folder, args.by, args.which)
    if args.json:
        print_json(dataclasses.asdict(found))
    else:
        print(printable(found.file))
    return 0


def _show(args: argparse.Namespace) -> int:
    file = chosen(args.file)
    with progress([file]) as told:
        contents = inspect.show(file, args.name, told)
    if args.json:
        print_json(dataclasses.asdict(contents))
    else:
        lines = [*_heading(contents), ""] if args.name is None else []
        print(printable_lines("\n".join(lines + _tree(contents.tensors))))
    return 0


def _entry_row(entry: Entry) -> list[str]:
    name, length = Path(entry.file).name, format_bytes(entry.bytes, 1)
    if entry.error is not None:
        return [name, length, f"damaged: {printable(entry.error)}"]
    told = "" if entry.loss is None or not math.isfinite(entry.loss) else f"loss {entry.loss:.4f}"
    if entry.by is not None and entry.by != "loss" and entry.value is not None:
        told = f"{told}  {entry.by} {entry.value:.4g}".strip()
    ranks = "1 rank" if entry.world_size == 1 else f"{entry.world_size} ranks"
    mark, created = "best" if entry.best else "", printable(str(entry.created))
    named = step_of(name)
    suffix = "" if named in (None, entry.step) else f" (named {named}: not used to resume)"
    return [name, length, f"step {entry.step}{suffix}", ranks, created, mark, printable(told)]


def _heading(contents: Contents) -> list[str]:
    root = contents.root
    lines = [
        f"{contents.file}  {format_bytes(contents.bytes, 1)}",
        f"step {root.get('step')}, world size {root.get('world_size')}, "
        f"written {root.get('created')} by {root.get('creator')}, format {root.get('format_version')}",
        f"fingerprint {contents.fingerprint}",
        *([] if contents.frozen is None else [f"only trained parameters; fingerprint of the frozen {contents.frozen}"]),
        *_curves(contents.curves, contents.train.get("logged")),
    ]
    rest = {key: value for key, value in contents.train.items() if key not in _OMITTED}
    for title, group in (("train", rest), ("provenance", contents.provenance)):
        if group:
            lines += ["", title, *columns([["", key, one_line(value)] for key, value in group.items()])]
    if contents.config is not None:
        lines += ["", "config", *("  " + line for line in contents.config.splitlines())]
    return [printable(line) for line in lines]


def _curves(curves: dict[str, list[float]], logged: Any) -> list[str]:
    """Return one line per curve: its first value, a sparkline, its last value.

    A curve of NaN is left out unless the run has ``logged`` it: some curves are in every file.
    """
    known = logged if isinstance(logged, dict) else {}
    drawn = {
        name: values
        for name, values in curves.items()
        if values and not is_steps(name) and (name in known or not all(map(math.isnan, values)))
    }
    rows = [
        [name.replace("_", " "), f"{values[0]:.4g}", sparkline(values), f"{values[-1]:.4g}"]
        for name, values in drawn.items()
    ]
    return columns(rows)


def _tree(tensors: Sequence[TensorStats]) -> list[str]:
    """Return the tensors by group, with statistics of their values."""
    lines: list[str] = []
    rows: dict[str, list[list[str]]] = {}
    for tensor in tensors:
        group, _, name = tensor.path.rpartition("/")
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        rows.setdefault(group, []).append(["", name, tensor.dtype, shape, *_numbers(tensor)])
    for group, members in rows.items():
        lines += [group, *columns(members)]
    total = sum(tensor.bytes for tensor in tensors)
    return [*lines, f"{counted(len(tensors), 'tensor')}, {format_bytes(total, 1)}"]


def _numbers(tensor: TensorStats) -> list[str]:
    if tensor.values is not None and tensor.values:
        return [", ".join(f"{value:.6g}" for value in tensor.values)]
    if tensor.minimum is None:
        return ["no finite value" if tensor.nonfinite else "empty"]
    if not tensor.shape:
        return [f"{tensor.minimum:.6g}"]
    row = [f"min {tensor.minimum:.4g}", f"max {tensor.maximum:.4g}", f"norm {tensor.norm:.4g}"]
    return row + ([f"{tensor.nonfinite} not finite"] if tensor.nonfinite else [])

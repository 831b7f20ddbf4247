"""Serve ``hpctrain checkpoint``: list a run's checkpoints, show what a file holds, verify every byte of it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hpctrain.checkpoint import inspect
from hpctrain.checkpoint.inspect import Contents, Entry, Progress, TensorStats, Verdict
from hpctrain.errors import EXIT_FAILURE, UsageError

_LS_EPILOG = """\
examples:
  hpctrain checkpoint ls runs/a
  hpctrain checkpoint ls runs/a/checkpoints --json

The structure of each file is checked; hpctrain checkpoint verify also reads every byte of the tensors.
"""
_SHOW_EPILOG = """\
examples:
  hpctrain checkpoint show runs/a/checkpoints/step_00001200.h5
  hpctrain checkpoint show runs/a/checkpoints/step_00001200.h5 head.weight      a tensor and its optimizer state
  hpctrain checkpoint show runs/a/checkpoints/step_00001200.h5 /rng --json
"""
_VERIFY_EPILOG = """\
examples:
  hpctrain checkpoint verify runs/a/checkpoints/*.h5

exit code: 0 all files are sound, 1 a file is damaged, 2 a file is not there
"""
_BIG = 256 << 20  # bytes from which a progress bar is worth its line
_GROUPS_APART = ("NX_class", "signal", "axes", "step")  # of /train: for viewers, or shown above


def add_parser(subparsers: Any) -> None:
    """Add the verb and its actions to the command line."""
    parser = subparsers.add_parser("checkpoint", help="look into checkpoints, verify them", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = _action(actions, "ls", "list the checkpoints of a run", _LS_EPILOG)
    listing.add_argument("folder", metavar="RUN", help="the folder of a run, or one with step_*.h5 files")
    showing = _action(actions, "show", "show what a checkpoint holds", _SHOW_EPILOG)
    showing.add_argument("file", metavar="FILE", help="a checkpoint")
    showing.add_argument("name", metavar="NAME", nargs="?", help="a tensor, parameter or group (default: everything)")
    verifying = _action(actions, "verify", "check that every stored bit is as it was written", _VERIFY_EPILOG)
    verifying.add_argument("files", metavar="FILE", nargs="+", help="checkpoints")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the action; return the exit code."""
    if args.action == "ls":
        return _ls(args.folder, args.json)
    if args.action == "show":
        return _show(args.file, args.name, args.json)
    return _verify(args.files, args.json)


def _action(actions: Any, name: str, summary: str, epilog: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _ls(folder: str, as_json: bool) -> int:
    entries = inspect.ls(folder)
    if as_json:
        _print_json([dataclasses.asdict(entry) for entry in entries])
    elif entries:
        print("\n".join(_columns([_entry_row(entry) for entry in entries])))
    else:
        print(f"no checkpoints in {folder}")
    return 0


def _show(file: str, name: str | None, as_json: bool) -> int:
    with _progress([file]) as progress:
        contents = inspect.show(file, name, progress)
    if as_json:
        _print_json(dataclasses.asdict(contents))
    else:
        lines = [*_heading(contents), ""] if name is None else []
        print("\n".join(lines + _tree(contents.tensors)))
    return 0


def _verify(files: Sequence[str], as_json: bool) -> int:
    for file in files:
        if not Path(file).is_file():
            raise UsageError(f"there is no file {file}: give checkpoints, such as RUN/checkpoints/*.h5")
    verdicts: list[Verdict] = []
    with _progress(files) as progress:
        for file in files:
            verdicts.append(inspect.verify(file, progress))
            if not as_json:
                tqdm.write(_verdict_line(verdicts[-1]), file=sys.stdout)
    if as_json:
        _print_json([dataclasses.asdict(verdict) for verdict in verdicts])
    return 0 if all(verdict.ok for verdict in verdicts) else EXIT_FAILURE


@contextmanager
def _progress(files: Sequence[str]) -> Iterator[Progress | None]:
    """Show a bar over the bytes to read, where there is a terminal and enough to wait for."""
    total = sum(Path(file).stat().st_size for file in files if Path(file).is_file())
    if total < _BIG or not sys.stderr.isatty():
        yield None
        return
    with tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="reading", leave=False) as bar:
        yield bar.update


def _verdict_line(verdict: Verdict) -> str:
    return f"ok       {verdict.file}" if verdict.ok else f"damaged  {_printable(verdict.error or verdict.file)}"


def _entry_row(entry: Entry) -> list[str]:
    name, size = Path(entry.file).name, _size(entry.bytes)
    if entry.error is not None:
        return [name, size, f"damaged: {_printable(entry.error)}"]
    loss = "" if entry.loss is None else f"loss {entry.loss:.4f}"
    ranks = "1 rank" if entry.world_size == 1 else f"{entry.world_size} ranks"
    return [name, size, f"step {entry.step}", ranks, _printable(str(entry.created)), loss]


def _heading(contents: Contents) -> list[str]:
    root = contents.root
    lines = [
        f"{contents.file}  {_size(contents.bytes)}",
        f"step {root.get('step')}, world size {root.get('world_size')}, "
        f"written {root.get('created')} by {root.get('creator')}, format {root.get('format_version')}",
    ]
    for name, values in contents.curves.items():
        if values and "step" not in name:
            lines.append(f"{name.replace('_', ' ')}  {values[0]:.4g} {inspect.sparkline(values)} {values[-1]:.4g}")
    rest = {key: value for key, value in contents.train.items() if key not in _GROUPS_APART}
    for title, group in (("train", rest), ("provenance", contents.provenance)):
        if group:
            lines += ["", title, *_columns([["", key, _one_line(value)] for key, value in group.items()])]
    if contents.config is not None:
        lines += ["", "config", *("  " + line for line in contents.config.splitlines())]
    return [_printable(line) for line in lines]


def _tree(tensors: Sequence[TensorStats]) -> list[str]:
    """Return the tensors under their groups, with what can be said of their values."""
    lines: list[str] = []
    rows: dict[str, list[list[str]]] = {}
    for tensor in tensors:
        group, _, name = tensor.path.rpartition("/")
        rows.setdefault(group, []).append(["", name, tensor.dtype, _shape(tensor.shape), *_numbers(tensor)])
    for group, members in rows.items():
        lines += [group, *_columns(members)]
    total = sum(tensor.bytes for tensor in tensors)
    return [*lines, f"{len(tensors)} tensor{'' if len(tensors) == 1 else 's'}, {_size(total)}"]


def _numbers(tensor: TensorStats) -> list[str]:
    if tensor.values is not None and tensor.values:
        return [", ".join(f"{value:.6g}" for value in tensor.values)]
    if tensor.minimum is None:
        return ["no finite value" if tensor.nonfinite else "empty"]
    if not tensor.shape:
        return [f"{tensor.minimum:.6g}"]
    row = [f"min {tensor.minimum:.4g}", f"max {tensor.maximum:.4g}", f"norm {tensor.norm:.4g}"]
    return row + ([f"{tensor.nonfinite} not finite"] if tensor.nonfinite else [])


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns; the last cell of a row may be as long as it likes."""
    widths: dict[int, int] = {}
    for row in rows:
        for column, cell in enumerate(row[:-1]):
            widths[column] = max(widths.get(column, 0), len(cell))
    cells = [[cell.ljust(widths.get(column, 0)) for column, cell in enumerate(row)] for row in rows]
    return ["  ".join(line).rstrip() for line in cells]


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _size(count: int) -> str:
    number, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{count} B" if unit == "B" else f"{number:.1f} {unit}"


def _one_line(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _printable(text: str) -> str:
    """Return the text with nothing in it that a terminal would obey: a file may come from anywhere."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _print_json(value: Any) -> None:
    print(json.dumps(_finite(value), indent=2))


def _finite(value: Any) -> Any:
    """Return the value with null for NaN and infinity, which JSON does not know."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

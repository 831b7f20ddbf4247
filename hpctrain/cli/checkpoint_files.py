"""Actions of ``hpctrain checkpoint`` on whole files: verify, diff, export, import, plot; and output that all share."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from hpctrain.checkpoint.tools import convert, curves, hugging_face, inspect
from hpctrain.checkpoint.tools.diff import Diff, TensorDifference, ValueDifference, diff
from hpctrain.checkpoint.tools.inspect import Verification, all_of, newest_of
from hpctrain.cli.main import add_action
from hpctrain.errors import EXIT_FAILURE, CheckpointError, UsageError
from hpctrain.train.metrics import finite
from hpctrain.util.plotting import KINDS
from hpctrain.util.probe import safe_path
from hpctrain.util.text import columns, format_bytes, printable, printable_lines

_VERIFY_EPILOG = """\
examples:
  hpctrain checkpoint verify runs/a      all checkpoints of the run
  hpctrain checkpoint verify runs/a/checkpoints/*.h5
  hpctrain checkpoint verify runs/*/checkpoints/*.h5 --jobs 8

exit code: 0 if all files are sound, 1 if one is damaged, 2 if one does not exist
"""
_DIFF_EPILOG = """\
examples:
  hpctrain checkpoint diff runs/a/checkpoints/step_00001200.h5 runs/b/checkpoints/step_00001200.h5
  hpctrain checkpoint diff runs/a runs/b      the newest valid checkpoint of each run
  hpctrain checkpoint diff before.h5 after.h5 --json

Compares tensors (names, shapes, dtypes, every bit), settings, values of the training loop, and versions. The origin of
a file (user, host, date) is shown, but does not count as a difference. max is the largest difference of two elements,
relative the largest share of the larger one of a pair: up to 2, and near 2 where tiny values differ in sign.

exit code: 0 if equal, 1 if different, 2 if a file is damaged or does not exist
"""
_EXPORT_EPILOG = """\
examples:
  hpctrain checkpoint export runs/a/checkpoints/step_00001200.h5 --to safetensors --model-only -o gpt.safetensors
  hpctrain checkpoint export runs/a/checkpoints/step_00001200.h5 --to torch     a dict: model, optimizer, train, config
  hpctrain checkpoint export runs/a/checkpoints/step_00001200.h5 --to npz
  hpctrain checkpoint export runs/a --to hf -o tuned      a folder for from_pretrained of Transformers
  hpctrain checkpoint export runs/a --to hf -o tuned --config llama --dtype bfloat16

--to hf needs config.json: that of --config, or of the folder from which the run started (model.factory = "hf:FOLDER").
Files of the tokenizer are copied from there. Without --model-only, tensors of safetensors and npz are named by their
path: model/head.weight, optimizer/head.weight/exp_avg. npz holds bfloat16 as float32. Only --to torch needs torch.
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
HUGGING_FACE = "hf"  # format of an export
_FOLDER_OPTIONS = ("config", "dtype", "shard_bytes")  # of that format
BIG = 256 << 20  # minimum bytes for a progress bar


def add_actions(actions: Any) -> None:
    verifying = add_action(
        actions, "verify", "check that every stored bit is as it was written", _VERIFY_EPILOG, _verify
    )
    verifying.add_argument("files", metavar="FILE", nargs="+", help="checkpoints, or folders of runs")
    verifying.add_argument("--jobs", type=int, default=1, metavar="N", help="files read at the same time (default: 1)")
    comparing = add_action(actions, "diff", "show the differences between two checkpoints", _DIFF_EPILOG, _diff)
    comparing.add_argument("first", metavar="A", help="a checkpoint, or the folder of a run")
    comparing.add_argument("second", metavar="B", help="another one")
    _add_export(actions)
    back = add_action(
        actions, "import", "convert another program's model file to a checkpoint", _IMPORT_EPILOG, _import
    )
    back.add_argument("file", metavar="FILE", help=f"a file that ends in {', '.join(convert.IMPORT_SUFFIXES)}")
    back.add_argument("-o", "--output", metavar="OUT.h5", required=True, help="the checkpoint to write")
    back.add_argument("--step", type=int, default=0, metavar="N", help="the step to record in it (default: 0)")
    back.add_argument("--strip", default="", metavar="PREFIX", help="remove this prefix from all names")
    back.add_argument("--force", action="store_true", help="replace OUT.h5")
    drawing = add_action(actions, "plot", "plot the curves of a run from its checkpoint", _PLOT_EPILOG, _plot)
    drawing.add_argument("file", metavar="FILE", help="a checkpoint, or the folder of a run")
    drawing.add_argument("-o", "--output", metavar="OUT", required=True, help=f"a picture: {', '.join(KINDS)}")


def _add_export(actions: Any) -> None:
    out = add_action(actions, "export", "convert a checkpoint to another format", _EXPORT_EPILOG, _export)
    out.add_argument("file", metavar="FILE", help="a checkpoint, or the folder of a run")
    kinds = [*convert.EXPORT_SUFFIXES, HUGGING_FACE]
    out.add_argument("--to", required=True, choices=kinds, help="the format; hf: a folder for Transformers")
    out.add_argument(
        "-o", "--output", metavar="OUT", help="the file or folder to write (default: beside FILE, with its name)"
    )
    out.add_argument("--model-only", action="store_true", help="only the model, under its own names")
    out.add_argument("--config", metavar="FOLDER", help="--to hf: a folder with config.json and a tokenizer")
    out.add_argument("--dtype", choices=hugging_face.DTYPES, help="--to hf: convert floats (default: as stored)")
    out.add_argument(
        "--shard-bytes", type=int, metavar="N", help="--to hf: largest file of weights (default: 5000000000)"
    )
    out.add_argument("--force", action="store_true", help="replace OUT")


def _verify(args: argparse.Namespace) -> int:
    for file in args.files:
        if not Path(file).exists():
            raise UsageError(f"no such file: {file}; give checkpoints, such as RUN/checkpoints/*.h5")
    if args.jobs < 1:
        raise UsageError(f"--jobs is {args.jobs}: must be at least 1")
    verdicts: list[Verification] = []
    files = [str(path) for file in args.files for path in all_of(file)]
    for verdict in verdicts_of(files, min(args.jobs, len(files))):
        verdicts.append(verdict)
        if not args.json:
            tqdm.write(_verdict_line(verdict), file=sys.stdout)
    if args.json:
        print_json([dataclasses.asdict(verdict) for verdict in verdicts])
    return 0 if all(verdict.ok for verdict in verdicts) else EXIT_FAILURE


def verdicts_of(
    files: Sequence[str], jobs: int, make_pool: Callable[..., ProcessPoolExecutor] = ProcessPoolExecutor
) -> Iterator[Verification]:
    """Yield a verdict for each file, in order."""
    if jobs == 1:
        with progress(files) as on_bytes:
            yield from (inspect.verify(file, on_bytes) for file in files)
        return
    # Processes instead of threads: HDF5 admits one thread at a time. Spawned, so that they inherit no state.
    with safe_path(), make_pool(jobs, mp_context=get_context("spawn")) as pool:
        try:
            yield from pool.map(inspect.verify, files)
        except BrokenProcessPool as error:
            raise CheckpointError("a process that verifies files was killed: use fewer --jobs") from error


def _verdict_line(verdict: Verification) -> str:
    return printable(f"ok       {verdict.file}" if verdict.ok else f"damaged  {verdict.error or verdict.file}")


def _diff(args: argparse.Namespace) -> int:
    first, second = chosen(args.first), chosen(args.second)
    with progress([first, second]) as on_bytes:
        found = diff(first, second, on_bytes)
    if args.json:
        print_json({"same": found.same, **dataclasses.asdict(found)})
    else:
        print(printable_lines("\n".join(printable(line) for line in _lines(found))))
    return 0 if found.same else EXIT_FAILURE


def _lines(found: Diff) -> list[str]:
    differing = len(found.tensors)
    one, two = found.fingerprints
    lines = [f"A  {found.first}", f"B  {found.second}", ""]
    lines += ["fingerprint  " + (f"{one}, the same" if one == two else f"A {one}  B {two}")]
    lines += [f"tensors  {found.equal} equal, {differing} different"]
    lines += columns([["", *_tensor_row(each)] for each in found.tensors])
    for title in ("settings", "values", "versions", "provenance"):
        rows: list[ValueDifference] = getattr(found, title)
        if rows:
            suffix = " (not compared)" if title == "provenance" else ""
            lines += ["", title + suffix, *columns([["", *_value_row(each)] for each in rows])]
    same_weights = not found.same and one is not None and one == two and not found.tensors
    ending = "no difference" if found.same else "different" + ", with the same weights and moments" * same_weights
    return [*lines, "", ending]


def _tensor_row(each: TensorDifference) -> list[str]:
    if each.problem != "values":
        return [each.path, f"A {each.first or 'absent'}", f"B {each.second or 'absent'}"]
    row = [each.path, f"{each.count:,} of {each.elements:,} differ"]
    if each.maximum is not None:
        row += [f"max {each.maximum:.4g}", f"relative {each.relative:.4g}"]
    return row + ([f"{each.nonfinite:,} not finite"] if each.nonfinite else [])


def _value_row(each: ValueDifference) -> list[str]:
    name = each.name if each.place in ("config", "/provenance") else f"{each.place.rstrip('/')}/{each.name}"
    sides = [one_line("absent" if side is None else side, 50) for side in (each.first, each.second)]
    return [name, f"A {sides[0]}", f"B {sides[1]}"]


# Conversion and plots -------------------------------------------------------------------------------------------------


def _export(args: argparse.Namespace) -> int:
    file = chosen(args.file)
    given = {name: value for name in _FOLDER_OPTIONS if (value := getattr(args, name)) is not None}
    if args.to == HUGGING_FACE:
        folder = Path(file).with_suffix("") if args.output is None else Path(args.output)
        with progress([file]) as on_bytes:
            count = hugging_face.export_folder(file, folder, **given, force=args.force, progress=on_bytes)
        return _written(folder, args.json, tensors=count)
    if given:
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        raise UsageError(f"{options} with --to {args.to}: only for --to {HUGGING_FACE}")
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
    length = sum(each.stat().st_size for each in path.iterdir()) if path.is_dir() else path.stat().st_size
    if as_json:
        print_json({"file": str(path), "bytes": length, **facts})
    else:
        counted = "".join(f", {count} {name}" for name, count in facts.items())
        print(printable(f"{path}  {format_bytes(length, 1)}{counted}"))
    return 0


# Output of all actions ------------------------------------------------------------------------------------------------


@contextmanager
def progress(
    files: Sequence[str | Path], big: int = BIG, stream: TextIO | None = None
) -> Iterator[Callable[[int], object] | None]:
    """Show a progress bar over the bytes to read, on a terminal and for large files only."""
    stream = stream or sys.stderr
    total = sum(Path(file).stat().st_size for file in files if Path(file).is_file())
    if total < big or not stream.isatty():
        yield None
        return
    shown = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "desc": "reading", "leave": False}
    with tqdm(total=total, file=stream, **shown) as bar:
        yield bar.update


def chosen(path: str) -> str:
    """Return a checkpoint: the path, or the newest valid one in a run folder, which is reported on stderr."""
    if not Path(path).is_dir():
        return path
    found = newest_of(path)
    print(printable(f"{path}: using its newest valid checkpoint, {found}"), file=sys.stderr)
    return str(found)


def one_line(value: Any, longest: int = 100) -> str:
    """Return a value in one line, truncated if it is too long."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= longest else text[: longest - 3] + "..."


def print_json(value: Any) -> None:
    """Print JSON, with null for NaN and infinity."""
    print(json.dumps(finite(value), indent=2))

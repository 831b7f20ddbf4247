"""Number of files that a reader opens to follow one operation: files whose functions run during it, on rank 0.

    mpiexec -n 2 python packaging/hops.py            a table
    mpiexec -n 2 python packaging/hops.py --files    with the names

Common helpers are left out: ``util``, ``log``, ``errors`` and tracing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import hpctrain

PACKAGE = Path(hpctrain.__file__).parent
_GRANTED = {"util", "log.py", "errors.py", "trace.py", "tracing.py", "trace_file.py", "plain_tensors.py"}


@contextmanager
def opened() -> Iterator[set[str]]:
    """Record the files of the package whose functions run inside the block, on any thread."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(PACKAGE)):
            parts = Path(name).relative_to(PACKAGE).parts
            if not _GRANTED.intersection(parts):
                found.add("/".join(parts))

    threading.setprofile_all_threads(note) if sys.version_info >= (3, 12) else threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def main() -> None:
    """Print one line per operation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", action="store_true", help="name the files")
    args = parser.parse_args()
    acts: dict[str, set[str]] = {}
    with hpctrain.init() as job:
        tensor = torch.ones(1000)
        with opened() as acts["the first all_reduce"]:
            job.comm.all_reduce(tensor)
        with opened() as acts["the second all_reduce"]:
            job.comm.all_reduce(tensor)
        for strategy in ("ddp", "fsdp"):
            model = job.wrap(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), strategy)
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                with opened() as acts[f"a gradient under {strategy}"]:
                    model(torch.ones(4, 64)).sum().backward()
                    optimizer.step()
                optimizer.zero_grad()
            if strategy == "ddp":
                job.strategies.pop(id(model)).detach()  # its hooks on all optimizers
        folder = job.comm.broadcast_object(tempfile.mkdtemp())
        batches = [torch.ones(4, 64) for _ in range(3)]
        with job.run(model, optimizer, batches, checkpoints=folder, split=False) as run:
            steps = iter(run)
            _, batch = next(steps)
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with opened() as step:
                _, batch = next(steps)
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.save()
            with opened() as saving:  # the save runs at the end of the step
                next(steps)
            acts["a save under fsdp"] = saving - step
        if job.rank == 0:
            for act, files in acts.items():
                print(f"{len(files):4}  {act}", *(sorted(files) if args.files else []), sep="\n      ")


if __name__ == "__main__":
    main()

"""Time and memory of ``hpctrain watch`` and ``report`` with long runs, from the start of the command to its end.

    make -C benchmarks watch

The runs have 100,000 steps each; a file of metrics has about 24 MB. The files of all runs are links to one, so that
they fit on a disk: they are as long, but are read from memory. The table is that of all runs, the detail that of one
of them with its curves. The page of ``report`` is that of one of them. Memory is the largest resident set of
``watch``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from harness.report import at_most, table, target_table
from harness.run import finish, main, make_parser
from harness.turns import interleave

from hpctrain.errors import UsageError

SECONDS, MIB, REPORT_SECONDS = 1.0, 150.0, 10.0  # at most

REPORT = "report of one run"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("watch", __doc__, rounds=7, quick=False)
    parser.add_argument("--runs", type=int, default=200, help="number of runs (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100_000, help="steps of a run (default: %(default)s)")
    return parser.parse_args(argv)


def write_runs(folder: Path, runs: int, steps: int) -> None:
    """Write the folders of running runs, each with an earlier start that has failed."""
    now = time.time()
    with open(folder / "rows", "w") as file:
        for step in range(1, steps + 1):
            row = {"step": step, "loss": 2.0 + 3.0 / step**0.3, "learning_rate": 1e-3, "grad_norm": 1.0}
            row |= {"step_seconds": 0.25, "communication_seconds": 0.03, "data_seconds": 0.01}
            row |= {
                "optimizer_seconds": 0.02,
                "forward_seconds": 0.06,
                "backward_seconds": 0.12,
                "save_seconds": 0.001,
                "tokens": 4096 * step,
                "unix_time": round(now - 0.26 * (steps - step), 3),
            }
            row |= {} if step % 500 else {"validation_loss": 2.2 + 3.0 / step**0.3}
            file.write(json.dumps(row) + "\n")
    facts = {"size": 64, "nodes": 8, "host": "n1", "pid": 1, "parallel": "fsdp", "target_step": 2 * steps}
    facts |= {"unix_time": now - 0.27 * steps, "first_step": 1, "saved_step": steps, "elapsed_seconds": 0.27 * steps}
    attempts = [{**facts, "status": "failed", "reason": "a node died"}, {**facts, "status": "running"}]
    for number in range(runs):
        run = folder / "runs" / f"sweep-{number:03}"
        run.mkdir(parents=True)
        os.link(folder / "rows", run / "metrics.jsonl")
        (run / "run.json").write_text(json.dumps({"status": "running", "attempts": attempts}))
        (run / "lock.json").write_text(json.dumps({"host": "n1", "pid": 1}))


# Not getrusage: its largest resident set is also that of this process, from which the command was forked.
PROGRAM = """
import sys
from pathlib import Path
from hpctrain.cli.main import main
code = main(sys.argv[1:])
status = Path("/proc/self/status").read_text()
print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")), file=sys.stderr)
sys.exit(code)
"""


def called(*words: str | Path) -> list[float]:
    """Return the seconds of a call of hpctrain, and its largest resident set in MiB."""
    began = time.perf_counter()
    command = [sys.executable, "-c", PROGRAM, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise UsageError(f"hpctrain {words[0]} failed:\n{done.stderr}")
    return [seconds, int(done.stderr.split()[-1]) / 1024]


def run(args: argparse.Namespace) -> None:
    names = [f"table of {args.runs} runs", "one run in detail"]
    with tempfile.TemporaryDirectory(prefix="hpctrain-watch-") as temporary:
        folder = Path(temporary)
        write_runs(folder, args.runs, args.steps)
        size = (folder / "rows").stat().st_size
        paths = [folder / "runs", folder / "runs" / "sweep-000"]
        calls = {name: ["watch", path, "--once"] for name, path in zip(names, paths)}
        calls[REPORT] = ["report", paths[1], "-o", folder / "page.html"]
        turns = {name: (lambda _, words=words: called(*words)) for name, words in calls.items()}
        measured = interleave(turns, args.rounds, what="rounds")
    seconds = {name: [each[0] for each in measured[name]] for name in (*names, REPORT)}
    memory = max(each[1] for name in names for each in measured[name])
    found = [target for name in names for target in at_most(f"seconds: {name}", _median(seconds[name]), SECONDS)]
    found += at_most(f"seconds: {REPORT}", _median(seconds[REPORT]), REPORT_SECONDS)
    found += at_most("MiB of memory of watch", memory, MIB)
    rows = [["", "median s", "min", "max"]]
    rows += [[name, *(f"{one(seconds[name]):.2f}" for one in (_median, min, max))] for name in seconds]
    content = {"runs": args.runs, "steps": args.steps, "bytes": size, "seconds": seconds, "mib": memory}
    finish(args, "watch", content, [target_table(found), table(rows)], file="watch", found=found)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    sys.exit(main(parse, run))

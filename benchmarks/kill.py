"""Kill test of a training job: it is killed at random moments, and must end with the result of an undisturbed run.

A job of two ranks, which saves every other step, is started, hit by SIGKILL (one of its ranks, its
launcher, its writer process, or all at once) and restarted, ``--kills`` times; more than half of
the kills are aimed into a save. Then it runs to its end. After every kill

* all processes of the job have ended within 10 seconds;
* every file with a checkpoint's name verifies, and no earlier checkpoint is lost: the newest is no older than before;
* the next start resumes from the newest.

In the end weights, moments, curves and RNG states equal those of an undisturbed run, bit for bit,
and the metrics contain every step once. The first violation ends the benchmark with exit code 1;
the folder is kept.

    python benchmarks/kill.py --kills 200 --form both
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from attempts import FORMS, Hit, Life, Violation
from harness import provenance, table, write
from tqdm import tqdm
from victim import RANKS, make_project


def report(hits: Iterable[Hit]) -> str:
    """Return a table: the number of kills per process and phase, and the time until the rest had ended."""
    hits = list(hits)
    phases = ("start", "resume", "step", "save")
    counts = Counter((hit.target, hit.phase) for hit in hits)
    rows = [["killed", *phases, "median s", "max s", "continued"]]
    for target in sorted({hit.target for hit in hits}):
        seconds = [hit.seconds for hit in hits if hit.target == target and hit.seconds is not None]
        times = [f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}"] if seconds else ["", ""]
        continued = sum(hit.target == target and hit.seconds is None for hit in hits)
        rows.append([target, *(str(counts[target, phase]) for phase in phases), *times, str(continued)])
    total = [str(sum(hit.phase == phase for hit in hits)) for phase in phases]
    return table([*rows, ["all of them", *total, "", "", ""]])


def play(folder: Path, form: str, kills: int, seed: int) -> tuple[list[Hit], int]:
    """Kill one run ``kills`` times, let it end and compare it; return the kills and its last step."""
    life = Life(folder, form, seed)
    with tqdm(total=kills, desc=form, unit="kill", dynamic_ncols=True) as bar:
        for _ in range(kills):
            life.be_killed()
            bar.set_postfix(step=life.newest(), saves=sum(hit.phase == "save" for hit in life.hits))
            bar.update()
    steps = life.finish()
    life.compare(steps)
    print(f"{form}: {kills} kills, then to step {steps}: bitwise equal to the undisturbed run\n{report(life.hits)}")
    return life.hits, steps


def main(argv: Sequence[str] | None = None) -> int:
    """Test the requested forms, print and write the kills; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="kills per form (default: %(default)s)")
    parser.add_argument("--form", choices=[*FORMS, "both"], default="both", help="writer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of the moments (default: random)")
    parser.add_argument("--folder", type=Path, default=None, help="working folder (default: a temporary one)")
    args = parser.parse_args(argv)
    seed = random.randrange(1 << 32) if args.seed is None else args.seed
    folder = Path(tempfile.mkdtemp(prefix="hpctrain-kill-", dir=args.folder))
    started, forms = time.monotonic(), {}
    print(f"seed {seed}, working in {folder}")
    make_project(folder)
    try:
        for form in FORMS if args.form == "both" else [args.form]:
            hits, steps = play(folder, form, args.kills, seed)
            forms[form] = {"kills": len(hits), "steps": steps, "hits": [asdict(hit) for hit in hits]}
    except Violation as violation:
        print(f"violated, seed {seed}, folder kept: {folder}\n{violation}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    facts = {**provenance(RANKS, "see command"), "command": " ".join(["python", *sys.argv])}
    content = {"seed": seed, "seconds": round(time.monotonic() - started), "forms": forms, "provenance": facts}
    print(f"written to {write('kill', content)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

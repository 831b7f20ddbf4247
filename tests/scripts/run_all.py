"""Runner of training programs, one after the other in one job, each as if in a job of its own.

    python run_all.py OUT STRATEGY HALT NAME...

Programs are called with ``--out``, ``--folder`` and ``--strategy``, and see a job as ``hpctrain.init`` returns it. With
``HALT`` above 0 each ends by an error in the update of that number, counted over its optimizers. The first rank prints
a line per program: its name, and ``done``, ``halted`` or the error.
"""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

HERE = Path(__file__).parent / "programs"


class Halted(Exception):
    """Error that ends a program in the middle."""


def main(out: str, strategy: str, halt: str, *names: str) -> int:
    """Run the programs; return the number of those that failed."""
    if strategy == "plain":
        job: Any = None
    else:
        import hpctrain
        from hpctrain.parallel.config import parallel_settings

        job = hpctrain.init()

        def again(**options: Any) -> Any:
            for one in job.strategies.values():
                one.detach()
            job.strategies.clear()
            job.parallel = parallel_settings(options.get("parallel"))
            job._evaluation = None
            return job

        hpctrain.init = again
    failed = 0
    for name in names:
        result = _run(name, Path(out), strategy, int(halt))
        failed += result not in ("done", "halted")
        if job is None or job.rank == 0:
            print("program", name, result, flush=True)
        if job is not None:
            job.comm.barrier()
    return failed


def _run(name: str, out: Path, strategy: str, halt: int) -> str:
    updates = 0

    def count(*_: Any) -> None:
        nonlocal updates
        updates += 1
        if updates == halt:
            raise Halted

    program = HERE / (f"{name}_plain.py" if strategy == "plain" else f"{name}.py")
    sys.argv = [str(program), "--out", str(out / f"{name}.{strategy}.pt")]
    if strategy != "plain":
        sys.argv += ["--folder", str(out / f"{name}.{strategy}"), "--strategy", strategy]
    handle = register_optimizer_step_post_hook(count)
    torch.manual_seed(12345)  # a program must not depend on the random state that the one before it left
    try:
        runpy.run_path(str(program), run_name="__main__")
    except Halted:
        return "halted"
    except Exception:
        traceback.print_exc()
        return "failed"
    finally:
        handle.remove()
    return "done"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

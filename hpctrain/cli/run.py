"""Verb ``hpctrain run``: runs a program that was written for torchrun, unchanged, on the ranks of mpiexec or srun."""

from __future__ import annotations

import argparse
import builtins
import importlib.util
import os
import runpy
import sys
import warnings
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hpctrain.cli.main import add_verb
from hpctrain.cluster.launcher import is_launched
from hpctrain.comm.transport.waiting import timeout_seconds
from hpctrain.errors import EXIT_FAILURE, EXIT_REQUEUE, HpctrainError, UsageError
from hpctrain.jobs.request import PROGRAM
from hpctrain.settings import unknown
from hpctrain.util.text import printable_lines

if TYPE_CHECKING:
    from hpctrain.torch_backend.world import World

EXAMPLES = """examples:
  mpiexec -n 4 hpctrain run train.py --lr 0.1          four ranks of a program for torchrun
  srun hpctrain run train.py                           as a step of a Slurm job
  mpiexec -n 4 hpctrain run -m package.train           a module, as python -m
  hpctrain run train.py                                one process
  mpiexec -n 2 hpctrain run --backend torch:gloo train.py     with torch's own gloo, to compare

hpctrain submit slurm --folder runs/a --time 04:00:00 -- run train.py submits a job.

The program finds RANK, WORLD_SIZE, LOCAL_RANK and the other variables of torchrun. init_process_group() with the
back end gloo, mpi or none communicates over MPI, without an address or a port. nccl remains torch's, also for the
GPUs beside ours for the host: cpu:gloo,cuda:nccl, or no name on a machine with GPUs. If one rank fails, the whole job
ends with its exit code.
"""
DEFAULT = "hpctrain"
TORCHRUN = (
    *("--nproc", "--nproc-per-node", "--nproc_per_node", "--nnodes", "--standalone"),
    *("--rdzv-backend", "--rdzv_backend", "--rdzv-endpoint", "--rdzv_endpoint"),
)
BACKENDS = {
    DEFAULT: "gloo, mpi and no name are served by hpctrain",
    "torch:gloo": "gloo is torch's own",
}


def add_parser(verbs: Any) -> None:
    what = "Run a program for torchrun, unchanged, on the ranks that mpiexec or srun started, or in one process."
    parser = add_verb(verbs, "run", what, EXAMPLES)
    parser.usage = "hpctrain run [-h] [--backend NAME] [-m] PROGRAM ..."
    parser.allow_abbrev = False  # argparse would reject a program's own --n and --r as ambiguous
    meaning = "; ".join(f"{name}: {text}" for name, text in BACKENDS.items())
    parser.add_argument("--backend", metavar="NAME", default=DEFAULT, help=f"{meaning} (default: %(default)s)")
    parser.add_argument("-m", "--module", action="store_true", help="PROGRAM is the name of a module")
    parser.add_argument("program", metavar="PROGRAM", help="a Python file")
    parser.add_argument(*TORCHRUN, action=_OptionOfTorchrun, nargs="?", help=argparse.SUPPRESS)
    words = parser.add_argument("words", metavar="...", nargs=argparse.REMAINDER, help="arguments of the program")
    words.required = False  # errors about a missing program do not name them


class _OptionOfTorchrun(argparse.Action):
    """Option that newcomers from torchrun type: an error that says what starts the ranks here."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Raise ``UsageError``."""
        parser.error("the launcher starts the ranks, not an option as in torchrun: mpiexec -n 4 hpctrain run train.py")


def run(args: argparse.Namespace) -> int:
    """Run the program; return its exit code."""
    check_program(args.backend, args.program, module=args.module)
    world = _join(args.backend)
    try:
        (_run_module if args.module else _run_script)(args.program, args.words)
    except SystemExit as error:
        return _leave(_exit_code(error), world)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, HpctrainError) and error.everywhere:
            raise
        return _report(error, world)
    return 0


def check_program(backend: str, program: str, *, module: bool) -> None:
    """Raise ``UsageError`` for an unknown back end, and for a program that does not exist or is none."""
    if backend not in BACKENDS:
        raise UsageError(unknown("--backend", backend, list(BACKENDS)), everywhere=True)
    if module:
        return
    if program.endswith(".toml"):
        raise UsageError(f"{program} has the settings of a run: start it by hpctrain train {program}", everywhere=True)
    if not Path(program).exists():
        raise UsageError(f"no such program: {program}; a module is started by hpctrain run -m", everywhere=True)
    if not program.endswith(PROGRAM) or not Path(program).is_file():
        what = "its name must end in .py; a module is started by hpctrain run -m"
        raise UsageError(f"{program} is not a Python file: {what}", everywhere=True)


def _join(backend: str) -> World | None:
    """Join the ranks, if a launcher has started this process, and set what the program reads.

    The ranks join before the program starts: a rank whose program fails at once must be able to end the others.
    """
    import torch

    from hpctrain.torch_backend.environment import Place, variables
    from hpctrain.torch_backend.register import register
    from hpctrain.torch_backend.requests import take_over
    from hpctrain.torch_backend.world import world

    register()
    take_over(aliases=backend == DEFAULT)
    if backend == DEFAULT:  # torch says on every rank that its own MPI ignores what Accelerate gives with the name mpi
        warnings.filterwarnings("ignore", "For MPI backend, world_size", UserWarning)
    everyone = world(timeout_seconds()) if is_launched() else None
    place = Place.alone() if everyone is None else Place.of(everyone.comm)
    for name, value in variables(place, os.environ).items():
        os.environ[name] = value
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # torch has read the variable when it was imported
    return everyone


# The program ----------------------------------------------------------------------------------------------------------


def _run_script(program: str, words: list[str]) -> None:
    """Run a file as ``python PROGRAM`` does: ``__file__`` is absolute, and ``sys.argv[0]`` as it was given."""
    _set_arguments(program, words, Path(program).resolve().parent)
    path = str(Path(program).absolute())
    loader = SourceFileLoader("__main__", path)
    main: Any = ModuleType("__main__")
    main.__file__, main.__loader__, main.__builtins__ = path, loader, builtins
    sys.modules["__main__"] = main
    exec(loader.source_to_code(loader.get_data(path), path), vars(main))


def _run_module(name: str, words: list[str]) -> None:
    """Run a module as ``python -m NAME`` does."""
    _set_arguments(name, words, Path.cwd())
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise UsageError(f"no such module: {name}; hpctrain run without -m takes a file", everywhere=True)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _set_arguments(program: str, words: list[str], folder: Path) -> None:
    """Set ``sys.argv``, and the folder of imports in place of that of the command ``hpctrain``."""
    sys.argv = [program, *words]
    if not sys.flags.safe_path:
        sys.path[0] = str(folder)


def _exit_code(error: SystemExit) -> int:
    """Return the exit code that Python would return, and print the message of an exit with one."""
    if error.code is None or isinstance(error.code, int):
        return int(error.code or 0) & 0xFF
    print(printable_lines(str(error.code)), file=sys.stderr, flush=True)
    return EXIT_FAILURE


def _leave(code: int, world: World | None) -> int:
    """Return the exit code of the program; if only this rank has failed, end the job."""
    # Ranks that have saved, and shall be started again, wait for those that still write.
    if code not in (0, EXIT_REQUEUE) and world is not None and world.size > 1 and not world.leaves_together():
        world.watchdog.end(f"the program has exited with code {code}", code)
    return code


def _report(error: BaseException, world: World | None) -> int:
    """Print an error of the program as Python does, by the program's hook if it has one, and end the job."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    kind = type(error)
    sys.excepthook(kind, error.with_traceback(trace), trace)  # the watchdog's hook ends a job of several ranks
    if world is not None and world.size > 1:
        world.watchdog.end(f"{kind.__name__}: {error}", EXIT_FAILURE)
    return error.exit_code if isinstance(error, HpctrainError) else EXIT_FAILURE

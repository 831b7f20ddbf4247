"""Check what the operations of a communicator are given."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hpctrain.errors import CommunicationError
from hpctrain.transport.base import TAGS

USER_TAGS = TAGS - 2  # the last two are those of the collectives


@dataclass(frozen=True)
class Arguments:
    """Check arguments on rank ``rank`` of ``size``; each method raises ``CommunicationError``."""

    rank: int
    size: int

    def check_root(self, root: int) -> None:
        """Refuse a root that is no rank."""
        if not 0 <= root < self.size:
            raise CommunicationError(f"rank {root} is not in 0..{self.size - 1}")

    def check_tag(self, tag: int) -> None:
        """Refuse a tag that is not for users."""
        if not 0 <= tag < USER_TAGS:
            raise CommunicationError(f"tag {tag} is not in 0..{USER_TAGS - 1}")

    def check_shares(self, share: Tensor, whole: Tensor) -> None:
        """Refuse a share that is not one of ``size`` equal ones of the whole."""
        if share.dtype != whole.dtype or share.numel() * self.size != whole.numel():
            raise CommunicationError(
                f"{whole.numel()} elements of {whole.dtype} are not {self.size} shares "
                f"of {share.numel()} elements of {share.dtype}"
            )

    def check_exchanged(self, out: Tensor, tensor: Tensor) -> None:
        """Refuse tensors of which each rank cannot give each other one an equal share."""
        if out.dtype != tensor.dtype or out.numel() != tensor.numel() or tensor.numel() % self.size:
            raise CommunicationError(
                f"all_to_all of {tensor.numel()} elements of {tensor.dtype} into {out.numel()} of {out.dtype}: "
                f"expected equal tensors that {self.size} ranks can share"
            )

    def only_on(self, root: int, whole: Tensor | None, name: str, share: Tensor) -> Tensor | None:
        """Return the tensor that only the root has to give, checked; None on the other ranks."""
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
    """Refuse a tensor into which nothing can arrive while the caller does something else."""
    if not tensor.is_contiguous():
        raise CommunicationError(f"irecv wants a contiguous tensor, not strides {tuple(tensor.stride())}; use recv")

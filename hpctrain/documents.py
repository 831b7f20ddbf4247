"""Documents within windows of tokens: the number, position and attention mask of each token.

A window of a token file may contain pieces of several documents, one after the other (sequence
packing). Each document ends with a separator token. All functions are vectorised. They work on any
device and in graphs of ``torch.compile``. Importing this module does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


def document_ids(tokens: Tensor, separator: int = 0) -> Tensor:
    """Return the number of each token's document within its row, int64, for tokens ``[..., length]``.

    Numbers begin at 0. A separator belongs to the document that it ends, so two separators in a row
    are an empty document. Raises ``UsageError`` if the tokens are not integers, or if their dtype
    cannot hold the separator.
    """
    import torch

    _check_integers("tokens", tokens)
    limits = torch.iinfo(tokens.dtype)
    if not limits.min <= separator <= limits.max:  # torch compares modulo the range of the dtype
        raise UsageError(f"separator {separator} of {tokens.dtype} tokens: allowed are {limits.min} to {limits.max}")
    ends = (tokens == separator).to(torch.int64)
    return ends.cumsum(-1) - ends


def document_positions(ids: Tensor) -> Tensor:
    """Return the position of each token within its document, int64, for document numbers ``[..., length]``.

    The first document of a row counts from the beginning of the row. Raises ``UsageError`` if the
    numbers are not integers.
    """
    import torch

    begins = _begins(ids)
    places = torch.arange(ids.shape[-1], device=ids.device)
    starts = torch.where(begins, places, 0).cummax(-1).values
    return places - starts


def document_mask(ids: Tensor) -> Tensor:
    """Return the causal mask of each row, bool ``[batch, 1, length, length]``, for numbers ``[batch, length]``.

    Element ``[row, 0, query, key]`` is true if the query may attend to the key: both have the same
    document number, and the key is not after the query. ``scaled_dot_product_attention`` takes it as
    ``attn_mask``, for any number of heads. Raises ``UsageError`` for other shapes and dtypes.
    """
    _check_integers("document numbers", ids)
    if ids.ndim != 2:
        raise UsageError(f"document numbers of shape {list(ids.shape)}: allowed is [batch, length]")
    return (ids[:, None, :, None] == ids[:, None, None, :]).tril()


def cu_seqlens(ids: Tensor) -> Tensor:
    """Return the cumulative lengths of all documents, int32 ``[documents + 1]``, for numbers ``[..., length]``.

    Rows are joined in order, as by ``flatten()``; a document ends at the end of its row. Kernels for
    sequences of variable length take the result (``cu_seqlens`` of FlashAttention, ``cu_seq_q`` of
    ``torch.nn.attention.varlen``). Its length depends on the values, so it synchronises a GPU. Raises
    ``UsageError`` if the numbers are not integers.
    """
    import torch

    starts = _begins(ids).flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_full((1,), ids.numel())]).to(torch.int32)


def _begins(ids: Tensor) -> Tensor:
    """Return whether a document begins at each token; one begins with every row."""
    import torch

    _check_integers("document numbers", ids)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[..., 1:] = ids[..., 1:] != ids[..., :-1]
    return begins


def _check_integers(what: str, values: Tensor) -> None:
    import torch

    if values.ndim < 1 or values.is_floating_point() or values.is_complex() or values.dtype is torch.bool:
        raise UsageError(f"{what} are {values.dtype} with {values.ndim} dims: allowed are integers with 1 or more dims")

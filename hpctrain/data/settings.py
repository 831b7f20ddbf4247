"""Settings for the data that a run reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hpctrain.errors import SettingsError
from hpctrain.settings import check as check_fields

if TYPE_CHECKING:
    from hpctrain.data.dataset import FileDataset


@dataclass(frozen=True)
class DataSettings:
    """The data files and their format."""

    # HDF5 files with a train and a validation split each; several are concatenated in this order
    files: tuple[str, ...] = ()

    # tokens: written by `hpctrain data pack`; arrays: /train/inputs and /train/targets, images or vectors
    format: Literal["tokens", "arrays"] = "tokens"

    # samples of the validation split used by an evaluation, spread evenly over it; 0 for all
    validation_samples: int = 256

    # keep attention within documents, and restart positions with each document of a window (tokens only)
    document_masks: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "data")
        if self.validation_samples < 0:
            raise SettingsError(f"data.validation_samples = {self.validation_samples}: allowed is 0 (all) or more")
        if self.document_masks and self.format != "tokens":
            raise SettingsError(
                f"data.document_masks = true with data.format = {self.format!r}: only token files have documents; "
                "remove one of the two"
            )


def open_dataset(settings: DataSettings, split: str, context: int | None = None) -> FileDataset:
    """Open a split of the configured files; token files are divided into windows of ``context`` tokens.

    With ``document_masks``, the dataset's ``facts`` contain the separator, for the model.
    """
    from hpctrain.data.dataset import ArrayDataset, JoinedDataset, TokenDataset

    if not settings.files:
        raise SettingsError("data.files is empty: name at least one file, such as hpctrain data pack writes")
    parts: list[FileDataset]
    if settings.format == "arrays":
        parts = [ArrayDataset(path, split) for path in settings.files]
    elif context is None:
        raise SettingsError("token files need a window length: set model.context")
    else:
        parts = [TokenDataset(path, split, context, documents=settings.document_masks) for path in settings.files]
    return parts[0] if len(parts) == 1 else JoinedDataset(parts)

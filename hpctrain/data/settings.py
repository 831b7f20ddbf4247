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

    # HDF5 files with a train and a validation split each, or wildcards such as "parts/*.h5"; concatenated in this order
    files: tuple[str, ...] = ()

    # tokens: written by `hpctrain data pack`; arrays: /train/inputs and /train/targets, images or vectors;
    # ragged: samples of different sizes, whose inputs are padded with zeros to the longest one
    format: Literal["tokens", "arrays", "ragged"] = "tokens"

    # samples of the validation split used by an evaluation, spread evenly over it; 0 for all
    validation_samples: int = 256

    # keep attention within documents, and restart positions with each document of a window (tokens only)
    document_masks: bool = False

    # fields of ragged files that are the inputs of the model and the targets of the loss
    inputs: str = "inputs"
    targets: str = "targets"

    # memory: each node reads a part of the data once, and samples travel between the nodes; none: files are mapped
    cache: Literal["none", "memory"] = "none"

    # batches that a thread reads ahead while the model computes; 0: each is read when it is needed
    prefetch: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "data")
        if self.validation_samples < 0:
            raise SettingsError(f"data.validation_samples = {self.validation_samples}: allowed is 0 (all) or more")
        if self.prefetch < 0:
            raise SettingsError(f"data.prefetch = {self.prefetch}: allowed is 0 (none) or more")
        if self.cache == "memory" and (self.format == "ragged" or self.prefetch):
            other = 'format = "ragged"' if self.format == "ragged" else f"prefetch = {self.prefetch}"
            raise SettingsError(f'data.cache = "memory" with data.{other}: not supported together; set one of them')
        if self.document_masks and self.format != "tokens":
            raise SettingsError(
                f"data.document_masks = true with data.format = {self.format!r}: only token files have documents; "
                "remove one of the two"
            )


TOGETHER = ("ddp", "zero1", "zero2", "fsdp")  # values of parallel.data with which all ranks read every batch


def check_cache(cache: str, on_failure: str, data: str) -> None:
    """Raise ``SettingsError`` if data in the memory of all nodes do not fit the run: all ranks fetch them together."""
    if cache != "memory" or data in TOGETHER and on_failure != "shrink":
        return
    other = 'run.on_failure = "shrink"' if data in TOGETHER else f'parallel.data = "{data}"'
    raise SettingsError(
        f'setting data.cache = "memory" with {other}: not possible, because all ranks fetch their samples together; '
        'allowed is data.cache = "none"',
        everywhere=True,
    )


def data_files(settings: DataSettings) -> list[str]:
    """Return the files of the settings, with wildcards expanded. Raises an error if there are none."""
    if not settings.files:
        raise SettingsError("data.files is empty: name at least one file, such as hpctrain data pack writes")
    from hpctrain.data.shards.files import find_files

    return [path for given in settings.files for path in (find_files(given) if _is_pattern(given) else [given])]


def open_dataset(settings: DataSettings, split: str, context: int | None = None) -> FileDataset:
    """Open a split of the configured files; token files are divided into windows of ``context`` tokens.

    With ``document_masks``, the dataset's ``facts`` contain the separator, for the model.
    """
    from hpctrain.data.dataset import ArrayDataset, JoinedDataset, TokenDataset

    files = data_files(settings)
    parts: list[FileDataset]
    if settings.format == "ragged":
        from hpctrain.data.ragged.pairs import RaggedPairs

        return RaggedPairs(files, split, settings.inputs, settings.targets)
    if settings.format == "arrays":
        parts = [ArrayDataset(path, split) for path in files]
    elif context is None:
        raise SettingsError("token files need a window length: set model.context")
    else:
        parts = [TokenDataset(path, split, context, documents=settings.document_masks) for path in files]
    return parts[0] if len(parts) == 1 else JoinedDataset(parts)


def _is_pattern(path: str) -> bool:
    return any(character in path for character in "*?[{")

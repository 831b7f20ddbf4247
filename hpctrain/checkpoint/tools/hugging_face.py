"""Export of a checkpoint's model to a folder that ``from_pretrained`` of Transformers reads; without torch.

The folder has ``config.json``, the weights as safetensors, one file or several with an index, and the
tokenizer's files of the folder from which the run started. Tensors are copied in pieces and checked
as they are read. The folder gets its name when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.layout import STORAGE, Array, Record, keys_in
from hpctrain.checkpoint.format.reader import Reader
from hpctrain.checkpoint.tools import safetensors
from hpctrain.checkpoint.tools.curves import widened
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.util import atomic
from hpctrain.util.reading import parse_json, read_bytes, read_json, reason

CONFIG = "config.json"
# Keys of a checkpoint's provenance: the folder from which its model came, and the text of config.json there.
ORIGIN, ORIGIN_CONFIG = "pretrained", "pretrained_config"
SHARD_BYTES = 5_000_000_000  # largest file of weights, as save_pretrained of Transformers had it for years
DTYPES = ("float32", "bfloat16", "float16")
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "generation_config.json",
)
_LARGEST_COPY = 256 << 20  # bytes of a tokenizer's file
_HEAD = "lm_head.weight"

Progress = Callable[[int], object]


def origin(folder: str | None) -> dict[str, str]:
    """Return what a checkpoint records of the folder of its model; empty without one. Raises ``UsageError``."""
    if folder is None:
        return {}
    path = Path(folder) / CONFIG
    try:
        return {ORIGIN: os.path.abspath(folder), ORIGIN_CONFIG: json.dumps(read_json(path))}
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {reason(error)}") from error


# Entries of config.json that decide the names and shapes of weights, as far as models share them.
_OF_MODEL = (
    *("model_type", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "vocab_size", "intermediate_size"),
    *("n_inner", "num_attention_heads", "num_key_value_heads", "head_dim", "n_head"),
)


def export_folder(
    file: str | Path,
    output: str | Path,
    *,
    config: str | Path | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    force: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write the folder ``output`` and return the number of its tensors.

    ``config`` is a folder with ``config.json``; by default it is the one from which the run started
    (``model.factory = "hf:FOLDER"``). ``dtype`` converts the floats. With ``force``, an earlier export is
    replaced. Raises ``UsageError`` if the output exists, or if no config is known, ``CheckpointError`` if
    the checkpoint is damaged or the output cannot be written. After an error no partial output is left.
    """
    target = Path(output)
    _check(target, dtype, shard_bytes, force=force)
    with Reader(file) as reader:
        records = _model_of(reader)
        text, source = _config_of(reader, config)
        records = _without_tied_head(records, text)
        private = atomic.private_name(target)
        try:
            os.mkdir(private)
            _write_weights(reader, records, private, dtype, shard_bytes, progress)
            atomic.write_text(private / CONFIG, json.dumps(_with_dtype(text, records, dtype), indent=2) + "\n")
            _copy_tokenizer(source, private)
            earlier = atomic.put_folder(private, target)
            if earlier is not None:
                shutil.rmtree(earlier, ignore_errors=True)
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"cannot write {target}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(private, ignore_errors=True)
    return len(records)


def _check(target: Path, dtype: str | None, shard_bytes: int, *, force: bool) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype = {dtype!r}: allowed are {', '.join(DTYPES)}")
    if shard_bytes < 1:
        raise UsageError(f"shard_bytes = {shard_bytes}: must be at least 1")
    if not target.name:
        raise UsageError("the name of the output is empty: give the folder to write")
    if not os.path.lexists(target):
        return
    if not force:
        raise UsageError(f"{target} exists: choose another name, or --force to replace it")
    if target.is_symlink() or not target.is_dir() or not _is_export(target):
        raise UsageError(f"{target} is no folder that an export wrote: --force replaces nothing else")


def _is_export(folder: Path) -> bool:
    """Return whether a folder has only files that an export writes, so that replacing it loses nothing else."""
    names = {entry.name for entry in os.scandir(folder)}
    weights = {name for name in names if name.startswith("model") and ".safetensors" in name}
    return names <= {CONFIG, *TOKENIZER, *weights}


def _model_of(reader: Reader) -> dict[str, Record]:
    """Return the tensors of a file's only model."""
    if reader.values(layout.MODEL).get(layout.FROZEN) is not None:
        raise UsageError(
            f"{reader.path} holds only trained parameters, no whole model: export these with --to safetensors "
            "--model-only, or save with only = 'all'"
        )
    keys = keys_in(reader, layout.MODEL)
    found = reader.below(layout.MODEL)
    if keys != [""] or not found:
        raise UsageError(f"{reader.path} holds {len(keys) if found else 0} models: --to hf is for a file with one")
    return found


def _config_of(reader: Reader, folder: str | Path | None) -> tuple[dict[str, Any], Path | None]:
    """Return the config of the model, and the folder that may have a tokenizer."""
    recorded = reader.values(layout.PROVENANCE)
    if folder is None and ORIGIN_CONFIG not in recorded:
        raise UsageError(f"{reader.path} does not record a {CONFIG}: give --config FOLDER, a folder that has it")
    source = Path(folder) if folder is not None else Path(str(recorded[ORIGIN]))
    where = f"{source / CONFIG}" if folder is not None else f"the {CONFIG} that {reader.path} records"
    try:
        found = read_json(source / CONFIG) if folder is not None else parse_json(str(recorded[ORIGIN_CONFIG]))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {where}: {reason(error)}") from error
    if not isinstance(found, dict):
        raise UsageError(f"cannot read {where}: expected an object of settings")
    if folder is not None and ORIGIN_CONFIG in recorded:
        _check_same_model(found, parse_json(str(recorded[ORIGIN_CONFIG])), f"--config {folder}")
    return found, source


def _check_same_model(given: Mapping[str, Any], recorded: Mapping[str, Any], what: str) -> None:
    """Raise ``UsageError`` if a config is for another model than the one from which the run started."""
    other = [name for name in _OF_MODEL if name in recorded and given.get(name, recorded[name]) != recorded[name]]
    if other:
        told = ", ".join(f"{name} = {given[name]!r}, not {recorded[name]!r}" for name in other[:4])
        raise UsageError(f"{what} is for another model than that of the run: {told}; leave --config out")


def _without_tied_head(records: dict[str, Record], config: Mapping[str, Any]) -> dict[str, Record]:
    """Return the tensors without the second name of tied embeddings, as Transformers itself writes them."""
    head = records.get(_HEAD)
    if head is None or config.get("tie_word_embeddings") is not True:
        return records
    same = [(one.shape, one.dtype, one.crc32) for name, one in records.items() if name != _HEAD]
    tied = (head.shape, head.dtype, head.crc32) in same
    return {name: one for name, one in records.items() if name != _HEAD or not tied}


def _with_dtype(config: Mapping[str, Any], records: Mapping[str, Record], dtype: str | None) -> dict[str, Any]:
    """Return the config with the dtype of the weights, in which ``from_pretrained`` loads them."""
    kinds = {record.dtype for record in records.values() if _is_floating(record.dtype)}
    chosen = dtype or ("float32" if len(kinds) != 1 else next(iter(kinds)))
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]  # which all versions read
    return {**config, **{key: chosen for key in keys}}


def _write_weights(
    reader: Reader,
    records: Mapping[str, Record],
    folder: Path,
    dtype: str | None,
    shard_bytes: int,
    progress: Progress | None,
) -> None:
    stored = {name: dtype if dtype and _is_floating(record.dtype) else record.dtype for name, record in records.items()}
    sizes = {name: int(np.prod(record.shape)) * STORAGE[stored[name]].itemsize for name, record in records.items()}
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if files[-1] and filled + size > shard_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    places: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        several = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        file = "model.safetensors" if len(files) == 1 else several
        ordered = sorted(names, key=lambda name: -STORAGE[stored[name]].itemsize)  # aligned for mapping
        described = [(name, records[name].shape, stored[name]) for name in ordered]
        data = (_pieces(reader, records[name], stored[name], progress) for name in ordered)
        with atomic.replacing(folder / file) as out:
            safetensors.write(out, described, data, {"format": "pt"})
        places |= {name: file for name in names}
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(places.items()))}
        atomic.write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")


def _is_floating(dtype: str) -> bool:
    return "float" in dtype


def _pieces(reader: Reader, record: Record, dtype: str, progress: Progress | None) -> Iterator[Array]:
    for piece in reader.pieces(record.path):
        yield converted(piece, record.dtype, dtype)
        if progress:
            progress(piece.nbytes)


def converted(piece: Array, before: str, dtype: str) -> Array:
    """Return stored floats in another torch dtype, rounded to the nearest as torch rounds."""
    if before == dtype:
        return piece
    numbers: Any = widened(piece) if before == "bfloat16" else piece
    with np.errstate(over="ignore"):
        if dtype != "bfloat16":
            return numbers.astype(STORAGE[dtype])  # type: ignore[no-any-return]
        single = numbers.astype("<f4")
    bits = single.view("<u4")
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype("<u4")) >> 16).astype("<u2")
    return np.where(np.isnan(single), np.uint16(0x7FC0), rounded).astype("<u2")


def _copy_tokenizer(source: Path | None, folder: Path) -> None:
    for name in TOKENIZER if source is not None and source.is_dir() else ():
        path = Path(str(source)) / name
        if path.is_file():
            with atomic.replacing(folder / name) as out:
                out.write(read_bytes(path, _LARGEST_COPY))

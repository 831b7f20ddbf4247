"""Documents within windows: numbers, positions, masks and lengths as in plain loops, and separators of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

from hpctrain.data import (
    DataSettings,
    TokenDataset,
    cu_seqlens,
    document_ids,
    document_mask,
    document_positions,
    open_dataset,
)
from hpctrain.data.describe import describe
from hpctrain.data.pack import pack
from hpctrain.errors import DataError, SettingsError, UsageError

WINDOWS = {
    "the middle of one document": [5, 6, 7, 8],
    "two documents": [5, 6, 0, 7],
    "a separator at the end": [5, 6, 7, 0],
    "a separator at the beginning": [0, 5, 6, 7],
    "an empty document": [5, 0, 0, 7],
    "separators only": [0, 0, 0, 0],
}


def _documents(row: list[int], separator: int = 0) -> list[list[int]]:
    """Return the places of the tokens of each document of a window, by a plain loop."""
    found: list[list[int]] = []
    begins = True
    for place, token in enumerate(row):
        if begins:
            found.append([])
        found[-1].append(place)
        begins = token == separator
    return found


def _random(rows: int = 5, length: int = 23, separator: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 9, (rows, length), generator=generator)
    tokens[torch.rand(rows, length, generator=generator) < 0.3] = separator
    return tokens.to(dtype)


def _check(tokens: Tensor, separator: int = 0) -> None:
    ids = document_ids(tokens, separator)
    positions, mask, lengths = document_positions(ids), document_mask(ids), []
    assert ids.dtype is positions.dtype is torch.int64 and mask.dtype is torch.bool
    length = tokens.shape[1]
    assert ids.shape == positions.shape == tokens.shape and mask.shape == (len(tokens), 1, length, length)
    for row, values in enumerate(tokens.tolist()):
        expected = np.zeros((length, length), bool)
        documents = _documents(values, separator)
        for number, places in enumerate(documents):
            for position, query in enumerate(places):
                assert (int(ids[row, query]), int(positions[row, query])) == (number, position)
                expected[query, places[: position + 1]] = True
        assert np.array_equal(mask[row, 0].numpy(), expected)
        lengths += list(map(len, documents))
    found = cu_seqlens(ids)
    assert found.dtype is torch.int32 and found.tolist() == np.cumsum([0, *lengths]).tolist()


@pytest.mark.parametrize("row", WINDOWS.values(), ids=WINDOWS.keys())
def test_functions_equal_plain_loops(row: list[int]) -> None:
    _check(torch.tensor([row]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("separator", [0, 7])
def test_functions_equal_plain_loops_for_several_rows(dtype: torch.dtype, separator: int) -> None:
    _check(_random(separator=separator, dtype=dtype), separator)


@pytest.mark.parametrize("function", [document_ids, document_positions, document_mask, cu_seqlens])
def test_functions_are_compiled_into_one_graph(function: Any) -> None:
    given = document_ids(_random())
    compiled: Any = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(given), function(given))
    torch.compiler.reset()


def test_numbers_need_not_ascend() -> None:
    ids = torch.tensor([[4, 4, 1, 9, 9, 9]])
    assert document_positions(ids).tolist() == [[0, 1, 0, 0, 1, 2]]
    assert cu_seqlens(ids).tolist() == [0, 2, 3, 6] and cu_seqlens(ids[0]).tolist() == [0, 2, 3, 6]


def test_wrong_tensors_are_refused() -> None:
    for function in (document_ids, document_positions, document_mask, cu_seqlens):
        for wrong in (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool), torch.tensor(3)):
            with pytest.raises(UsageError, match="allowed are integers with 1 or more dims"):
                function(wrong)
    for separator in (-1, 256, 300):
        with pytest.raises(UsageError, match=f"separator {separator} of torch.uint8 tokens: allowed are 0 to 255"):
            document_ids(torch.tensor([44, 0], dtype=torch.uint8), separator)
    with pytest.raises(UsageError, match=r"document numbers of shape \[3\]: allowed is \[batch, length\]"):
        document_mask(torch.tensor([0, 0, 1]))


# Separators of token files --------------------------------------------------------------------------------------------


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / f"texts/{number}.txt").write_text(f"{number:05d}" * (1 + number % 5))
    return pack([tmp_path / "texts"], tmp_path / "corpus.h5", progress=False).path


def _opened(path: Path) -> dict[str, Any]:
    return dict(open_dataset(DataSettings(files=(str(path),), document_masks=True), "train", 16).facts)


def test_the_facts_of_a_dataset_contain_the_separator_with_masks_only(token_file: Path) -> None:
    assert _opened(token_file) == {"vocab_size": 256, "separator": 0}
    assert open_dataset(DataSettings(files=(str(token_file),)), "train", 16).facts == {"vocab_size": 256}
    assert describe(token_file)["separator"] == 0


def test_documents_of_a_window_are_those_of_the_file(token_file: Path) -> None:
    dataset = TokenDataset(token_file, "train", 16, documents=True)
    with h5py.File(token_file) as file:
        offsets = file["train/offsets"][()]
    inputs, _ = dataset.batch(np.arange(len(dataset)))
    places = np.arange(inputs.numel())
    starts = offsets[np.searchsorted(offsets, places, side="right") - 1]
    expected = places - np.maximum(starts, places // 16 * 16)  # a window may begin within a document
    assert document_positions(document_ids(inputs)).flatten().tolist() == expected.tolist()


def test_a_file_of_an_earlier_version_has_the_separator_of_its_tokenizer(token_file: Path) -> None:
    with h5py.File(token_file, "r+") as file:
        del file.attrs["separator"]
    assert _opened(token_file)["separator"] == 0


def test_a_file_may_define_another_separator(token_file: Path) -> None:
    with h5py.File(token_file, "r+") as file:
        file.attrs["separator"], file.attrs["tokenizer"] = 200, "words"
        for split in ("train", "validation"):
            tokens = file[split]["tokens"]
            tokens[...] = np.where(tokens[()] == 0, 200, tokens[()])
    assert _opened(token_file)["separator"] == 200


def _without_separator(file: h5py.File) -> None:
    file.attrs["tokenizer"] = "words"
    del file.attrs["separator"]


def _beyond(file: h5py.File) -> None:
    file.attrs["separator"] = 256


def _text(file: h5py.File) -> None:
    file.attrs["separator"] = "end"


def _another(file: h5py.File) -> None:
    file.attrs["separator"] = 7


def _float_offsets(file: h5py.File) -> None:
    del file["train/offsets"]
    file["train/offsets"] = np.zeros(3)


def _far_offsets(file: h5py.File) -> None:
    file["train/offsets"][-1] = 1 << 40


@pytest.mark.parametrize(
    "change, said",
    [
        (_without_separator, "has no attribute separator, and its tokenizer is 'words'"),
        (_beyond, "declares separator 256, allowed are 0 to 255"),
        (_text, "declares separator 'end', allowed are 0 to 255"),
        (_another, "ends with the token 0, not with the separator 7"),
        (_float_offsets, "/train/offsets is float64 with 1 dims"),
        (_far_offsets, "/train/offsets are beyond the"),
    ],
)
def test_files_without_a_valid_separator_are_refused_with_masks_only(token_file: Path, change: Any, said: str) -> None:
    with h5py.File(token_file, "r+") as file:
        change(file)
    with pytest.raises(DataError, match=said) as found:
        _opened(token_file)
    assert found.value.exit_code == 2
    open_dataset(DataSettings(files=(str(token_file),)), "train", 16)


def test_files_with_different_separators_are_not_joined(token_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.h5"
    with h5py.File(token_file) as old, h5py.File(other, "w") as file:
        file.attrs.update({**old.attrs, "separator": 200})
        for split in ("train", "validation"):
            file[f"{split}/tokens"] = np.where(old[split]["tokens"][()] == 0, 200, old[split]["tokens"][()]).astype(
                "u1"
            )
    files = (str(token_file), str(other))
    open_dataset(DataSettings(files=files), "train", 16)
    with pytest.raises(DataError, match="'separator': 0.*'separator': 200"):
        open_dataset(DataSettings(files=files, document_masks=True), "train", 16)


def test_arrays_have_no_documents() -> None:
    with pytest.raises(SettingsError, match="only token files have documents"):
        DataSettings(format="arrays", document_masks=True)

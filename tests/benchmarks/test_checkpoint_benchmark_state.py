"""State that the checkpoint benchmark saves, and plain writes and reads, the reference of all other measurements."""

from __future__ import annotations

import os
from pathlib import Path

import checkpoint_state
import pytest
import torch
from checkpoint_state import LEAST, MOMENTS, difference, make_state, shape_of

from hpctrain.errors import UsageError

MIB = 2**20


@pytest.mark.parametrize("nbytes", [MIB, 3 * MIB, 16 * MIB, 64 * MIB, 512 * MIB, 8192 * MIB])
def test_parameters_and_moments_take_the_requested_bytes(nbytes: int) -> None:
    shape = shape_of(nbytes)
    short = nbytes - 12 * shape.parameters
    assert 0 <= short < 12 * (2 * shape.width + 1)  # one more token would exceed the size
    assert shape.vocab_size >= 1 and shape.width == 64 * shape.layers


def test_too_small_a_size_is_refused() -> None:
    with pytest.raises(UsageError, match=f"of {LEAST - 1} bytes is too small to measure: at least {LEAST}"):
        shape_of(LEAST - 1)


def test_a_state_has_everything_in_float32_and_its_moments_are_not_zero() -> None:
    state = make_state(MIB)
    assert state.nbytes == 12 * state.model.config.parameters
    names = [name for name, _ in state.tensors()]
    assert len(set(names)) == len(names) == 3 * len(list(state.model.parameters()))
    assert {name.rpartition("/")[2] for name in names if name.startswith("optimizer/")} == set(MOMENTS)
    assert all(tensor.dtype == torch.float32 and bool(tensor.any()) for _, tensor in state.tensors())


def test_only_equal_seeds_make_equal_values() -> None:
    assert difference(make_state(MIB).tensors(), make_state(MIB).tensors()) == ""
    other = difference(make_state(MIB, seed=1).tensors(), make_state(MIB).tensors())
    assert other == "model/embedding.token.weight is not what was saved"


def test_one_wrong_value_is_named() -> None:
    state, other = make_state(MIB), make_state(MIB)
    name, tensor = state.tensors()[-1]
    tensor.view(-1)[-1] += 1e-6
    assert difference(state.tensors(), other.tensors()) == f"{name} is not what was saved"


def test_overwritten_values_are_restored_through_state_dicts() -> None:
    state, target = make_state(MIB), make_state(MIB, seed=1)
    target.spoil()
    assert all(bool((tensor == -1).all()) for _, tensor in target.tensors())
    target.take(state.dicts())
    assert difference(target.tensors(), state.tensors()) == ""


# Plain files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 15, 16, 17, 100])
def test_written_bytes_are_read_back_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(checkpoint_state, "PIECE", 16)
    data, path = os.urandom(nbytes), tmp_path / "file"
    checkpoint_state.write_at(path, memoryview(data))
    assert path.read_bytes() == data
    found = bytearray(nbytes)
    checkpoint_state.read_at(path, memoryview(found))
    assert found == data


def test_two_ranks_write_their_shares_of_one_file(tmp_path: Path) -> None:
    path, found = tmp_path / "file", bytearray(4)
    checkpoint_state.write_at(path, memoryview(b"5678"), 4)
    checkpoint_state.write_at(path, memoryview(b"1234"), 0)
    assert path.read_bytes() == b"12345678"
    checkpoint_state.read_at(path, memoryview(found), 2)
    assert found == b"3456"


def test_a_write_ends_after_the_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (real(handle), flushed.append(os.fstat(handle).st_size)))
    checkpoint_state.write_at(tmp_path / "file", memoryview(b"1234"))
    checkpoint_state.flush(tmp_path / "file")
    assert flushed == [4, 4]


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"123")
    with pytest.raises(EOFError, match="ends 2 bytes too early"):
        checkpoint_state.read_at(path, memoryview(bytearray(5)))


def test_files_and_folders_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "deep" / "file").write_bytes(b"123")
    checkpoint_state.delete(tmp_path / "folder")
    checkpoint_state.delete(tmp_path / "folder")
    assert not list(tmp_path.iterdir())


def test_the_filesystem_has_a_name() -> None:
    assert checkpoint_state.filesystem_of(Path("/proc")) == "proc"
    assert checkpoint_state.filesystem_of(Path(__file__).parent) not in ("", "proc", "unknown")

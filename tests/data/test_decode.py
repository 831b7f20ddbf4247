"""Decoding by extension: values, arrays and images as the libraries that wrote them, and errors of damaged contents."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpctrain.data.shards.decode import decode, decode_tensors
from hpctrain.errors import DataError, UsageError

Image = pytest.importorskip("PIL.Image")
CHANCE = np.random.default_rng(0)
WHERE = "a.tar: member 7 at offset 512"


def saved(function: Any, *values: Any, **named: Any) -> bytes:
    file = io.BytesIO()
    function(file, *values, **named)
    return file.getvalue()


def picture(mode: str = "RGB", height: int = 7, width: int = 11) -> Any:
    shape = (height, width, 3) if mode == "RGB" else (height, width, 4) if mode in ("RGBA", "CMYK") else (height, width)
    return Image.fromarray(CHANCE.integers(0, 256, shape, np.uint8), mode=mode)


@pytest.mark.parametrize(
    "extension, data, value",
    [
        ("cls", b"3", 3),
        ("CLS", b" -12\n", -12),
        ("id", b"007", 7),
        ("index", b"1" * 40, int("1" * 40)),
        ("count", b"+4", 4),
        ("txt", "süß\n".encode(), "süß\n"),
        ("transcript", b"", ""),
        ("json", b'{"a": [1, null, 2.5]}', {"a": [1, None, 2.5]}),
        ("meta.json", b"[]", []),
        ("bin", b"\x00\x01", b"\x00\x01"),
        ("mp4", b"", b""),
        ("gz", b"\x1f\x8b", b"\x1f\x8b"),
    ],
)
def test_plain_values(extension: str, data: bytes, value: Any) -> None:
    for function in (decode, decode_tensors):
        found = function(extension, data, WHERE)
        assert found == value and type(found) is type(value)


@pytest.mark.parametrize("dtype", ["u1", "<i2", ">i4", "<u8", "f2", ">f8", "?", "c8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_is_the_saved_array(dtype: str, order: Any) -> None:
    array = np.asarray(CHANCE.integers(0, 2, (3, 4, 2)), dtype, order=order)
    found = decode("npy", saved(np.save, array), WHERE)
    assert found.dtype == array.dtype and np.array_equal(found, array)
    tensor = decode_tensors("npy", saved(np.save, array), WHERE)
    assert tensor.numpy().dtype == array.dtype.newbyteorder("=") and np.array_equal(tensor.numpy(), array)
    tensor[0] = tensor[1]  # it can be changed
    assert torch.equal(tensor[0], tensor[1])


def test_archives_of_arrays_are_dicts() -> None:
    arrays = {"x": CHANCE.normal(size=(2, 3)), "y": np.arange(4)}
    for extension, data in (
        ("npz", saved(np.savez, **arrays)),
        ("npz", saved(np.savez_compressed, **arrays)),
        ("pt", saved(lambda file: torch.save({name: torch.from_numpy(each) for name, each in arrays.items()}, file))),
    ):
        plain, tensors = decode(extension, data, WHERE), decode_tensors(extension, data, WHERE)
        assert list(plain) == list(tensors) == ["x", "y"]
        for name, array in arrays.items():
            assert isinstance(plain[name], np.ndarray) and np.array_equal(plain[name], array)
            assert isinstance(tensors[name], torch.Tensor) and np.array_equal(tensors[name].numpy(), array)


def test_safetensors_are_read_by_their_package() -> None:
    package = pytest.importorskip("safetensors.torch")
    data = package.save({"x": torch.arange(3.0), "y": torch.ones(2, dtype=torch.bfloat16)})
    found = decode_tensors("safetensors", data, WHERE)
    assert found["x"].tolist() == [0, 1, 2] and found["y"].dtype is torch.bfloat16
    data = package.save({"x": torch.arange(3)})
    assert decode("safetensors", data, WHERE)["x"].tolist() == [0, 1, 2]


def test_bfloat16_is_refused_as_an_array_and_kept_as_a_tensor() -> None:
    data = saved(lambda file: torch.save([torch.ones(2, dtype=torch.bfloat16)], file))
    assert decode_tensors("pth", data, WHERE)[0].dtype is torch.bfloat16
    with pytest.raises(DataError, match="a.tar: member 7 at offset 512: cannot decode .pth"):
        decode("pth", data, WHERE)


# Images ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extension, kind", [("png", "PNG"), ("bmp", "BMP"), ("ppm", "PPM"), ("tif", "TIFF")])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_images_are_their_pixels(extension: str, kind: str, mode: str) -> None:
    image = picture(mode)
    found = decode(extension, saved(image.save, kind), WHERE)
    assert found.dtype == np.uint8 and np.array_equal(found, np.asarray(image))
    assert found.shape == ((7, 11, 3) if mode == "RGB" else (7, 11))
    tensor = decode_tensors(extension, saved(image.save, kind), WHERE)
    assert tensor.dtype is torch.uint8 and np.array_equal(tensor.numpy(), found)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
@pytest.mark.parametrize("extension", ["jpg", "JPEG", "webp", "png"])
def test_the_contents_decide_about_the_decoder(extension: str, kind: str) -> None:
    data = saved(picture("RGB", 32, 48).save, kind)
    found = decode(extension, data, WHERE)
    assert found.shape == (32, 48, 3) and np.array_equal(found, np.asarray(Image.open(io.BytesIO(data))))


def test_other_modes_become_channels_of_8_bits() -> None:
    grey = CHANCE.integers(0, 2, (5, 9), np.uint8) * 255
    assert np.array_equal(decode("png", saved(Image.fromarray(grey).convert("1").save, "PNG"), WHERE), grey)
    palette = picture("RGB").quantize(16)
    assert np.array_equal(decode("png", saved(palette.save, "PNG"), WHERE), np.asarray(palette.convert("RGB")))
    data = saved(palette.save, "PNG", transparency=3)
    assert np.array_equal(decode("png", data, WHERE), np.asarray(Image.open(io.BytesIO(data)).convert("RGBA")))
    data = saved(picture("CMYK", 16, 16).save, "JPEG")
    assert np.array_equal(decode("jpg", data, WHERE), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    assert decode("png", saved(picture("RGBA").save, "PNG"), WHERE).shape == (7, 11, 4)


def test_images_of_16_bits_are_refused() -> None:
    data = saved(Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save, "PNG")
    with pytest.raises(DataError, match="mode I;16 of Pillow has no 8 bits per channel; allowed are L, "):
        decode("png", data, WHERE)


# Errors ---------------------------------------------------------------------------------------------------------------


class Trap:
    """Object whose pickle creates a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_no_code_of_the_contents_is_executed(tmp_path: Path) -> None:
    trap = Trap(tmp_path / "executed")
    array = np.empty(1, object)
    array[0] = trap
    for extension, data in (
        *((name, pickle.dumps(trap)) for name in ("pkl", "pickle", "pyd", "x.pkl", "pt", "npy", "npz", "jpg")),
        ("npy", saved(np.save, array, allow_pickle=True)),
        ("npz", saved(np.savez, array)),
        ("pt", saved(lambda file: torch.save(trap, file))),
        ("eps.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EOF\n"),
    ):
        for function in (decode, decode_tensors):
            with pytest.raises(DataError, match=f"^{WHERE}: "):
                function(extension, data, WHERE)
    assert not list(tmp_path.iterdir())
    pickle.loads(pickle.dumps(trap))
    assert list(tmp_path.iterdir())


def test_pickles_are_refused_with_the_reason() -> None:
    with pytest.raises(DataError, match=".pkl is refused, because unpickling executes code .* decode=False"):
        decode("pkl", b"", WHERE)


@pytest.mark.parametrize("extension", ["jpg", "png", "webp", "tif", "npy", "npz", "pt", "safetensors", "json"])
def test_truncated_contents_are_refused_with_the_place(extension: str) -> None:
    written: dict[str, Callable[[], bytes]] = {
        "jpg": lambda: saved(picture("RGB", 64, 64).save, "JPEG"),
        "png": lambda: saved(picture("RGB", 64, 64).save, "PNG"),
        "webp": lambda: saved(picture("RGB", 64, 64).save, "WEBP"),
        "tif": lambda: saved(picture("RGB", 64, 64).save, "TIFF"),
        "npy": lambda: saved(np.save, np.arange(100)),
        "npz": lambda: saved(np.savez, np.arange(100)),
        "pt": lambda: saved(lambda file: torch.save(torch.arange(100), file)),
        "safetensors": lambda: pytest.importorskip("safetensors.torch").save({"x": torch.arange(100)}),
        "json": lambda: json.dumps({"x": list(range(100))}).encode(),
    }
    data = written[extension]()
    decode(extension, data, WHERE)
    for size in (0, 5, len(data) // 2):
        with pytest.raises(DataError, match=rf"^{WHERE}: cannot decode .{extension}: .+; repair or remove it"):
            decode(extension, data[:size], WHERE)


@pytest.mark.parametrize(
    "extension, data, message",
    [
        ("cls", b"", "b'' is not a whole number"),
        ("cls", b"1.5", "b'1.5' is not a whole number"),
        ("cls", b"1_0", "is not a whole number"),
        ("cls", b"9" * 5000, "is not a whole number"),
        ("txt", b"\xff", "can't decode byte 0xff"),
        ("json", b"[" * 100_000, "nested too deeply"),
        ("json", b"\xff{}", "can't decode"),
        ("npz", saved(np.save, np.arange(3)), "not a zip archive"),
    ],
)
def test_wrong_contents_are_refused(extension: str, data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        decode(extension, data, WHERE)


def test_texts_in_arrays_are_no_tensors() -> None:
    data = saved(np.save, np.array(["a", "bc"]))
    assert decode("npy", data, WHERE).tolist() == ["a", "bc"]
    with pytest.raises(DataError, match="an array of <U2 is not a Tensor; allowed are numbers"):
        decode_tensors("npy", data, WHERE)


@pytest.mark.parametrize("package, extension", [("PIL", "png"), ("safetensors", "safetensors")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, package: str, extension: str) -> None:
    for name in [*(each for each in sys.modules if each.startswith(f"{package}.")), package]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=f"^{WHERE}: .* needs .*: pip install (pillow|safetensors)$") as caught:
        decode(extension, b"", WHERE)
    assert not isinstance(caught.value, DataError)

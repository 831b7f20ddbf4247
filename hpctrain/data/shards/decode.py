"""Decoding of the contents of a file by its extension: numbers, texts, JSON, arrays, images.

``decode`` returns NumPy arrays, ``decode_tensors`` returns Tensors; both are otherwise alike. Code
in the contents is never executed: pickles are refused, and images are opened by the decoders of a
few plain formats. Pillow, safetensors and torch are imported at first use.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hpctrain.errors import DataError, UsageError
from hpctrain.util.reading import parse_json
from hpctrain.util.text import printable, shorten

Array = npt.NDArray[Any]

NUMBERS = ("cls", "cls2", "id", "index", "inx", "count")
TEXTS = ("txt", "text", "transcript")
IMAGES = ("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "webp", "bmp", "tif", "tiff")
PICKLES = ("pickle", "pkl", "pyd")
_FORMATS = ("JPEG", "PNG", "PPM", "WEBP", "BMP", "TIFF")
# Modes of Pillow with 8 bits per channel, and the mode in which their pixels are returned.
_MODES = {"L": "L", "LA": "LA", "RGB": "RGB", "RGBA": "RGBA", "1": "L", "CMYK": "RGB", "YCbCr": "RGB", "P": "RGB"}
_STORED = {"1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr"}  # without the palette, which raw pixels lack
_WHOLE_NUMBER = re.compile(rb"\s*[+-]?[0-9]{1,4000}\s*")
_TENSORS = frozenset("bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64".split())
_COMPLEX = frozenset(("complex64", "complex128"))


def decode(extension: str, data: bytes, where: str) -> Any:
    """Return the value of contents with this extension, arrays as NumPy arrays; bytes if the extension is unknown.

    ``cls, cls2, id, index, inx, count`` are whole numbers; ``txt, text, transcript`` are UTF-8;
    ``json``; ``npy``; ``npz``, ``safetensors``, ``pt`` and ``pth`` as they were saved; images are
    uint8 ``[height, width, channels]``, or ``[height, width]`` if they are grey. Of an extension
    with dots, such as ``seg.png``, the last part counts. Raises ``DataError``, which begins with
    ``where``, if the contents are damaged or a pickle. Raises ``UsageError`` if a package is
    missing.
    """
    return _decoded(extension, data, where, tensors=False)


def decode_tensors(extension: str, data: bytes, where: str) -> Any:
    """Return the same as ``decode``, with Tensors instead of arrays. Raises ``DataError`` for arrays of texts."""
    return _decoded(extension, data, where, tensors=True)


def _decoded(extension: str, data: bytes, where: str, tensors: bool) -> Any:
    kind = extension.rpartition(".")[2].lower()
    if kind in PICKLES:
        raise DataError(
            f"{where}: .{kind} is refused, because unpickling executes code of the file; allowed are json, npy, npz, "
            "safetensors and others; leave it out of fields, or read bytes with decode=False"
        )
    reader = _READERS.get(kind)
    if reader is None:
        return data
    return attempt(lambda: reader(data, tensors), f".{kind}", where)


def attempt(action: Callable[[], Any], what: str, where: str) -> Any:
    """Return the value of an action that decodes. Raises ``DataError`` with place and reason if it fails."""
    try:
        return action()
    except Exception as error:  # decoders raise errors of many types for damaged contents
        if isinstance(error, UsageError) and not isinstance(error, DataError):
            raise UsageError(f"{where}: {error}") from error
        text = " ".join(re.sub(r"<_io\.\w+ object at \w+>", "", str(error)).split())
        reason = shorten(printable(text), 160) or type(error).__name__
        remedy = "repair or remove it, or select other fields"
        raise DataError(f"{where}: cannot decode {what}: {reason}; {remedy}") from error


# Readers of bytes, one per kind; the second argument says whether arrays become Tensors ---------------------------


def _number(data: bytes, tensors: bool) -> int:
    if not _WHOLE_NUMBER.fullmatch(data):
        raise DataError(f"{shorten(repr(data[:40]))} is not a whole number")
    return int(data)


def _text(data: bytes, tensors: bool) -> str:
    return data.decode("utf-8")


def _json(data: bytes, tensors: bool) -> Any:
    return parse_json(data.decode("utf-8"))


def _npy(data: bytes, tensors: bool) -> Any:
    found = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    return as_tensors(found) if tensors else found


def _npz(data: bytes, tensors: bool) -> Any:
    archive = np.load(io.BytesIO(data), allow_pickle=False)
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise DataError("it is not a zip archive of arrays")
    found = {name: archive[name] for name in archive.files}
    return as_tensors(found) if tensors else found


def _image(data: bytes, tensors: bool) -> Any:
    return as_tensors(image_pixels(data)) if tensors else image_pixels(data)


def _safetensors(data: bytes, tensors: bool) -> Any:
    try:
        module = importlib.import_module("safetensors.torch" if tensors else "safetensors.numpy")
    except ImportError as error:
        raise UsageError("decoding .safetensors needs safetensors: pip install safetensors") from error
    return module.load(data)


def _torch(data: bytes, tensors: bool) -> Any:
    import torch

    found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return found if tensors else _as_arrays(found)


_READERS: dict[str, Callable[[bytes, bool], Any]] = {
    **dict.fromkeys(NUMBERS, _number),
    **dict.fromkeys(TEXTS, _text),
    **dict.fromkeys(IMAGES, _image),
    "json": _json,
    "npy": _npy,
    "npz": _npz,
    "safetensors": _safetensors,
    **dict.fromkeys(("pt", "pth"), _torch),
}


# Images ---------------------------------------------------------------------------------------------------------------


def pillow() -> Any:
    """Return Pillow's module of images. Raises ``UsageError`` if Pillow is missing."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError("decoding images needs Pillow: pip install pillow") from error
    return Image


def image_pixels(data: bytes) -> Array:
    """Return the pixels of an image file as ``pixels`` does; JPEG, PNG, PPM, WebP, BMP and TIFF by their contents."""
    with pillow().open(io.BytesIO(data), formats=_FORMATS) as image:
        return pixels(image)


def pixels(image: Any) -> Array:
    """Return the pixels of a Pillow image, uint8 ``[height, width]`` if it is grey, else with channels at the end.

    Palettes, CMYK and YCbCr become RGB, or RGBA if the palette has transparency. The EXIF
    orientation is not applied. Raises ``DataError`` for other modes: more than 8 bits per channel
    do not fit.
    """
    mode = _MODES.get(image.mode)
    if mode is None:
        raise DataError(f"the mode {image.mode} of Pillow has no 8 bits per channel; allowed are {', '.join(_MODES)}")
    if image.mode == "P" and "transparency" in image.info:
        mode = "RGBA"
    return np.array(image if image.mode == mode else image.convert(mode), np.uint8)


def stored_pixels(mode: str, width: int, height: int, data: bytes) -> Array:
    """Return the pixels of an image that is stored as Pillow's ``tobytes`` wrote it, as ``pixels`` does."""
    if mode not in _STORED:
        raise DataError(f"raw pixels of mode {mode!r}; allowed are {', '.join(sorted(_STORED))}")
    row = -(-width // 8) if mode == "1" else width * len(mode.replace("YCbCr", "YCC"))
    if len(data) != row * height or not data:
        raise DataError(f"{len(data)} bytes of pixels; {width} x {height} of mode {mode} have {row * height}")
    return pixels(pillow().frombytes(mode, (width, height), data))


# Arrays and Tensors ---------------------------------------------------------------------------------------------------


def as_tensors(value: Any) -> Any:
    """Return an array as a Tensor, a dict of arrays as a dict of Tensors. Raises ``DataError`` for other dtypes."""
    if isinstance(value, dict):
        return {name: as_tensors(each) for name, each in value.items()}
    import torch

    array = value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
    if array.dtype.name not in _TENSORS and array.dtype.name not in _COMPLEX:
        raise DataError(f"an array of {value.dtype} is not a Tensor; allowed are numbers of up to 64 bits and booleans")
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)


def _as_arrays(value: Any) -> Any:
    """Return nested dicts, lists and tuples with arrays instead of Tensors. Raises ``TypeError`` for bfloat16."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().numpy()
    if isinstance(value, dict):
        return {name: _as_arrays(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_as_arrays(each) for each in value)
    return value

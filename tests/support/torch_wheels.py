"""Wheels in place of PyTorch's: unpacking the real one takes a minute."""

from __future__ import annotations

import zipfile
from pathlib import Path


def torch_wheel(folder: Path, version: str, name: str, text: str) -> Path:
    """Write a wheel of a package torch with one file; return its path."""
    info, path = f"torch-{version}.dist-info", folder / f"torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(name, text)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: us\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path

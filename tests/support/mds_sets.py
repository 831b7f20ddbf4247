"""MDS shards, written from the description of their format without the library that defines it."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Column = tuple[str, str, int | None]  # name, encoding, fixed size


def write_mds(
    folder: Path, columns: Sequence[Column], samples: Sequence[Sequence[bytes]], per_shard: int = 4, hashed: bool = True
) -> Path:
    """Write samples, one value per column, and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    names, encodings, sizes = zip(*columns)
    config: dict[str, Any] = {"column_names": names, "column_encodings": encodings, "column_sizes": sizes}
    config |= {"compression": None, "format": "mds", "hashes": ["sha1"] if hashed else [], "size_limit": 1 << 26}
    for number, first in enumerate(range(0, len(samples), per_shard)):
        part = samples[first : first + per_shard]
        data = shard(json.dumps(config).encode(), columns, part)
        name = f"shard.{number:05d}.mds"
        (folder / name).write_bytes(data)
        digests = {"sha1": hashlib.sha1(data).hexdigest()} if hashed else {}
        raw = {"basename": name, "bytes": len(data), "hashes": digests}
        shards.append({**config, "raw_data": raw, "samples": len(part), "version": 2, "zip_data": None})
    write_index(folder, {"version": 2, "shards": shards})
    return folder


def shard(config: bytes, columns: Sequence[Column], samples: Sequence[Sequence[bytes]]) -> bytes:
    """Return the bytes of a shard: number of samples, offsets, configuration, samples."""
    packed = []
    for values in samples:
        free = [len(value) for (_, _, size), value in zip(columns, values) if size is None]
        packed.append(struct.pack(f"<{len(free)}I", *free) + b"".join(values))
    at = 4 * (len(packed) + 2) + len(config)
    offsets = [at]
    for one in packed:
        offsets.append(at := at + len(one))
    return struct.pack(f"<{len(offsets) + 1}I", len(packed), *offsets) + config + b"".join(packed)


def read_index(folder: Path) -> Any:
    return json.loads((folder / "index.json").read_text())


def write_index(folder: Path, index: Any) -> None:
    (folder / "index.json").write_text(json.dumps(index))

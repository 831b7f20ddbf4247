"""Pictures of the benchmarks, drawn from the committed results."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_helpers import FOLDER, texts_of
from fsdp_step_samples import KINDS, REST

pytest.importorskip("matplotlib")

# Pattern of the results, and texts of the pictures besides the candidates.
PICTURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "asynchronous": ("asynchronous*", ("seconds of training", "a point below ddp's best", "convnet on digits, ")),
    "checkpoint": ("checkpoint*", ("A checkpoint of 512 MiB on 2 ranks, ", "Saving", "Loading", "GB/s", "(>= 0.95)")),
    "communication": ("*-np*", ("microseconds", "size of the whole tensor", " MiB")),
    "fsdp_step": ("fsdp-step*", ("25.5 million parameters, 2 ranks", "ms (", "MB (", *KINDS, REST)),
    "offload": ("offload", ("2 threads", "1 thread", "49.6 million", "STREAM triad", "hpctrain one pass")),
    "pipeline": ("pipeline*", ("GPT of 8 layers, width 384, on 2 ranks, microbatches of 128 tokens", "ms per step")),
    "tensor": ("tensor*", ("8 MLP blocks of width 512, 512 tokens, 2 ranks", "ms per step")),
}
NOT_DRAWN = {"copy", "all_reduces alone"}


def results(name: str) -> dict[str, dict[str, Any]]:
    """Return the committed results of a program, by the names of their files."""
    found = {path.stem: json.loads(path.read_text()) for path in (FOLDER / "results").glob(PICTURES[name][0] + ".json")}
    if name == "communication":
        found = {stem: one for stem, one in found.items() if "dtype" in one and "size" not in one}
    return found


def draw(name: str, result: dict[str, Any], path: Path) -> str:
    """Draw a result; return the texts of its pictures."""
    files = importlib.import_module(name).draw(result, path)
    assert all(file.name.startswith(path.name) and file.stat().st_size > 1000 for file in files)
    assert len([file for file in files if file.read_bytes().startswith(b"\x89PNG")]) == len(files) / 2
    return "\n".join(texts_of(file) for file in files if file.suffix == ".svg")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PICTURES)
def test_pictures_name_all_candidates_and_units(name: str, tmp_path: Path) -> None:
    found = results(name)
    assert found
    for stem, result in found.items():
        texts = draw(name, result, tmp_path / stem)
        names = {row["candidate"] for row in result.get("rows", ())} | {*result.get("seconds", ())}
        words = [*PICTURES[name][1], *names - NOT_DRAWN]
        if name == "communication":
            words.append("percent" if result["benchmark"] == "overlap" else "GB/s")
        assert [word for word in words if word not in texts] == [], stem
        assert not NOT_DRAWN & {*texts.splitlines()}


def test_parts_that_were_not_measured_are_not_drawn(tmp_path: Path) -> None:
    (steps,), (saves,), (blocks,) = (results(name).values() for name in ("fsdp_step", "checkpoint", "tensor"))
    texts = draw("fsdp_step", {**steps, "memory": {}}, tmp_path / "some")
    assert "A step" in texts and "Memory" not in texts
    rows = [row for row in saves["rows"] if row["kind"] == "read"]
    texts = draw("checkpoint", {**saves, "rows": rows, "targets": []}, tmp_path / "some")
    assert "Loading" in texts and "Saving" not in texts and "relative to their targets" not in texts
    assert draw("checkpoint", {**saves, "rows": [], "targets": []}, tmp_path / "none") == ""
    del blocks["seconds"]["one rank alone"]
    assert "one rank alone" not in draw("tensor", blocks, tmp_path / "some")


def test_many_sizes_do_not_overlap_on_the_axis(tmp_path: Path) -> None:
    one = next(iter(results("communication").values()))
    sizes = [2**power for power in range(2, 31)]
    rows = [{"size": size, "candidate": "mpi", "median": 1e-5, "busbw": 2.0} for size in sizes]
    texts = draw("communication", {**one, "benchmark": "all_reduce", "rows": rows}, tmp_path / "many").splitlines()
    assert sum("iB" in text or text.endswith(" B") for text in texts) < 2 * 12
    assert "1 GiB" in texts

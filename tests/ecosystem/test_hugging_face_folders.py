"""Weights from and to folders of Transformers, and checkpoints of the adapters of PEFT alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.jobs import JobStarter

PROGRAM = Path(__file__).resolve().parent / "programs" / "hugging_face_folders.py"
WHOLE, HALF = ("alone", "ddp"), ("zero1", "fsdp", "tensor", "pipe")
COMPARE = """
import glob, json, sys, h5py, torch
from transformers import AutoModelForCausalLM
folder, run = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder)
with h5py.File(sorted(glob.glob(run + "/checkpoints/*.h5"))[-1]) as file:
    stored = {name: torch.from_numpy(file["model"][name][()]).to(model.dtype) for name in model.state_dict()}
same = all(torch.equal(stored[name], each) for name, each in model.state_dict().items())
print("RESULT", json.dumps([str(model.dtype), same]))
"""
OFFLINE = {"HF_HUB_OFFLINE": "1"}

pytestmark = [pytest.mark.ecosystem, pytest.mark.limit(600)]


def results(launch: JobStarter, folder: Path, part: str) -> dict[tuple[str, str], Any]:
    job = launch(2, PROGRAM, folder, part, timeout=300, env=OFFLINE)
    assert job.returncode == 0, str(job)
    lines = [json.loads(line[7:]) for line in job.stdout.splitlines() if line.startswith("RESULT ")]
    return {(name, case): found for name, case, found in lines}


def test_every_rank_loads_its_part_of_a_folder(launch: JobStarter, tmp_path: Path) -> None:
    found = results(launch, tmp_path, "loading")
    for name in ("gpt2", "llama"):
        for case in (*WHOLE, *HALF):
            one = found[name, case]
            assert one["names"] and one["weights"] and one.get("logits", True), (name, case, one)
            assert one["share"] == pytest.approx(1 if case in WHOLE else 0.5, rel=0.3 if case == "pipe" else 0.05), (
                name,
                case,
                one,
            )
    expected = {
        "vocabulary": "the data's vocabulary has 257 tokens, the model's 256",
        "context": "model.context = 4096: allowed are at most 2048",
        "options": "model.options has no_such_entry",
        "architecture": "it holds a 'LlamaForTokenClassification'; allowed are LlamaForCausalLM",
    }
    for case, text in expected.items():
        assert text in found["refused", case]


def test_adapters_alone_resume_bit_for_bit(launch: JobStarter, tmp_path: Path) -> None:
    for (data, _), one in results(launch, tmp_path, "adapters").items():
        whole, small = one["bytes"]
        assert one["losses"] and one["weights"] and small < whole / 2, (data, one)


@pytest.mark.long
def test_a_run_starts_from_a_folder_and_becomes_one(launch: JobStarter, tmp_path: Path) -> None:
    assert not results(launch, tmp_path, "folders")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "corpus.py").write_text("".join(f"line {number} of a text\n" for number in range(2000)))
    (tmp_path / "run.toml").write_text(
        '[run]\ndevice = "cpu"\n[data]\nfiles = ["c.h5"]\nvalidation_samples = 8\n'
        "[model]\ncontext = 16\n[train]\nsteps = 4\nbatch = 8\n"
    )
    hpctrain = (
        f"import os, sys; os.chdir({str(tmp_path)!r}); from hpctrain.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )

    def call(ranks: int, *words: str) -> Any:
        job = launch(ranks, hpctrain, *words, timeout=120, env=OFFLINE)
        assert job.returncode == 0, str(job)
        return job

    call(0, "data", "pack", "text", "-o", "c.h5")
    for name, ranks, data in (("gpt2", 2, "fsdp"), ("llama", 2, "ddp"), ("llama", 2, "fsdp")):
        run = f"{name}-{data}"
        words = ("--set", f"run.folder={run}", "--set", f"parallel.data={data}", "--set", f"model.factory=hf:{name}")
        call(ranks, "train", "run.toml", *words)
        for dtype in ("float32", "bfloat16"):
            out = f"{run}-{dtype}"
            call(0, "checkpoint", "export", run, "--to", "hf", "-o", out, "--dtype", dtype, "--shard-bytes", "30000")
            found = launch(0, COMPARE, str(tmp_path / out), str(tmp_path / run), timeout=60, env=OFFLINE)
            lines = [line for line in found.stdout.splitlines() if line.startswith("RESULT ")]
            assert lines and json.loads(lines[0][7:]) == [f"torch.{dtype}", True], str(found)
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("llama-ddp", "llama-fsdp")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and sys.float_info.max > losses[0][-1]

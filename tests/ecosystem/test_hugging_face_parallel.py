"""Models of Transformers train under tensor parallelism and in pipelines as in a plain loop of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.jobs import JobStarter

PROGRAM = Path(__file__).resolve().parent / "programs" / "hugging_face_parallel.py"
BERT = "plan=*.query:heads+*.key:heads+*.value:heads+*.intermediate.dense:column+*.layer.*.output.dense:row"
FAST = ("llama/tensor=2", "gpt2/tensor=2", "llama-tied-masks/pipe=2", "gpt2-masks/pipe=2")
OTHERS = (
    *(f"{name}/tensor=2" for name in ("llama-tied", "llama-one-kv", "qwen3", "gpt2-untied")),
    f"bert/tensor=2,{BERT}",
    "llama-masks/pipe=2",
)
REFUSED = {
    "mixtral/tensor=2": "style packed_colwise for model.layers.*.mlp.experts.gate_up_proj",
    "phi3/tensor=2": "style colwise_gather_output for model.layers.*.self_attn.qkv_proj",
    "bert/tensor=2": "a model of class BertForMaskedLM has no plan",
}
# In double precision. LLaMA's norms compute in float32, and a pipeline sums the losses of its microbatches in float32.
CLOSE = 1e-6

pytestmark = [pytest.mark.ecosystem, pytest.mark.limit(300)]


def check(launch: JobStarter, folder: Path, ranks: int, *cases: str) -> None:
    """Train cases on ranks, and compare losses, norms of gradients and the weights of the checkpoint."""
    job = launch(ranks, PROGRAM, folder, *cases, timeout=280, env={"HF_HUB_OFFLINE": "1"})
    assert job.returncode == 0, str(job)
    found = [json.loads(line[5:]) for line in job.stdout.splitlines() if line.startswith("CASE ")]
    assert [each["case"] for each in found] == list(cases)
    for each in found:
        if each["case"] in REFUSED:
            assert REFUSED[each["case"]] in each["error"]
            continue
        assert "error" not in each, each
        assert each["losses"] == pytest.approx(each["plain_losses"], rel=CLOSE), each
        assert each["norms"] == pytest.approx(each["plain_norms"], rel=CLOSE), each
        assert each["difference"] < CLOSE, each


def test_llama_and_gpt2_train_as_in_one_process(launch: JobStarter, tmp_path: Path) -> None:
    check(launch, tmp_path, 2, *FAST, *REFUSED)


@pytest.mark.long
def test_other_models_train_as_in_one_process(launch: JobStarter, tmp_path: Path) -> None:
    check(launch, tmp_path, 2, *OTHERS)

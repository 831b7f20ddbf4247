"""Programs of Accelerate, Lightning and Transformers run unchanged under mpiexec, and train as in one process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.jobs import Finished, JobStarter

RANKS = int(os.environ.get("ECOSYSTEM_NP", "2"))
PROGRAMS = Path(__file__).resolve().parent / "programs"
# Nothing is downloaded, nothing asks for a port: MASTER_ADDR and MASTER_PORT are not set.
OFFLINE = {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "MASTER_ADDR": None, "MASTER_PORT": None}
STOCK = ("--backend", "torch:gloo")
pytestmark = [pytest.mark.ecosystem, pytest.mark.long, pytest.mark.limit(600)]


def run(launch: JobStarter, ranks: int, *words: str, **environ: str) -> Finished:
    """Run a program with ``hpctrain run`` on ranks; the test fails if the program does."""
    job = launch(ranks, "-m", "hpctrain", "run", *words, timeout=150, env={**OFFLINE, **environ})
    assert job.returncode == 0, str(job)
    return job


def losses(job: Finished) -> list[float]:
    """Return the losses that a program has printed, bit by bit."""
    line = next(line for line in job.stdout.splitlines() if line.startswith("LOSSES "))
    return [float.fromhex(value) for value in json.loads(line.removeprefix("LOSSES "))]


@pytest.mark.parametrize("name", ["test_script", "test_sync", "test_ops"])
def test_script_of_accelerate_passes(launch: JobStarter, name: str) -> None:
    run(launch, RANKS, "-m", f"accelerate.test_utils.scripts.{name}")


# Both take for granted that ranks have GPUs, and fail with torch's gloo as well: one passes device_ids to
# DistributedDataParallel, which refuses them for CPUs. The other one trains ranks with different numbers of batches,
# which Accelerate lets torch's Join balance on GPUs only; on CPUs one rank waits in its backward for the other one.
@pytest.mark.parametrize("name", ["test_distributed_data_loop", "test_ddp_comm_hook"])
def test_script_of_accelerate_for_gpus_passes_on_cpus(launch: JobStarter, name: str) -> None:
    job = run(launch, 2, str(PROGRAMS / "accelerate_on_cpu.py"), name)
    assert job.stdout.count("PASSED") == 2


def test_models_of_the_wheel_learn_as_with_gloo(launch: JobStarter, tmp_path: Path) -> None:
    def parts(*options: str) -> dict[str, list[str]]:
        folder = tmp_path / f"run{len(options)}"
        lines = run(launch, 2, *options, str(PROGRAMS / "wheel_models.py"), str(folder)).stdout.splitlines()
        found = [json.loads(line.removeprefix("PART ")) for line in lines if line.startswith("PART ")]
        return {name: values for name, *values in found}

    ours = parts()
    assert len(ours) == 13 and ours == parts(*STOCK)


def test_trainer_of_transformers_learns_as_in_one_process(launch: JobStarter, tmp_path: Path) -> None:
    program = str(PROGRAMS / "transformers_trainer.py")
    ranks = losses(run(launch, 2, program, str(tmp_path / "ranks")))
    assert ranks == losses(run(launch, 2, *STOCK, program, str(tmp_path / "gloo")))
    # A batch is divided: the mean of two means rounds differently than the mean of all samples.
    assert ranks == pytest.approx(losses(run(launch, 0, program, str(tmp_path / "alone"))), rel=1e-6)
    assert len(ranks) == 5 and ranks[-1] < ranks[0]


def test_loop_of_accelerate_with_clipping_learns_as_in_one_process(launch: JobStarter) -> None:
    program = str(PROGRAMS / "accelerate_clipping.py")
    alone = losses(run(launch, 0, program))
    assert len(alone) == 2 * (6 + 3 + 1)
    for ranks in (2, 3):
        assert losses(run(launch, ranks, program)) == pytest.approx(alone, rel=1e-12), ranks


@pytest.mark.parametrize("backend", ["gloo", "hpctrain"])
def test_lightning_trains_its_boring_model_as_with_gloo(launch: JobStarter, tmp_path: Path, backend: str) -> None:
    program = str(PROGRAMS / "lightning_boring.py")
    ours = losses(run(launch, 2, program, str(tmp_path / "ours"), BORING_BACKEND=backend))
    assert ours == losses(run(launch, 2, *STOCK, program, str(tmp_path / "gloo"), BORING_BACKEND="gloo"))

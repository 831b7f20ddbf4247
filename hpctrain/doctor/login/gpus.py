"""Checks of the GPU software: a driver that supports torch's CUDA version, and NCCL through CuPy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpctrain.doctor.findings import Finding, error, note, ok, warning
from hpctrain.doctor.login.probe import run_probe
from hpctrain.doctor.login.pytorch import build
from hpctrain.util.probe import Answer, run_program

_QUERY = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]


@dataclass(frozen=True)
class Gpus:
    """Answers of the driver and of CuPy."""

    driver: Answer
    cupy: Answer

    @property
    def names(self) -> list[str]:
        """Return the names of the GPUs that the driver reports."""
        rows = [] if self.driver.error else [line.split(",") for line in self.driver.text.splitlines()]
        return [row[0].strip() for row in rows if len(row) == 3]

    @property
    def version(self) -> str:
        """Return the driver's version."""
        row = self.driver.text.splitlines()[0].split(",")
        return row[1].strip()


def gather() -> Gpus:
    """Query the driver and CuPy."""
    return Gpus(run_program(_QUERY), run_probe("cupy"))


def check(gpus: Gpus, torch: Answer, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings on GPUs."""
    if gpus.driver.timed_out:
        yield error(
            "GPUs", "nvidia-smi does not answer", "the driver hangs: no program will see a GPU here", "tell the site"
        )
        return
    if gpus.names:
        yield from _check_seen(gpus, torch, environ)
    elif torch.facts.get("cuda") or torch.facts.get("hip"):
        yield note("GPUs", "none here", f"torch is {build(torch)}: try again on a node that has some")
    else:
        yield ok("GPUs", "none here, and torch needs none")
    if torch.facts.get("cuda"):
        yield from _check_nccl(gpus, torch)


def _check_seen(gpus: Gpus, torch: Answer, environ: Mapping[str, str]) -> Iterator[Finding]:
    told = f"{len(gpus.names)} x {gpus.names[0]}, driver {gpus.version}"
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if torch.error or torch.facts.get("available"):
        yield ok("GPUs", told)
    elif not torch.facts.get("cuda"):
        yield warning(
            "GPUs", f"{told}, but torch is {build(torch)}", "training will not use the GPUs", "install torch for CUDA"
        )
    elif visible in ("", "-1"):
        yield note("GPUs", f"{told}, hidden by CUDA_VISIBLE_DEVICES={visible}", "ranks started here see no GPU")
    else:
        yield error(
            "GPUs",
            f"{told}, but torch, {build(torch)}, sees none",
            "the driver is too old for this CUDA, or does not answer",
            "install a torch for an older CUDA (nvidia-smi says which the driver knows), or load the site's module",
        )


def _check_nccl(gpus: Gpus, torch: Answer) -> Iterator[Finding]:
    own = f"torch has NCCL {torch.facts['nccl']}" if torch.facts.get("nccl") else "torch has no NCCL"
    if gpus.cupy.error:
        missing = "No module named" in gpus.cupy.error
        yield note(
            "NCCL",
            f"{'CuPy is not installed' if missing else f'CuPy does not load: {gpus.cupy.error}'}; {own}",
            "hpctrain reaches NCCL through CuPy; without it GPUs communicate by CUDA-aware MPI, or through host memory",
            "pip install 'hpctrain[cuda]'",
        )
    elif not gpus.cupy.facts.get("nccl"):
        yield note(
            "NCCL",
            f"CuPy {gpus.cupy.facts['cupy']} finds no NCCL; {own}",
            "GPUs will communicate by CUDA-aware MPI, or through host memory",
            "pip install nvidia-nccl-cu12, or load the site's NCCL",
        )
    else:
        yield ok("NCCL", f"{_nccl(int(gpus.cupy.facts['nccl']))} through CuPy {gpus.cupy.facts['cupy']}; {own}")


def _nccl(code: int) -> str:
    """Return the version for NCCL's version code (22703 is 2.27.3, 2804 is 2.8.4)."""
    major, rest = divmod(code, 10000 if code >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"

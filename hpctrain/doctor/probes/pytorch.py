"""Probe of torch's version and build."""

from __future__ import annotations

import json
import os
import time


def main() -> None:
    """Load torch and print its version and build, its load time, and the load average per core."""
    began = time.perf_counter()
    import torch

    facts = {
        "seconds": time.perf_counter() - began,
        "load": os.getloadavg()[0] / (os.cpu_count() or 1),
        "version": str(torch.__version__),
        "file": torch.__file__,
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "available": torch.cuda.is_available(),
        "devices": torch.cuda.device_count(),
        "nccl": _nccl(torch),
        "threads": torch.get_num_threads(),
    }
    print("hpctrain-doctor " + json.dumps(facts))


def _nccl(torch: object) -> str | None:
    """Return the version of the NCCL that torch contains."""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[attr-defined]
    except (AttributeError, ImportError, RuntimeError, TypeError):
        return None


if __name__ == "__main__":
    main()

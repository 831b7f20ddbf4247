"""A checkpoint that must survive any fault while the next one is written."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from support.checkpoints import same

from hpctrain import checkpoint
from hpctrain.checkpoint.format.reader import verify_file
from hpctrain.checkpoint.storage import Storage
from hpctrain.errors import CheckpointError

NAME = "step_00000001.h5"

Around = Callable[[], AbstractContextManager[Any]]


def make_model(seed: int, width: int = 60) -> torch.nn.Module:
    """Return a model of equal layers, enough of them for every rank to write some."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(6)))


def moments_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that has taken a step and keeps a moment of each parameter."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, model.get_parameter("0.bias").numel())).sum().backward()
    optimizer.step()
    return optimizer


def nbytes_of(model: torch.nn.Module) -> int:
    """Return the bytes of parameters and moments."""
    return sum(2 * each.nbytes for each in model.parameters())


class Place:
    """Folder with a checkpoint, and the checks of both after a fault."""

    def __init__(self, folder: Path, comm: Any, width: int = 60) -> None:
        self.comm, self.path, self._width = comm, folder / NAME, width
        self.old = make_model(1, width)
        self.optimizer = moments_of(self.old)
        self._save(NAME, self.old, self.optimizer, 1)
        self.bytes = self._digest()

    def save(self, name: str = NAME) -> None:
        """Save another state."""
        model = make_model(2, self._width)
        self._save(name, model, moments_of(model), 2)

    def _save(self, name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        how = Storage(alignment=4096)  # its smaller tensors are not distributed over the ranks
        path = self.path.with_name(name)
        checkpoint.save(path, model=model, optimizer=optimizer, train={"step": step}, comm=self.comm, how=how)

    def outcome(self, around: Around = nullcontext, name: str = NAME) -> str:
        """Return each rank's error of a save under a fault; empty if the save succeeded."""
        self.comm.barrier()
        error: Exception | None = None
        with around():
            try:
                self.save(name)
            except Exception as caught:
                error = caught
        heard = self.comm.all_gather_object("" if error is None else f"{type(error).__name__}: {error}")
        assert len(set(heard)) == 1, heard
        if error is None:
            return ""
        assert isinstance(error, CheckpointError) and (error.everywhere or self.comm.size == 1), heard
        assert "\n" not in str(error)
        return str(error)

    def error(self, around: Around = nullcontext, name: str = NAME) -> str:
        """Return the error that every rank raises in a save, which must leave the folder unchanged."""
        text = self.outcome(around, name)
        assert text, "nothing was raised"
        self.check_unchanged()
        return text

    def check_unchanged(self) -> None:
        """Assert that the old checkpoint loads bit for bit and is the only file in the folder."""
        self.comm.barrier()
        assert os.listdir(self.path.parent) == [NAME] and self._digest() == self.bytes
        model = make_model(3, self._width)
        optimizer = moments_of(model)
        loaded = checkpoint.load(self.path, model=model, optimizer=optimizer, comm=self.comm)
        assert loaded.step == 1 and same(model.state_dict(), self.old.state_dict())
        assert same(optimizer.state_dict()["state"], self.optimizer.state_dict()["state"])

    def check_saves(self) -> None:
        """Assert that the next checkpoint is written once the fault is removed."""
        self.save()
        self.comm.barrier()
        verify_file(self.path)
        assert os.listdir(self.path.parent) == [NAME] and self._digest() != self.bytes

    def check_names(self, text: str, ranks: list[int], *, in_turn: bool = False) -> None:
        """Assert that an error names exactly those ranks; if all fail alike, it need not name any.

        ``in_turn`` is for acts of rank 0 before the others: if it fails there, only rank 0 may be named.
        """
        named = {int(rank) for said in re.findall(r"\brank (\d+(?:, \d+)*): ", text) for rank in said.split(", ")}
        allowed = [set(ranks)]
        if len(ranks) == self.comm.size or in_turn and 0 in ranks:
            allowed.append(set())
        if in_turn and 0 in ranks:
            allowed.append({0})
        assert named in allowed, text

    def _digest(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


def check_room(text: str, folder: Path, most: int | None = None, width: int = 60) -> None:
    """Assert that the error of a full disk states the bytes needed and the bytes free."""
    least = nbytes_of(make_model(2, width))
    found = re.findall(r"(\d+) bytes are needed, (\d+) bytes are free in (\S+?)(?:;|$)", text)
    assert found, text
    for needed, room, where in found:
        assert least <= int(needed) < 2 * least and where == str(folder)
        assert most is None or int(room) <= most


class OneWrongByte:
    """Fault that alters a byte of the first piece of a tensor that this rank writes, and records the tensor's name."""

    def __init__(self) -> None:
        model = make_model(2)
        state = moments_of(model).state
        self.known = {}
        for name, parameter in model.named_parameters():
            self.known[f"/model/{name}"] = parameter.detach().numpy().tobytes()
            for kind, moment in state[parameter].items():
                self.known[f"/optimizer/{name}/{kind}"] = moment.numpy().tobytes()
        self.hit = ""

    def __call__(self, real: Callable[..., int], handle: int, data: Any, offset: int) -> int:
        piece = bytes(data) if not isinstance(data, (list, tuple)) else b"".join(map(bytes, data))
        names = [name for name, tensor in self.known.items() if len(piece) >= 64 and piece in tensor]
        if names and not self.hit:
            self.hit = names[0]
            piece = piece[:33] + bytes([piece[33] ^ 4]) + piece[34:]
        return real(handle, [piece] if isinstance(data, (list, tuple)) else piece, offset)

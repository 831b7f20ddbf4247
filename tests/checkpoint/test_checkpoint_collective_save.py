"""Collective saves: all ranks write one file, whose contents do not depend on how the model is split."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import flip, on_threads
from support.training_fixtures import contents

from hpctrain import checkpoint
from hpctrain.checkpoint import saver
from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format.plan import box_of, cached_plan, plan
from hpctrain.checkpoint.format.reader import Reader, verify_file
from hpctrain.errors import CheckpointError
from hpctrain.shard import Shard

SHAPES = {"embedding": (37, 16), "up": (16, 24), "bias": (24,), "down": (24, 16), "scale": (), "none": (0, 4)}


def whole_values(name: str, shape: tuple[int, ...], add: float = 0.0) -> torch.Tensor:
    count = math.prod(shape)
    start = float(sum(map(ord, name)))
    return (torch.arange(count, dtype=torch.float32) + start + add).reshape(shape)


class Boxes:
    """Split of tensors into boxes by a rule, as a strategy would split them; local boxes are in flat memory."""

    def __init__(self, rule: str, rank: int, size: int) -> None:
        self.rule, self.rank, self.size = rule, rank, size

    def boxes(self, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        rank, size, whole = self.rank, self.size, ((0,) * len(shape), shape)
        if self.rule == "hybrid":  # split in two; every second rank holds the same half
            rank, size = rank % 2, 2
        if self.rule == "whole" or not shape or size == 1 or 0 in shape:
            return [whole]
        if self.rule == "columns" and len(shape) == 2:
            cuts = [number * shape[1] // size for number in range(size + 1)]
            return [((0, cuts[rank]), (shape[0], cuts[rank + 1] - cuts[rank]))]
        if self.rule == "flat":
            return flat_boxes(shape, rank, size)
        cuts = [-(-number * shape[0] // size) for number in range(size + 1)]
        return [((cuts[rank], *[0] * (len(shape) - 1)), (cuts[rank + 1] - cuts[rank], *shape[1:]))]

    def shards(self, name: str, tensor: torch.Tensor) -> list[Shard]:
        shape, found, at = SHAPES[name], [], 0
        for start, extent in self.boxes(shape):
            count = math.prod(extent)
            piece = tensor.detach().view(-1)[at : at + count].view(extent)
            found.append(Shard(name, shape, "float32", start, extent, piece))
            at += count
        return found


def flat_boxes(shape: tuple[int, ...], rank: int, size: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the boxes of a rank's range of the flattened tensor: the end of a row, whole rows, the start of a row."""
    count = math.prod(shape)
    begin, end = rank * count // size, (rank + 1) * count // size
    if len(shape) == 1:
        return [((begin,), (end - begin,))]
    width, found = shape[1], []
    while begin < end:
        row, column = divmod(begin, width)
        if column or end - begin < width:
            length = min(width - column, end - begin)
            found.append(((row, column), (1, length)))
        else:
            length = (end - begin) // width * width
            found.append(((row, 0), (length // width, width)))
        begin += length
    return found


class Model(torch.nn.Module):
    """Model of the local boxes of the tensors, each in flat memory, empty until filled."""

    def __init__(self, boxes: Boxes, filled: bool) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            whole = whole_values(name, shape)
            pieces = [whole[tuple(slice(s, s + e) for s, e in zip(*box))] for box in boxes.boxes(shape)]
            local = torch.cat([piece.reshape(-1) for piece in pieces])
            if boxes.rule == "whole":
                local = local.view(shape)
            self.register_parameter(name, torch.nn.Parameter(local if filled else torch.zeros_like(local)))


def make(rule: str, rank: int, size: int, filled: bool) -> tuple[Model, torch.optim.Optimizer, Boxes]:
    boxes = Boxes(rule, rank, size)
    model = Model(boxes, filled)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    if filled:
        for name, parameter in model.named_parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(3.0),
                "exp_avg": parameter.detach() + 1,
                "exp_avg_sq": parameter.detach() + 2,
            }
    return model, optimizer, boxes


def write(path: Path, rule: str, size: int) -> None:
    def body(comm: Any) -> None:
        model, optimizer, boxes = make(rule, comm.rank, size, filled=True)
        split = None if rule == "whole" else boxes
        checkpoint.save(path, model=model, optimizer=optimizer, train={"step": 3}, comm=comm, split=split)

    results = on_threads(size, body)
    assert results == [None] * size, results


def read(path: Path, rule: str, size: int) -> None:
    def body(comm: Any) -> None:
        model, optimizer, boxes = make(rule, comm.rank, size, filled=False)
        expected, state, _ = make(rule, comm.rank, size, filled=True)
        split = None if rule == "whole" else boxes
        checkpoint.load(path, model=model, optimizer=optimizer, comm=comm, split=split)
        for (name, one), (_, other) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
            assert torch.equal(one, other), (rule, size, name)
            for key in ("step", "exp_avg", "exp_avg_sq"):
                assert torch.equal(optimizer.state[one][key], state.state[other][key]), (rule, size, name, key)

    results = on_threads(size, body)
    assert results == [None] * size, results


LAYOUTS = [("whole", 1), ("whole", 3), ("rows", 2), ("rows", 4), ("columns", 3), ("flat", 3), ("flat", 5)]
LAYOUTS += [("hybrid", 4)]


@pytest.mark.parametrize("extent", [4 << 20, 256])
def test_every_layout_writes_the_same_file_and_reads_every_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extent: int
) -> None:
    monkeypatch.setattr(layout, "EXTENT", extent)
    paths = {each: tmp_path / f"{each[0]}{each[1]}.h5" for each in LAYOUTS}
    for (rule, size), path in paths.items():
        write(path, rule, size)
    found = {each: contents(path) for each, path in paths.items()}
    for each in LAYOUTS[1:]:
        assert found[each] == found[LAYOUTS[0]], each
    for name, shape in SHAPES.items():
        assert found["flat", 5][f"model/{name}"] == whole_values(name, shape).numpy().tobytes()
    for path, (rule, size) in itertools.product((paths["flat", 5], paths["whole", 3]), LAYOUTS):
        read(path, rule, size)


def describe(*boxes: tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]) -> list[Shard]:
    return [Shard(name, shape, "float32", start, extent, None) for name, shape, start, extent in boxes]


def test_replicated_tensors_are_divided_evenly_and_in_order() -> None:
    boxes = [box_of("/a", (9 << 20,), "float32"), box_of("/s", (7,), "float32"), box_of("/b", (5 << 20,), "float32")]
    shares = plan([boxes] * 3, small=1 << 20)
    bytes_of = [sum(part.end - part.begin for part in parts) * 4 for parts in shares.parts]
    assert max(bytes_of) - min(bytes_of) <= 2 * layout.EXTENT and sum(bytes_of) == (14 << 22) + 28
    parts = sorted((part.box, part.begin, part.end, rank) for rank, each in enumerate(shares.parts) for part in each)
    covered = {number: [(begin, end) for box, begin, end, _ in parts if box == number] for number in range(3)}
    for number, box in enumerate(boxes):
        ends = [0, *(end for _, end in covered[number])]
        assert [begin for begin, _ in covered[number]] == ends[:-1] and ends[-1] == box.shape[0]
        assert all(begin % (layout.EXTENT // 4) == 0 for begin, _ in covered[number])
    large = [rank for box, _, _, rank in parts if box != 1]
    assert large == sorted(large), "each rank writes one stretch of the file"
    assert [rank for box, _, _, rank in parts if box == 1] == [0]


def test_a_box_held_by_one_rank_is_written_by_that_rank() -> None:
    first, second = ("/w", (4, 6), (0, 0), (4, 2)), ("/w", (4, 6), (0, 2), (4, 4))
    held = [describe(first), describe(second, ("/v", (3,), (0,), (3,)))]
    shares = plan(held, small=1)
    assert [[(part.box, part.begin, part.end) for part in parts] for parts in shares.parts] == [
        [(0, 0, 8)],
        [(0, 0, 16), (1, 0, 3)],
    ]
    assert [dataset.name for dataset in shares.datasets] == ["/w", "/v"]


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([[("/w", (4,), (0,), (2,))], [("/w", (4,), (1,), (3,))]], r"/w: the box \(0,\) \+ \(2,\) of rank 0 and the"),
        ([[("/w", (4,), (0,), (2,))], [("/w", (4,), (3,), (1,))]], "/w: 1 of its elements are held by no rank"),
        ([[("/w", (4,), (0,), (4,))], [("/w", (5,), (0,), (5,))]], r"/w is float32 \(4,\) on rank 0 and .* \(5,\)"),
    ],
)
def test_boxes_that_overlap_or_leave_gaps_are_refused(held: list[Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        plan([describe(*boxes) for boxes in held], small=1)


def test_ranks_that_disagree_are_refused(tmp_path: Path) -> None:
    def elsewhere(comm: Any) -> None:
        checkpoint.save(tmp_path / f"{comm.rank}.h5", model=torch.nn.Linear(2, 2), comm=comm)

    def another(comm: Any) -> None:
        checkpoint.save(tmp_path / "c.h5", model=torch.nn.Linear(2, 2 + comm.rank), comm=comm)

    for body, said in ((elsewhere, "1.h5: all ranks must write the same checkpoint"), (another, "on rank 1")):
        results = on_threads(2, body)
        assert {type(result) for result in results} == {CheckpointError} and said in str(results[0])
    assert list(tmp_path.iterdir()) == []


def test_a_partial_read_verifies_checksums_of_its_extents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "EXTENT", 256)
    write(tmp_path / "c.h5", "whole", 1)
    with Reader(tmp_path / "c.h5") as reader:
        place = reader.offsets["/model/up"]
    flip(tmp_path / "c.h5", place + 300)
    with Reader(tmp_path / "c.h5") as reader:
        out = np.empty((2, 24), dtype="<f4")
        reader.read_box("/model/up", (0, 0), (2, 24), out)  # bytes 0 to 192: the undamaged extent
        assert out.tobytes() == whole_values("up", (16, 24))[:2].numpy().tobytes()
        with pytest.raises(CheckpointError, match="/model/up is damaged"):
            reader.read_box("/model/up", (4, 20), (2, 2), np.empty((2, 2), dtype="<f4"))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("wrong", [False, True])
def test_later_files_are_written_at_once_and_a_wrong_predicted_offset_is_noticed(
    tmp_path: Path, background: bool, wrong: bool
) -> None:
    """Tensors at other offsets than predicted cost a second write, and leave no trace in the file."""
    write(tmp_path / "first.h5", "whole", 1)
    saver.OFFSETS.clear()
    seen: list[list[str]] = []

    def body(comm: Any) -> None:
        model, optimizer, _ = make("whole", comm.rank, comm.size, filled=True)
        how = checkpoint.Storage(alignment=256)
        with checkpoint.Saver(comm, how, background=background) as one:
            for number in range(3):
                train = {"step": 3, "more": "x" * 3000 * number}
                optimizer.param_groups[0]["lr"] = 0.1**number  # a learning-rate schedule does not change the offsets
                one.save(tmp_path / f"{number}.h5", model=model, optimizer=optimizer, train=train)
                one.wait()
                comm.all_gather_object(None)
                if wrong and comm.rank == 0:
                    for offsets in saver.OFFSETS.values():
                        offsets.update({name: (offset or 0) + 4096 for name, offset in offsets.items()})
                comm.all_gather_object(None)
        seen.append(sorted(saver.OFFSETS))

    assert on_threads(2, body) == [None] * 2
    assert seen[0] and len(seen[0]) == 1
    for number in range(3):
        verify_file(tmp_path / f"{number}.h5")
        assert contents(tmp_path / f"{number}.h5") == contents(tmp_path / "first.h5")


def test_spare_boxes_are_written_by_no_rank() -> None:
    """A copy that is split at other boundaries is not assigned to any rank, and covers no elements."""

    def box(start: int, extent: int, spare: bool = False) -> Shard:
        return Shard("/model/x", (10,), "float32", (start,), (extent,), None, spare)

    held = [[box(0, 4)], [box(0, 7, spare=True)], [box(4, 6)], [box(7, 3, spare=True)]]
    assert [[(part.begin, part.end) for part in parts] for parts in plan(held, 1).parts] == [[(0, 4)], [], [(0, 6)], []]
    with pytest.raises(CheckpointError, match="3 of its elements are held by no rank"):
        plan([[box(0, 7)], [box(7, 3, spare=True)]], 1)
    with pytest.raises(CheckpointError, match="overlap"):
        plan([[box(0, 7)], [box(4, 6)]], 1)


def test_plans_of_the_newest_digests_are_cached() -> None:
    held = [[box_of("/model/x", (10,), "float32")]]
    first = cached_plan(b"first", held, 1, 0)
    assert first == plan(held, 1) and cached_plan(b"first", held, 1, 0) is first
    for number in range(8):
        cached_plan(bytes([number]), held, 1, 0)
    assert cached_plan(b"first", held, 1, 0) is not first


def test_threads_may_plan_at_once() -> None:
    held = [[box_of("/model/x", (10,), "float32")]]

    def body(comm: Any) -> None:
        for number in range(2000):
            cached_plan(bytes([comm.rank, number % 250]), held, 1, 0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert on_threads(4, body) == [None] * 4
    finally:
        sys.setswitchinterval(interval)

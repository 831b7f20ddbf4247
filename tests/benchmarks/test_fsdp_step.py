"""Benchmark of sharded steps at small size on two ranks: its output, checks and result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_helpers import FOLDER, PROVENANCE
from fsdp_step import targets
from fsdp_step_memory import (
    CANDIDATES,
    FULL,
    SMALL,
    Name,
    Task,
    account,
    largest_unit,
    load,
    moments_of_rank,
    parameters_of_rank,
    save,
)
from fsdp_step_samples import (
    ACTIVATIONS,
    GRADIENTS,
    KINDS,
    PARAMETERS,
    REST,
    STATES,
    Extent,
    Resident,
    Sample,
    TensorMemory,
)
from harness.report import Target
from support.jobs import JobStarter
from support.programs import in_one_job

from hpctrain.errors import UsageError

PROGRAM = FOLDER / "fsdp_step.py"
BYTES = Task(SMALL).parameter_bytes
WITHOUT = ",".join(word for word, name in CANDIDATES.items() if name not in (Name.DDP, Name.FSDP))
JSON = ("--quick", "--rounds", "2", "--json", "--without", WITHOUT, "--out")
WHOLE = pytest.mark.benchmark


@WHOLE
@pytest.mark.limit(400)
def test_all_candidates_are_timed_in_one_run_and_weighed_in_separate_ones(launch: JobStarter, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    for word in ("fsdp", "torch-fsdp"):
        done = launch(2, PROGRAM, "--quick", "--memory", word, "--folder", kept, timeout=120)
        assert done.returncode == 0, done
    # Memory held does not depend on earlier candidates: the others share a job, which loads torch once.
    others = [word for word in CANDIDATES if word not in ("fsdp", "torch-fsdp")]
    calls = [("--quick", "--memory", word, "--folder", kept) for word in others]
    done = launch(2, in_one_job(PROGRAM, *calls, (*JSON, tmp_path / "json")), timeout=300)
    assert done.returncode == 0, done
    check_json(json.loads(done.stdout), tmp_path / "json")
    done = launch(2, PROGRAM, "--quick", "--rounds", "2", "--folder", kept, "--out", tmp_path / "r", timeout=120)
    assert done.returncode == 0, done
    (path,) = (tmp_path / "r").glob("fsdp-step-np2-*.json")
    found = json.loads(path.read_text())
    check_times(found)
    check_memory(found["memory"])
    assert PROVENANCE <= found["provenance"].keys()
    assert done.stdout.index("target") < done.stdout.index("median ms") < done.stdout.index("MB of the node")
    assert "each treats the others as ranks of other nodes" in done.stdout
    assert path.with_suffix(".png").stat().st_size > 1000 and path.with_suffix(".svg").exists()


def check_times(found: dict[str, Any]) -> None:
    names = list(CANDIDATES.values())
    assert list(found["seconds"]) == list(found["memory"]) == list(found["optimizers"]) == names
    for time in found["seconds"].values():
        assert 0 < time["min"] <= time["median"] <= time["max"] and time["repeats"] == 2
    drift = found["largest_relative_loss_differences"]
    assert set(drift) == {*names} - {Name.ALONE, Name.TORCH_DDP} and max(drift.values()) < 1e-5
    targets = {one["what"]: one["value"] for one in found["targets"]}
    ratio = found["seconds"][Name.FSDP]["median"] / found["seconds"][Name.DDP]["median"]
    assert targets[f"step: {Name.FSDP} / {Name.DDP} (aim: below 1)"] == pytest.approx(ratio)
    assert len(targets) == 6


def check_memory(found: dict[str, Any]) -> None:
    for one in found.values():
        assert all(one["node"][kind] <= one["most"][kind]["node"] for kind in KINDS)
        assert sum(one["node"][kind] for kind in (*KINDS, REST)) == pytest.approx(one["node"]["total"])
        assert one["most"][ACTIVATIONS]["rank"] > 0
    for name in (Name.ALONE, Name.DDP, Name.TORCH_DDP):
        most = found[name]["most"]
        assert most[PARAMETERS] == {"node": 2 * BYTES, "rank": BYTES}
        assert most[STATES]["rank"] == pytest.approx(2 * BYTES, rel=0.01)
    assert found[Name.ALONE]["most"][GRADIENTS]["rank"] == BYTES
    assert found[Name.TORCH_DDP]["most"][GRADIENTS]["rank"] >= 2 * BYTES  # its buckets are copies
    for name in (Name.ZERO1, Name.ZERO2, Name.FSDP):
        assert found[name]["most"][PARAMETERS]["node"] == pytest.approx(BYTES, rel=0.01)
    for name in (Name.ZERO1, Name.ZERO2, Name.FSDP, Name.PASSING, Name.TORCH_FSDP):
        assert sum(found[name]["moments"]) == pytest.approx(2 * BYTES, rel=0.001)
    for name in (Name.ZERO1, Name.ZERO2, Name.FSDP, Name.PASSING):
        assert sum(found[name]["moments"]) == 2 * BYTES
    unit = found[Name.PASSING]["facts"]["largest_unit"]
    for name in (Name.PASSING, Name.TORCH_FSDP):
        most = found[name]["most"][PARAMETERS]["rank"]
        own = BYTES - 2 * unit  # the model's own unit: at this size it is not negligible
        assert BYTES / 2 + unit <= most <= 1.02 * (BYTES / 2 + unit + own)


def check_json(printed: dict[str, Any], folder: Path) -> None:
    (path,) = folder.glob("*.json")
    assert printed == json.loads(path.read_text())
    assert list(printed["seconds"]) == [Name.DDP, Name.FSDP] and printed["memory"] == {} and printed["quick"]


@pytest.mark.parametrize("key, value", [("ranks", 4), ("parameters", 8), ("batch", 2)])
def test_memory_of_another_model_or_job_is_not_reported(tmp_path: Path, key: str, value: int) -> None:
    facts = {"ranks": 2, "parameters": BYTES, "batch": 1}
    save(tmp_path, {"candidate": Name.FSDP, "facts": facts})
    assert list(load(tmp_path, 2, Task(SMALL))) == [Name.FSDP] and load(None, 2, Task(SMALL)) == {}
    save(tmp_path, {"candidate": Name.FSDP, "facts": {**facts, key: value}})
    with pytest.raises(UsageError, match=f"fsdp.json was measured with {key} = {value}, not"):
        load(tmp_path, 2, Task(SMALL))


# Targets --------------------------------------------------------------------------------------------------------------


FACTS = {"ranks": 4, "batch": 1, "parameters": 1000, "largest_unit": 100, "padding": 5.0}


def memory(name: str, **changes: Any) -> dict[str, Any]:
    most = {PARAMETERS: {"node": 1000.0, "rank": 350.0}}
    return {name: {"facts": FACTS, "most": most, "moments": [500] * 4, **changes}}


def only(times: dict[str, float], figures: dict[str, Any], start: str) -> Target:
    made = targets({name: {"median": seconds} for name, seconds in times.items()}, figures)
    (one,) = [one for one in made if one.what.startswith(start)]
    return one


def test_a_step_is_compared_with_our_ddp_and_with_torch() -> None:
    times = {Name.DDP: 1.0, Name.FSDP: 1.05, Name.TORCH_FSDP: 1.05 * 1.8}
    assert only(times, {}, f"step: {Name.FSDP}").met and only(times, {}, f"step: {Name.TORCH_FSDP}").met
    times[Name.FSDP] = 1.06
    assert not only(times, {}, f"step: {Name.FSDP}").met and not only(times, {}, f"step: {Name.TORCH_FSDP}").met
    assert only(times, {}, f"step: {Name.FSDP}").value == pytest.approx(1.06)


@pytest.mark.parametrize("name, where, fits", [(Name.FSDP, "node", 1050.0), (Name.PASSING, "rank", 367.5)])
def test_parameters_are_compared_with_their_formula(name: str, where: str, fits: float) -> None:
    for value, met in ((fits, True), (fits + 1, False)):
        most = {PARAMETERS: {"node": 0.0, "rank": 0.0, where: value}}
        assert only({}, memory(name, most=most), "memory: parameters").met is met


def test_moments_are_one_copy_and_exceed_a_ranks_share_only_by_padding() -> None:
    ranks = [510, 510, 510, 470]
    assert only({}, memory(Name.ZERO1, moments=ranks), "memory: moments of a rank").met
    assert only({}, memory(Name.ZERO1, moments=ranks), "memory: moments of all").met
    assert not only({}, memory(Name.ZERO1, moments=[511, 510, 510, 469]), "memory: moments of a rank").met
    assert not only({}, memory(Name.ZERO1, moments=[510] * 4), "memory: moments of all").met


def test_without_figures_there_are_no_targets() -> None:
    assert not list(targets({}, {})) and not list(targets({Name.FSDP: {"median": 1.0}}, memory(Name.DDP)))


@pytest.mark.parametrize(
    "names, parameters, moments",
    [
        ((Name.ALONE, Name.DDP, Name.TORCH_DDP), 1000, 2000),
        ((Name.ZERO1, Name.ZERO2, Name.FSDP), 250, 500),
        ((Name.PASSING, Name.TORCH_FSDP), 350, 500),
    ],
)
def test_formulas_give_the_bytes_per_rank(names: tuple[str, ...], parameters: int, moments: int) -> None:
    for name in names:
        assert (parameters_of_rank(name, FACTS), moments_of_rank(name, FACTS)) == (parameters, moments)


@pytest.mark.parametrize("shape, width", [(FULL, 512), (SMALL, 64)])
def test_the_largest_unit_is_a_block(shape: Any, width: int) -> None:
    assert largest_unit(Task(shape)) == 4 * (12 * width**2 + 13 * width)  # as in the paper on GPT-2


def test_the_model_has_the_requested_size() -> None:
    assert Task().parameter_bytes / 4 == pytest.approx(25.5e6, rel=0.01)


# Sums over ranks ----------------------------------------------------------------------------------------------------


NODE_MEMORY = ("0:1 7", 0, 100)


def sample(moment: str, total: int, **held: tuple[int, list[Extent]]) -> Sample:
    kinds: dict[str, Any] = dict.fromkeys(KINDS, TensorMemory())
    kinds.update({kind: TensorMemory(own, tuple(shared)) for kind, (own, shared) in held.items()})
    return Sample(moment, Resident(total, 0), kinds)


def test_node_memory_counts_once_and_each_rank_has_its_part() -> None:
    found = account(
        [[sample("a", 90, parameters=(5, [NODE_MEMORY]))], [sample("a", 70, parameters=(7, [NODE_MEMORY]))]], [10, 10]
    )
    assert found["node"] == {PARAMETERS: 112, GRADIENTS: 0, STATES: 0, ACTIVATIONS: 0, REST: 28, "total": 140}
    assert found["rank"] == {PARAMETERS: 55, GRADIENTS: 0, STATES: 0, ACTIVATIONS: 0, REST: 25, "total": 80}


def test_separate_memory_adds_up() -> None:
    ranks = [[sample("a", 200, gradients=(0, [("0:1 7", begin, begin + 50)]))] for begin in (0, 50)]
    assert account(ranks, [0, 0])["node"][GRADIENTS] == 100


def test_memory_of_parameters_does_not_count_for_gradients() -> None:
    one = sample("a", 200, parameters=(0, [NODE_MEMORY]), gradients=(1, [("0:1 7", 80, 120)]))
    assert account([[one]], [0])["node"][GRADIENTS] == 21


def test_the_peak_is_at_one_moment_and_the_maximum_of_each_kind_at_its_own() -> None:
    ranks = [
        [sample("forward", 100, activations=(60, [])), sample("backward", 150, gradients=(80, []))],
        [sample("forward", 170, activations=(70, [])), sample("backward", 130, gradients=(90, []))],
    ]
    found = account(ranks, [0, 0])
    assert (found["moment"], found["samples"]) == ("backward", 2)
    assert found["node"]["total"] == 280 and found["node"][GRADIENTS] == 170 and found["node"][ACTIVATIONS] == 0
    assert found["rank"]["total"] == 170 and found["rank"][ACTIVATIONS] == 70  # the other rank, at another moment
    assert found["most"][ACTIVATIONS] == {"node": 130, "rank": 70}
    assert found["most"][GRADIENTS] == {"node": 170, "rank": 90}


def test_samples_of_different_moments_are_not_added_up() -> None:
    with pytest.raises(AssertionError):
        account([[sample("forward", 1)], [sample("backward", 1)]], [0, 0])
    with pytest.raises(ValueError):
        account([[sample("forward", 1)], []], [0, 0])

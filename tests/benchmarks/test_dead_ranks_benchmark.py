"""Benchmark of dead ranks: its figures, its definition of a violation, and a small run under Open MPI."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dead_ranks
import pytest
from dead_ranks import STEPS, Kill, Killed, Violation, kills_table, seconds_of, targets
from support.tolerance import needs_tolerance

LOSSES = [float(step) for step in range(STEPS)]


def killed(kind: str) -> Killed:
    found = Killed.__new__(Killed)
    rows = [{"step": step, "loss": loss, "fingerprint": "a"} for step, loss in enumerate(LOSSES, 1)]
    vars(found).update(_kind=kind, _rows=rows, _step=0.01)
    return found


def written(folder: Path, losses: list[float], **last: Any) -> Path:
    rows = [{"step": step, "loss": loss, "unix_time": 100.0 + step} for step, loss in enumerate(losses, 1)]
    rows[-1] |= {"fingerprint": "a", **last}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.json").write_text(json.dumps({"attempts": [{"recoveries": [{"ranks": [2], "step": 12}]}]}))
    return folder


def test_the_time_of_a_kill_ends_with_the_step_in_which_the_others_continue(tmp_path: Path) -> None:
    (kill,) = killed("plain").checked(written(tmp_path, LOSSES), 0, "", [2], [0.5], [110.4])
    assert kill == Kill("plain", 2, 0.5, 3, pytest.approx(1.59), True)  # not step 11, which the dead rank has completed
    (none,) = killed("plain").checked(written(tmp_path, LOSSES), 0, "", [2], [0.5], [None])
    assert none.seconds is None and none.continued


def test_losses_that_differ_and_silent_ends_are_violations(tmp_path: Path) -> None:
    other = [*LOSSES[:-1], LOSSES[-1] * 1.01]
    with pytest.raises(Violation, match="loss 120.19 in step 120, not 119.0"):
        killed("plain").checked(written(tmp_path, other), 0, "", [0], [0.1], [101.0])
    close = [*LOSSES[:-1], LOSSES[-1] * (1 + 1e-6)]
    killed("plain").checked(written(tmp_path, close), 0, "", [0], [0.1], [101.0])
    with pytest.raises(Violation, match="reproducible: loss"):
        killed("reproducible").checked(written(tmp_path, close), 0, "", [0], [0.1], [101.0])
    with pytest.raises(Violation, match="other weights"):
        killed("reproducible").checked(written(tmp_path, LOSSES, fingerprint="b"), 0, "", [0], [0.1], [101.0])
    with pytest.raises(Violation, match="exit 0 with 119 steps"):
        killed("plain").checked(written(tmp_path, LOSSES[:-1]), 0, "", [0], [0.1], [101.0])
    with pytest.raises(Violation, match="exit 1 with 120 steps"):
        killed("plain").checked(written(tmp_path, LOSSES), 1, "Segmentation fault", [0], [0.1], [101.0])
    said = "hpctrain: rank 1 of 4 on n in step 3 ends the job: rank 0 on n has died"
    (kill,) = killed("plain").checked(written(tmp_path, LOSSES[:3]), 1, said, [0], [0.1], [101.0])
    assert not kill.continued and kill.seconds is None
    said = "rank 3 of 4 on n in step 3 ends the job: CommunicationError: no replica of the model is left whose ranks"
    (kill,) = killed("pipe").checked(written(tmp_path, LOSSES[:3]), 1, said, [0], [0.1], [101.0])
    assert not kill.continued
    (tmp_path / "failure.json").write_text(
        '{"reason": "rank 0 on n has died, and the other ranks died while they recovered"}'
    )
    (kill,) = killed("plain").checked(written(tmp_path, LOSSES[:3]), 0, "", [0], [0.1], [101.0])
    assert not kill.continued and kill.together


def test_an_average_without_the_samples_of_a_dead_rank_may_differ(tmp_path: Path) -> None:
    other = [*LOSSES[:-1], LOSSES[-1] * 1.01]
    (kill,) = killed("plain").checked(written(tmp_path, other, lost_ranks=1), 0, "", [0], [0.1], [101.0])
    assert kill.continued


def test_figures_are_those_of_all_kills() -> None:
    kills = [Kill("plain", 0, 0.1, 3, second, True) for second in (0.1, 0.2, 0.3)]
    kills += [Kill("dropout", 1, 0.1, 3, None, False), Kill("pipe", 1, 0.1, 3, None, False)]
    assert seconds_of(kills) == [0.1, 0.2, 0.3]
    pairs = {
        "cost": [([1.2, 1.01], [1.0, 3.0]), ([1.02, 9.0], [2.0, 1.0])],  # the fastest of each step
        "cost fsdp": [([1.03], [1.0])],
        "cost fsdp with replicate": [([1.03], [1.0])],
    }
    found = {each.what: (each.value, each.met) for each in targets(kills, pairs, {"short": [None, 0.4, 0.6]})}
    assert found["kills after which the job continued"] == (3, False)
    assert found["the same or no replica left: pipelines, tensor parallelism"] == (1, True)
    assert "kills of jobs whose ranks all died within a recovery" not in found
    assert found["torchft, short timeouts, relative to this median"] == (pytest.approx(3.0), True)
    assert found["seconds to the next step, without the step: median"] == (0.2, True)
    assert found["cost without failures, of a step: ddp"] == (pytest.approx(0.015), True)
    assert found["cost without failures, of a step: fsdp"] == (pytest.approx(0.03), False)
    assert found["cost without failures, of a step: fsdp with replicate = 10"] == (pytest.approx(0.03), True)
    shown = kills_table(kills, {"short": [None, 0.4]})
    assert "plain" in shown and "0.200" in shown and "torchft, short timeouts" in shown and "0.400" in shown


@needs_tolerance
@pytest.mark.limit(200)
def test_a_few_ranks_are_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = SimpleNamespace(kills=1, seed=3, rounds=0, torchft=0, out=tmp_path, json=False)
    assert dead_ranks.run(args) == 0  # type: ignore[arg-type]
    content = json.loads((tmp_path / "dead-ranks-np4-openmpi.json").read_text())
    assert len(content["kills"]) >= 1 and content["complete"] and content["targets"][0]["met"]
    assert (tmp_path / "dead-ranks-np4-openmpi.svg").exists() and "continued" in capsys.readouterr().out

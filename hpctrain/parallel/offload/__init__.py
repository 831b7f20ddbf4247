"""Keep on the host what a device has no room for: optimizer states, parameters, activations."""

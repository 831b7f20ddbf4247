"""Storage of served parameters and optimizer states, with updates in place."""

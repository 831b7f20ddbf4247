"""Parts of the checkpoint benchmark: candidates for saving and loading, timing, and results."""

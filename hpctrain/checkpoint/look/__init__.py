"""Look into checkpoints, compare them, draw them, and carry them to other formats and back."""

"""Be one checkpoint file: what it holds, how it is laid out, written by one process, and read; without torch."""

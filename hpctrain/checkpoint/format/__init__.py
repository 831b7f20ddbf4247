"""The checkpoint file: its contents and layout, a writer for one process, and a reader; without torch."""

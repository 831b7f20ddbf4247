"""Receipt of a run (``run.json``): writing, reading, accounting of its attempts, and text."""

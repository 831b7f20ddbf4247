"""Compare the ways to send microbatches through the stages of a model: how long a step takes, and what it waits."""

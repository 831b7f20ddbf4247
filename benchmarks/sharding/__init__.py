"""Compare the ways to share a training step among ranks: how long it takes, and what memory it needs."""

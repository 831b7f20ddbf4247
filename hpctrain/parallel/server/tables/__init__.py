"""Take tables by the rows that a worker looks up and updates."""

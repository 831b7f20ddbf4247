"""Sparse embedding tables: only the rows that a worker looks up and updates are communicated."""

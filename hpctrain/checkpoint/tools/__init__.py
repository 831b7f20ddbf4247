"""Inspection of checkpoints: contents, comparison, plots, and conversion to and from other formats."""

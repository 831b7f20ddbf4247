"""Continuation of a run without ranks that have died."""

"""Trace of selected steps of a run: recording on every rank, and reading."""

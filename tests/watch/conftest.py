"""Fixture of run folders."""

from support.watched_runs import make_run  # noqa: F401

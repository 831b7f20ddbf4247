"""Measure how stale updates are, and what exchanges take."""

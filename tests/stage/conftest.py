"""Environments for tests of staging."""

from __future__ import annotations

from support.environments import make_environment  # noqa: F401  (a fixture)

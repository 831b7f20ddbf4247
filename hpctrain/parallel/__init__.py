"""Parallel training strategies, one per module or sub-package, all attached to the user's own module."""

"""The version, in a module that packaging can read without importing anything else."""

__version__ = "0.1.0"

"""Collectives in memory that the ranks of a node share, and in two levels over several nodes."""

"""Collective writing of one file: the plan, the steps, and writers inside the rank or in the background."""

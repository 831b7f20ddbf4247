"""Measure communication: who takes part, what each does, how the turns are timed, and what the figures mean."""

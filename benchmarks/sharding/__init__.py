"""Data-parallel strategies of a training step: candidates, time, and memory."""

"""Helpers that are independent of training: files, text for terminals, child processes."""

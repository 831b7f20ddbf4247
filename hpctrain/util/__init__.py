"""Helpers that know nothing of training: files, text for terminals, child processes."""

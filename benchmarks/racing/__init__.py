"""Asynchronous strategies compared with synchronous training, to the same accuracy on the same data."""

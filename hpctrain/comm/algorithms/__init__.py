"""Algorithms that send messages over any transport, one module each, written as generators of steps."""

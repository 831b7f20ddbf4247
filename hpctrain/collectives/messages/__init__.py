"""Algorithms that go by messages over any transport: each a file, as the steps that it takes."""

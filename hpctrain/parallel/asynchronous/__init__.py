"""Asynchronous data parallelism, with updates per worker: parameter server, Hogwild, elastic averaging (EASGD)."""

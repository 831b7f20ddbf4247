"""Guards against computations that use parts of parameters as if they were whole."""

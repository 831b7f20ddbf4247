"""Guards against computing with parts of parameters as if they were whole."""

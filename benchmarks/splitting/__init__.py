"""Compare the ways to split the layers of a model over ranks: how long a step takes."""

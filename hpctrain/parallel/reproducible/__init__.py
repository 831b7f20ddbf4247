"""Training whose results do not depend on the number of ranks."""

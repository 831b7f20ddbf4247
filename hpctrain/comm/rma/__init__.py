"""Remote memory access (one-sided communication): ranks access each other's memory while its owners compute."""

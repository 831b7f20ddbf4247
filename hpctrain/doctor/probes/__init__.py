"""Be programs that load one library each and print what it says of itself, as one line of JSON."""

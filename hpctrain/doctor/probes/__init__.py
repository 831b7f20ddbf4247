"""Programs that load one library each and print its properties as one line of JSON."""

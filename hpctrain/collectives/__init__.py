"""Say in what order bytes travel: one algorithm a file, and the communicator that picks among them."""

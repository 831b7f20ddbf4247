"""Split the work of training over ranks: one strategy a room or file, all attached to the user's own module."""

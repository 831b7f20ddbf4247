"""Write one file from many processes: who writes what, in which moves, in the rank or beside it."""

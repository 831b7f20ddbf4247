"""Terminal view of runs, from the files in their folders (``hpctrain watch``). Needs neither torch nor MPI."""

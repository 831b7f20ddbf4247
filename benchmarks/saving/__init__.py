"""The parts of the checkpoint benchmark: who saves and loads, how it is timed, what comes out."""

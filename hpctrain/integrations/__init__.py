"""Training loops of other libraries in jobs: walltime, requests, checkpoints, metrics and receipts of ``job.run``.

Each module imports its library at first use; ``program_run`` needs none.
"""

"""Job scripts for Slurm and PBS: rendering, checks and submission. Standard library only: runs on a login node.

All functions except ``submit`` are pure: they take a request and a site's profile, and return the
text of a script.
"""

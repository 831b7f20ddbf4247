"""Make job scripts for Slurm and PBS, check them, and submit them. Standard library only: runs on a login node.

Everything but ``submit`` is a pure function: a request and a site's profile in, the text of a script out.
"""

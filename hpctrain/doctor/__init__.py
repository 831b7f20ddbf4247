"""Diagnosis of the environment of a job: checks on a login node, and measurements by the ranks of an allocation."""

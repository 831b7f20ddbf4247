"""Samples of different sizes in HDF5 files: layout, reading, batches and writing."""

"""Data sets in the formats of other libraries: WebDataset tar files and MDS shards."""

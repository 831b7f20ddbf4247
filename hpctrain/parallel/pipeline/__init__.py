"""Cut a model into stages that work on microbatches one behind the other."""

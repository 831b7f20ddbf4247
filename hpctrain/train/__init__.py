"""Training jobs: settings, startup, the training loop, monitoring and shutdown."""

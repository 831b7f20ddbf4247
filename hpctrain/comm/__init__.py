"""Communication: transports, collective algorithms and their selection, and the communicator that programs use."""

"""Run a training job: settings, bootstrap, the loop, its life and its end."""

"""Models, cases and measurement of the benchmark that compares memory forecasts with training."""

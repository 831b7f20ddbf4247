"""Forecasts of memory against what training takes: models, cases, and the measurement."""

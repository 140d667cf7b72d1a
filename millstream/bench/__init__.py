"""Measurements of the pipeline with the simulated engine. Each starts a stack of its own."""

"""The engine's forward pass on GPUs: paged cache, CUDA graphs, tensor parallelism.

What is decided, and what no GPU has proved yet: docs/decisions/gpu-engine.md.
"""

"""The engine's kernels for processors with AVX2: C++ that the machine's own compiler builds, called by ctypes."""

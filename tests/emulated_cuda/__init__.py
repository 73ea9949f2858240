"""CUDA kernels on the CPU, for tests: see README.md."""

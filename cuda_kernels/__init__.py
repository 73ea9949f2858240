"""The CUDA room: raw CUDA kernels through CuPy, and Numba CUDA kernels; needs a GPU and an extra, cuda12 or cuda13."""

if __name__ != "sdm_lite.cuda_kernels":
    raise ImportError("this folder is the package sdm_lite.cuda_kernels: install sdm-lite and import that")

from .devices import unavailable

__all__ = ["unavailable"]

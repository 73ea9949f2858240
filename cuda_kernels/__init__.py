"""The CUDA room. It holds no kernels in this release, so every door of it raises with the reason."""

if __name__ != "sdm_lite.cuda_kernels":
    raise ImportError("this folder is the package sdm_lite.cuda_kernels: install sdm-lite and import that")

__all__ = ["unavailable"]


def unavailable() -> str | None:
    """Return why no CUDA call can be served."""
    return "the cuda room has no kernels in this release: move the arrays to the CPU"

"""Reverse-mode differentiation over NumPy (and CuPy) arrays, small enough to read, without torch.

>>> import numpy as np
>>> from sdm_lite.autograd import Tensor, softplus
>>> x = Tensor(np.array([0.0, 1.0], dtype=np.float32), requires_grad=True)
>>> y = softplus(x) * 2
>>> y.backward(np.ones(2, dtype=np.float32))
>>> x.grad
array([1.       , 1.4621172], dtype=float32)
"""

if __name__ != "sdm_lite.autograd":
    raise ImportError("this folder is the package sdm_lite.autograd: install sdm-lite and import that")

from .arithmetic import add, div, exp, log, matmul, mean, mul, neg, power, sub, sum
from .check import GradientError, check_grads
from .neural import cross_entropy, embedding, rms_norm, sigmoid, silu, softmax, softplus
from .shaping import concatenate, index, reshape, transpose
from .tape import Context, Function, Tensor, no_grad

__all__ = [
    "Context",
    "Function",
    "GradientError",
    "Tensor",
    "add",
    "check_grads",
    "concatenate",
    "cross_entropy",
    "div",
    "embedding",
    "exp",
    "index",
    "log",
    "matmul",
    "mean",
    "mul",
    "neg",
    "no_grad",
    "power",
    "reshape",
    "rms_norm",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "sub",
    "sum",
    "transpose",
]

"""Every primitive of the tape, with arrays to try it on."""

from __future__ import annotations

import numpy as np

from sdm_lite import autograd as ag

RNG = np.random.default_rng(7)
IDS = np.array([[0, 2, 2], [4, 0, 2]])
TARGETS = np.array([[0, 2, -100], [4, 0, 2]])


def normal(*shape):
    return RNG.standard_normal(shape)


def positive(*shape):
    return RNG.uniform(0.5, 2.0, shape)


#: name -> (function of tensors, arrays); every primitive, with broadcasting and odd ranks
PRIMITIVES = {
    "add": (ag.add, [normal(2, 3), normal(2, 3)]),
    "add_broadcast": (ag.add, [normal(4, 1, 3), normal(2, 1)]),
    "add_scalar_operand": (ag.add, [normal(2, 3), normal()]),
    "sub": (ag.sub, [normal(2, 3), normal(3)]),
    "mul": (ag.mul, [normal(2, 1, 3), normal(4, 1)]),
    "mul_same": (lambda x: x * x, [normal(3)]),
    "div": (ag.div, [normal(2, 3), positive(3)]),
    "neg": (ag.neg, [normal(3)]),
    "power": (lambda x: x**3, [normal(3)]),
    "power_fraction": (lambda x: x**-0.5, [positive(3)]),
    "exp": (ag.exp, [normal(2, 2)]),
    "log": (ag.log, [positive(2, 2)]),
    "matmul": (ag.matmul, [normal(3, 4), normal(4, 2)]),
    "matmul_batch_matrix": (ag.matmul, [normal(2, 3, 4), normal(4, 5)]),
    "matmul_batch_batch": (ag.matmul, [normal(2, 1, 3, 4), normal(3, 4, 2)]),
    "matmul_matrix_batch": (ag.matmul, [normal(3, 4), normal(2, 4, 2)]),
    "matmul_vector_vector": (ag.matmul, [normal(4), normal(4)]),
    "matmul_batch_vector": (ag.matmul, [normal(2, 3, 4), normal(4)]),
    "matmul_vector_batch": (ag.matmul, [normal(4), normal(2, 4, 3)]),
    "sum": (ag.sum, [normal(2, 3)]),
    "sum_axes": (lambda x: ag.sum(x, axis=(0, -1)), [normal(2, 3, 4)]),
    "mean": (ag.mean, [normal(2, 3)]),
    "mean_axis": (lambda x: ag.mean(x, axis=1, keepdims=True), [normal(2, 3, 4)]),
    "sigmoid": (ag.sigmoid, [3 * normal(7)]),
    "softplus": (ag.softplus, [3 * normal(7)]),
    "silu": (ag.silu, [3 * normal(7)]),
    "softmax": (ag.softmax, [normal(2, 5)]),
    "softmax_axis": (lambda x: ag.softmax(x, axis=0), [normal(3, 5)]),
    "rms_norm": (ag.rms_norm, [normal(2, 3, 5)]),
    "rms_norm_gain": (ag.rms_norm, [normal(2, 5), normal(5)]),
    "embedding": (lambda table: ag.embedding(table, IDS), [normal(5, 3)]),
    "cross_entropy": (lambda x: ag.cross_entropy(x, TARGETS), [normal(2, 3, 5)]),
    "reshape": (lambda x: ag.reshape(x, (3, -1)), [normal(2, 6)]),
    "transpose": (lambda x: ag.transpose(x, (1, -1, 0)), [normal(2, 3, 4)]),
    "slice": (lambda x: x[1:, None, ..., ::-2], [normal(3, 2, 5)]),
    "integer": (lambda x: x[-1], [normal(3, 2)]),
    "index_array": (lambda x: x[IDS, 1], [normal(5, 2)]),
    "index_mask": (lambda x: x[np.array([True, False, True])], [normal(3, 2)]),
    "concatenate": (lambda a, b: ag.concatenate([a, b, np.ones((2, 1))], axis=1), [normal(2, 3), normal(2, 2)]),
    "several_outputs": (lambda x: (ag.exp(x), x * 2, IDS), [normal(3)]),
    "diamond": (lambda x: ag.exp(x) * x + ag.exp(x), [normal(3)]),
}

"""Every kernel compiles for every architecture, without a GPU: no spills, no stack, within the budget of seconds."""

from __future__ import annotations

import os

import kernel_figures
import pytest

from sdm_lite.cuda_kernels import modules

pytestmark = pytest.mark.skipif(kernel_figures.missing() is not None, reason=kernel_figures.missing() or "")

#: the rest takes minutes: SDM_LITE_CUDA_COMPILE=all, and the command that writes docs/kernels.md
ALL = [(file, expression) for file, expressions in modules.INSTANCES.items() for expression in expressions]
WHICH = ALL if os.environ.get("SDM_LITE_CUDA_COMPILE") == "all" else kernel_figures.CHECKED


def test_what_is_checked_is_the_layer_and_the_bags():
    layer, checked = set(kernel_figures.LAYER), set(kernel_figures.CHECKED)
    assert len(layer) == 12 and layer < checked < set(ALL)
    assert {e for _, e in checked - layer} == {
        f"embedding_bag_{name}<float>" for name in ("forward", "values_backward", "weights_backward")
    }


@pytest.mark.parametrize("arch", kernel_figures.ARCHITECTURES)
@pytest.mark.parametrize(("file", "expression"), WHICH, ids=[expression for _, expression in WHICH])
def test_no_spills_and_no_stack(file, expression, arch):
    found = kernel_figures.figures(file, expression, arch)
    assert found.registers > 0
    assert found.spill_bytes == 0 and found.stack_bytes == 0, found


def test_an_error_names_the_kernel_and_the_line(monkeypatch):
    broken = '#line 1 "plan.cu"\n#line 7 "plan.cuh"\nthis is no C++;\n'
    monkeypatch.setattr(modules, "source", lambda file: broken)
    with pytest.raises(kernel_figures.CompileError, match=r"(?s)plan_links<256>.*plan\.cuh\(7\)"):
        kernel_figures._compile("plan.cu", "plan_links<256>", ("-arch=sm_90",))


def test_spills_would_be_seen(monkeypatch):
    """A kernel that needs more registers than it may have: the figures say so, or the tests above prove nothing."""
    source = """
    template <int N> __global__ void __launch_bounds__(1024) hungry(float* x) {
      float held[N];
      #pragma unroll
      for (int i = 0; i < N; ++i) held[i] = x[threadIdx.x * N + i];
      #pragma unroll
      for (int j = 1; j < N; ++j)
        #pragma unroll
        for (int i = 0; i < N; ++i) held[i] += held[(i * j) % N] * held[(i + j) % N];
      #pragma unroll
      for (int i = 0; i < N; ++i) x[threadIdx.x * N + i] = held[i];
    }
    """
    monkeypatch.setattr(modules, "source", lambda file: source)
    options = ("-arch=sm_90", "--ptxas-options=-v")
    assert kernel_figures._compile("hungry.cu", "hungry<96>", options).spill_bytes > 0
    assert kernel_figures._compile("hungry.cu", "hungry<2>", options).spill_bytes == 0

"""What torch asks of an op: opcheck, checkpointing, copies, threads, distributed training."""

from __future__ import annotations

import copy
import datetime
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from cases import make_case
from torch.utils.checkpoint import checkpoint
from torch_memory import Memory, gradients, leaves_of, rule, same_bits, tensors, upstream

import sdm_lite
from sdm_lite import rooms, torch_bridge_ops

ROOMS = [name for name, state in rooms.backends().items() if state == "ready"]
SMALL = make_case("plain")
NP = {torch.float32: np.float32, torch.float64: np.float64}


FAST_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
ALL_CHECKS = (*FAST_CHECKS, "test_aot_dispatch_dynamic")  # the last takes seconds


def operands(*, final, save, grad):
    named = tensors(make_case("packed"), grad=grad)
    return (*named.values(), "reference", "shared", "hybrid", 2.3, None, True, final, save)


@pytest.mark.parametrize("training", [False, True])
def test_opcheck_delta(training):
    call = operands(final=training, save=training, grad=training)
    torch.library.opcheck(torch_bridge_ops.sparse_delta_rule, call, test_utils=ALL_CHECKS if training else FAST_CHECKS)


def test_opcheck_delta_backward_and_update():
    call = operands(final=False, save=True, grad=False)
    _, *saved = torch_bridge_ops.sparse_delta_rule(*call)
    state = call[8]
    dreadings, dfinal = upstream(make_case("packed"))
    more = (list(state.shape), state.dtype, *call[9:14], [True, False, True, True, False, True])
    torch.library.opcheck(torch_bridge_ops.sparse_delta_rule_backward, (*call[:8], saved, dreadings, dfinal, *more))
    torch.library.opcheck(
        torch_bridge_ops.sparse_delta_rule_backward, (*call[:8], saved, dreadings, None, *more), test_utils=FAST_CHECKS
    )
    torch.library.opcheck(torch_bridge_ops.sparse_delta_rule_, (*call[:8], state, "reference", "per_slot", True))


def test_opcheck_addressing():
    scores = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(0), requires_grad=True)
    torch.library.opcheck(torch_bridge_ops.product_key_topk, (scores, 4, (5, 4), "reference"))
    _, slots = torch_bridge_ops.product_key_topk(scores, 4, (5, 4), "reference")
    back = (torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)), slots, (5, 4), "reference")
    torch.library.opcheck(torch_bridge_ops.product_key_topk_backward, back)
    torch.library.opcheck(torch_bridge_ops.hash_slots, (torch.arange(6).view(2, 3), 10, 4, -3, "reference"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    model = Memory()
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    want = gradients(model(x).square().sum(), [x, *model.parameters()])
    checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    assert same_bits([x.grad, *(p.grad for p in model.parameters())], want)


def test_deepcopy_of_a_used_model():
    model, x = Memory(), torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    want = gradients(model(x).square().sum(), model.parameters())
    twin = copy.deepcopy(model)
    assert same_bits(gradients(twin(x).square().sum(), twin.parameters()), want)


def test_four_python_threads_give_the_same_bits():
    backend, threads = ROOMS[-1], torch.get_num_threads()
    want, found = None, []

    def work():
        named = tensors(SMALL)
        for _ in range(5):
            outputs = rule(named, output_final_state=True, backend=backend)
            found.append([*outputs, *gradients(outputs, leaves_of(named), grad_outputs=upstream(SMALL))])

    work()
    want = found.pop()
    crew = [threading.Thread(target=work) for _ in range(4)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    assert len(found) == 24 and all(same_bits(got, want) for got in found)
    assert torch.get_num_threads() == threads


def test_distributed_data_parallel(tmp_path):
    # two processes over gloo, each with half of the batch, end with the gradients of the whole
    here = pathlib.Path(__file__).resolve()
    environment = {**os.environ, "PYTHONPATH": str(here.parent / "support"), "OMP_NUM_THREADS": "1"}
    other = subprocess.Popen([sys.executable, str(here), str(tmp_path)], env=environment, cwd=tmp_path)
    try:
        mine = ddp_rank(tmp_path, 0)
        assert other.wait(timeout=60) == 0
    finally:
        other.kill()
    model = Memory()
    want = gradients(model(ddp_batch()).square().mean(), model.parameters())
    assert same_bits(mine, torch.load(tmp_path / "other.pt"))
    for a, b in zip(mine, want):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # the mean of two means: another order of sums


def ddp_batch():
    return torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))


def ddp_rank(folder: pathlib.Path, rank: int) -> list[torch.Tensor]:
    # a slow machine takes its time to import torch in the other process
    options = {"init_method": f"file://{folder}/meet", "timeout": datetime.timedelta(seconds=120)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2, **options)
    try:
        model = torch.nn.parallel.DistributedDataParallel(Memory())
        model(ddp_batch()[2 * rank : 2 * rank + 2]).square().mean().backward()
        torch.distributed.barrier()  # neither leaves while the other still talks
        return [p.grad for p in model.parameters()]
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.save(ddp_rank(pathlib.Path(sys.argv[1]), 1), f"{sys.argv[1]}/other.pt")


# ---- calls without the dispatcher --------------------------------------------------------------------------------


class _Names(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the ops that pass by."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_whoever_looks_at_ops_sees_them():
    scores = torch.randn(3, 9)
    with _Names() as seen:
        watched = sdm_lite.product_key_topk(scores, 4, factors=(5, 4))
    assert "sdm_lite::product_key_topk" in seen.names
    with torch.autograd.profiler.profile() as profile:
        sdm_lite.product_key_topk(scores, 4, factors=(5, 4))
    assert "sdm_lite::product_key_topk" in {event.name for event in profile.function_events}
    assert all(map(torch.equal, watched, sdm_lite.product_key_topk(scores, 4, factors=(5, 4))))


def test_a_call_that_nobody_looks_at_goes_past_the_dispatcher(monkeypatch):
    scores = torch.randn(3, 9, requires_grad=True)

    def refuse(*operands):
        raise AssertionError("dispatched")

    key = torch_bridge_ops.product_key_topk
    monkeypatch.setattr(type(key), "__call__", refuse)
    with torch.no_grad():
        sdm_lite.product_key_topk(scores, 4, factors=(5, 4))
    with pytest.raises(AssertionError, match="dispatched"):  # a derivative is wanted
        sdm_lite.product_key_topk(scores, 4, factors=(5, 4))


def test_a_write_in_place_is_noticed_by_a_backward_that_saved_the_state():
    slots, one = torch.zeros(1, 1, 1, 1, dtype=torch.int32), torch.ones(1, 1, 1, 1)
    state, factor = torch.zeros(1, 1, 2, 1), torch.ones(1, requires_grad=True)
    product = factor * state
    sdm_lite.sparse_delta_rule_(one, slots, one, -one[..., 0], one[..., 0], slots, one, state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_gradients_that_torch_keeps_in_another_form():
    table = torch.randn(10, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    slots, weights = torch.tensor([[1, 3], [2, 2]]), torch.ones(2, 2)
    y = sdm_lite.embedding_bag(table, slots, weights)
    one = torch.ones_like(y)
    negated = torch.autograd.grad(y, table, torch.complex(one, -one).conj().imag, retain_graph=True)[0]  # a lazy minus
    plain = torch.autograd.grad(y, table, one, retain_graph=True)[0]
    assert torch.equal(negated, plain)
    several = torch.autograd.grad(y, table, torch.stack([one, 2 * one]), is_grads_batched=True)[0]
    assert torch.equal(several, torch.stack([plain, 2 * plain]))
    zeros = sdm_lite.product_key_topk(torch._efficientzerotensor((2, 8)), 3)[0]
    assert torch.equal(zeros, torch.zeros(2, 3))


def test_a_repeated_step_refuses_a_lazy_minus():
    slots, one, gate = torch.zeros(1, 1, 1, dtype=torch.int32), torch.ones(1, 1, 1), torch.zeros(1, 1)
    state = sdm_lite.MemoryState(torch.zeros(1, 4, 1), 1)
    state.step(one, slots, one, gate, gate + 1, slots, one)
    before = state.dense().clone()
    with pytest.raises(sdm_lite.SdmError, match="resolve_neg"):
        state.step(torch.complex(one, one).conj().imag, slots, one, gate, gate + 1, slots, one)
    assert torch.equal(state.dense(), before)

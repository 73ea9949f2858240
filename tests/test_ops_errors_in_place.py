"""A state that cannot be written in place is refused, and nothing of it has changed."""

from __future__ import annotations

import cases
import numpy as np
import pytest
from foreign import ForeignArray
from refusals import FLOAT_ARGUMENTS, OPS, SIZES, call_of, refuse_delta

import sdm_lite
from sdm_lite import DtypeError, ValueRangeError

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_states_that_cannot_be_written_on(backend):
    named = call_of()
    named["state"].flags.writeable = False
    refuse_delta("in_place", named, "state", ValueRangeError, "read-only", backend=backend)
    named = {key: ForeignArray(x) for key, x in named.items()}
    refuse_delta("in_place", named, "state", ValueRangeError, "read-only", backend=backend)

    one = np.zeros((3, 17, 7), np.float32)
    sequences = np.lib.stride_tricks.as_strided(one, (2, 3, 17, 7), (0, *one.strides))
    line = np.zeros(2 * 3 * 17 * 7, np.float32)
    sliding = np.lib.stride_tricks.as_strided(line, (2, 3, 17, 7), (4 * 3 * 17 * 6, 4 * 17 * 6, 4 * 6, 4))
    for state in (sequences, sliding):
        assert state.flags.writeable
        refuse_delta("in_place", call_of() | {"state": state}, "state", ValueRangeError, "overlap", backend=backend)
        tensors = {key: torch.from_numpy(x) for key, x in call_of().items()}
        base = torch.from_numpy(one if state is sequences else line)
        tensors["state"] = base.as_strided(state.shape, [n // 4 for n in state.strides])
        refuse_delta("in_place", tensors, "state", ValueRangeError, "overlap", backend=backend)


@pytest.mark.parametrize("argument", FLOAT_ARGUMENTS)
def test_the_in_place_form_has_no_gradient(argument):
    named = {key: torch.from_numpy(x) for key, x in call_of().items()}
    named[argument].requires_grad_()
    refuse_delta("in_place", named, argument, ValueRangeError, "gradient")
    with torch.no_grad():
        if argument == "state":
            refuse_delta("in_place", named, argument, ValueRangeError, "gradient")
        else:
            sdm_lite.sparse_delta_rule_(*named.values())


def test_the_in_place_form_takes_no_tape_tensor():
    from sdm_lite.autograd import Tensor

    named = call_of()
    named["values"] = Tensor(named["values"])
    refuse_delta("in_place", named, "state", DtypeError, "tape")


@pytest.mark.parametrize("wrong", ["0", "-1", "two", "1.5"])
def test_a_wrong_thread_count(wrong, monkeypatch):
    """Calls large enough for threads; smaller ones never look."""
    case = cases.make_case(SIZES, dtype=np.float32, T=50, D=200)
    state = case.state.tobytes()
    monkeypatch.setenv("SDM_LITE_NUM_THREADS", wrong)
    for op in OPS.values():
        with pytest.raises(ValueRangeError, match=f"SDM_LITE_NUM_THREADS: expected .*, got '{wrong}'"):
            getattr(sdm_lite, op)(*case.arguments())
    assert case.state.tobytes() == state
    with pytest.raises(ValueRangeError, match="SDM_LITE_NUM_THREADS"):
        sdm_lite.product_key_topk(np.zeros((500, 8), np.float32), 4)

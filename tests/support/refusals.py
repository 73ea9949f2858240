"""Calls of the public ops that must be refused: by name, changed at one place, held to the form of all errors."""

from __future__ import annotations

import re

import cases
import numpy as np
import pytest
from foreign import ForeignArray

import sdm_lite
from sdm_lite import SdmError

torch = pytest.importorskip("torch")

OPS = {"functional": "sparse_delta_rule", "in_place": "sparse_delta_rule_"}
ARGUMENTS = ("values", "write_slots", "write_weights", "log_decay", "beta", "read_slots", "read_weights", "state")
FLOAT_ARGUMENTS = ("values", "write_weights", "log_decay", "beta", "read_weights", "state")
KINDS = {"numpy": lambda x: x, "torch": torch.from_numpy, "foreign": ForeignArray}
#: every size differs, so that no mistake can pass for another axis
SIZES = cases.DeltaFields("errors", B=2, T=4, H=3, N=17, D=7, W=6, R=5)


def call_of(**changes) -> dict:
    """Return the call's arrays by name, in int64 and float32, some of them changed by a function."""
    named = dict(zip(ARGUMENTS, cases.make_case(SIZES, dtype=np.float32).arguments()))
    named["write_slots"], named["read_slots"] = (named[n].astype(np.int64) for n in ("write_slots", "read_slots"))
    for name, change in changes.items():
        named[name] = change(named[name].copy())
    return named


def refuse(function, op: str, argument: str, error: type, *words: str) -> str:
    """Call; assert the error's class, its form, the argument it names, and the words in it; return its text."""
    with pytest.raises(error) as caught:
        function()
    text = str(caught.value)
    assert isinstance(caught.value, SdmError)
    assert re.fullmatch(rf"{op}: {argument}: expected .+, got .+\. Fix: .+\.", text, re.DOTALL), text
    for word in words:
        assert word in text, text
    return text


def refuse_delta(form: str, named: dict, argument: str, error: type, *words: str, **options) -> str:
    """As `refuse`, for one form of the delta rule; no byte of any argument may change."""
    arrays = [x for x in named.values() if isinstance(x, (np.ndarray, torch.Tensor)) and not getattr(x, "is_meta", 0)]
    bits = [_bytes(x) for x in arrays]
    if argument == "state" and form == "functional":
        argument = "(initial_)?state"
    function = getattr(sdm_lite, OPS[form])
    text = refuse(lambda: function(*named.values(), **options), OPS[form], argument, error, *words)
    assert [_bytes(x) for x in arrays] == bits
    return text


def _bytes(x) -> bytes:
    if isinstance(x, torch.Tensor):
        return x.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if x.numel() else b""
    return x.tobytes()


def put(at, value):
    def change(x):
        x[at] = value
        return x

    return change

"""Calls of the custom ops that need nothing of torch's dispatcher: straight to the op's body.

The dispatcher costs a call some 0.1 ms in Python, several times what a kernel takes over one token. It is there for
derivatives, for whoever looks at tensors on their way (tracing, modes, subclasses, transforms, the profiler), and to
count what is written in place. Where no operand wants a derivative and nobody looks, an op is its body. Backwards
always go by the dispatcher: the gradients that torch hands them may be batched, or lazily negated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.library import custom_op

from .errors import SdmError, message

_bodies: dict[Any, tuple[Callable, int | None]] = {}
_PLAIN = (Tensor, torch.nn.Parameter)


def op(name: str, *, schema: str, device_types: Any = "cpu", writes: tuple[int, str] | None = None) -> Callable:
    """Return a decorator that makes a body a custom op, which :func:`call` may also run without the dispatcher.

    `writes` is the place and the name of the one operand that the op changes, if it changes any.
    """

    def register(body: Callable) -> Any:
        mutates = {writes[1]} if writes else ()
        registered = custom_op(name, mutates_args=mutates, device_types=device_types, schema=schema)(body)
        _bodies[registered] = body, writes[0] if writes else None
        return registered

    return register


def call(custom: Any, *operands: Any) -> Any:
    """Return what the op returns, without the dispatcher where it has nothing to do."""
    if torch.compiler.is_compiling() or _is_watched() or not all(map(_is_plain, operands)):
        if forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
            _refuse_tangents(custom, operands)
        return custom(*operands)
    body, written = _bodies[custom]
    result = body(*operands)
    if written is not None and not operands[written].is_inference():
        increment_version(operands[written])  # a backward that saved this tensor must notice
    return result


def _refuse_tangents(custom: Any, operands: tuple) -> None:
    """Raise where an operand carries a forward-mode derivative: torch would go on with zeros in silence."""
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in operands):
        got, fix = "a tensor with a tangent (forward mode: jvp, jacfwd)", "use torch.autograd.grad, or detach it"
        raise SdmError(message(custom._name, "operands", "tensors without forward-mode derivatives", got, fix))


def _is_plain(operand: Any) -> bool:
    """Return whether an operand is no tensor, or one that is nothing beyond its numbers here."""
    if isinstance(operand, Tensor):
        plain = type(operand) in _PLAIN and not operand._is_zerotensor()
        return plain and not (operand.requires_grad and torch.is_grad_enabled())
    return not isinstance(operand, (list, tuple)) or all(map(_is_plain, operand))


def _watched() -> bool:
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or torch.autograd._profiler_enabled()
    )


def _always() -> bool:
    return True


# these questions have no public form: a torch that does not know one of them goes by the dispatcher
try:
    _watched()
    _is_watched = _watched
except AttributeError:
    _is_watched = _always

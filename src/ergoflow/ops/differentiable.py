"""Operators with a gradient written by hand: an autograd function in eager mode, an opaque operator when compiled.

torch.compile must not look into these operators (they loop over samples, count, and launch kernels of their own), and
a call of an opaque operator costs a tenth of a millisecond in eager mode: hence two ways to call the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

Tensors = Sequence[Tensor]
Numbers = Sequence[int]


@dataclass(frozen=True)
class Differentiable:
    """A function of tensors, integers and the name of an implementation, with its gradient.

    `forward(tensors, numbers, impl)` returns the results, as many as `results(number of tensors)` says, and after them
    the tensors that the gradient needs; `backward(gradients of the results, tensors, kept tensors, numbers, impl)`
    returns one gradient per tensor. `shapes` returns what `forward` does, uninitialised, for a compiler. The first
    `reused` results are kept too, before the others: where the caller holds them anyway this costs no memory. Of the
    tensors whose indices `spared(numbers)` returns, the eager gradient is given shape, strides and dtype alone, on the
    meta device: nobody holds their values for it.
    """

    name: str
    results: Callable[[int], int]
    forward: Callable[[Tensors, Numbers, str], list[Tensor]]
    backward: Callable[[Tensors, Tensors, Tensors, Numbers, str], list[Tensor]]
    shapes: Callable[[Tensors, Numbers, str], list[Tensor]]
    reused: int = 0
    spared: Callable[[Numbers], tuple[int, ...]] = lambda numbers: ()
    opaque: Callable[[list[Tensor], list[int], str], list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        """Make the opaque twin known to torch as ergoflow::name."""
        object.__setattr__(self, "opaque", _register(self))

    def __call__(self, tensors: Tensors, numbers: Numbers, impl: str) -> Tensors:
        """Return the results alone."""
        count = self.results(len(tensors))
        if torch.compiler.is_compiling():
            # Torch cannot differentiate an operator that is given an empty list.
            return self.opaque(list(tensors), list(numbers) or [0], impl)[:count]
        outputs: tuple[Tensor, ...] = _Eager.apply(self, tuple(numbers), impl, *tensors)
        return outputs[:count]


def has_tangent(*tensors: Tensor) -> bool:
    """Return whether forward-mode derivatives are being taken; operators then run their plain reference."""
    if torch.compiler.is_compiling():
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(operator: Differentiable, numbers: Numbers, impl: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(operator.forward(tensors, numbers, impl))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.operator, ctx.numbers, ctx.impl, *tensors = inputs
        ctx.count = len(tensors)
        results = ctx.operator.results(ctx.count)
        kept = output[results:]
        ctx.mark_non_differentiable(*kept)
        # Torch would fill a gradient of zeros for every kept tensor, the largest ones of all.
        ctx.set_materialize_grads(False)
        ctx.like = [(result.shape, result.dtype, result.device) for result in output[:results]]
        for index in ctx.operator.spared(ctx.numbers):
            tensors[index] = torch.empty_like(tensors[index], device="meta")
        ctx.save_for_backward(*tensors, *output[: ctx.operator.reused], *kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        operator, saved = ctx.operator, ctx.saved_tensors
        results = zip(gradients[: len(ctx.like)], ctx.like, strict=True)
        given = [torch.zeros(s, dtype=t, device=d) if g is None else g for g, (s, t, d) in results]
        d_tensors = operator.backward(given, saved[: ctx.count], saved[ctx.count :], ctx.numbers, ctx.impl)
        return None, None, None, *d_tensors


def _register(operator: Differentiable) -> Callable[[list[Tensor], list[int], str], list[Tensor]]:
    @torch.library.custom_op(f"ergoflow::{operator.name}", mutates_args=())
    def forward(tensors: list[Tensor], numbers: list[int], impl: str) -> list[Tensor]:
        return operator.forward(tensors, numbers, impl)

    @torch.library.custom_op(f"ergoflow::{operator.name}_gradient", mutates_args=())
    def backward(
        gradients: list[Tensor], tensors: list[Tensor], kept: list[Tensor], numbers: list[int], impl: str
    ) -> list[Tensor]:
        d_tensors = operator.backward(gradients, tensors, kept, numbers, impl)
        laid_out = [_laid_out_like(d_tensor, tensor) for d_tensor, tensor in zip(d_tensors, tensors, strict=True)]
        return _apart(laid_out, [*gradients, *tensors, *kept])

    @backward.register_fake
    def _(
        gradients: list[Tensor], tensors: list[Tensor], kept: list[Tensor], numbers: list[int], impl: str
    ) -> list[Tensor]:
        return [torch.empty_like(tensor) for tensor in tensors]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        tensors, ctx.numbers, ctx.impl = inputs
        ctx.count = len(tensors)
        ctx.save_for_backward(*tensors, *output[: operator.reused], *output[operator.results(ctx.count) :])

    def differentiate(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
        saved = list(ctx.saved_tensors)
        given = gradients[: operator.results(ctx.count)]
        return backward(given, saved[: ctx.count], saved[ctx.count :], ctx.numbers, ctx.impl), None, None

    forward.register_fake(operator.shapes)
    forward.register_autograd(differentiate, setup_context=keep)
    return forward


def _laid_out_like(values: Tensor, tensor: Tensor) -> Tensor:
    """Return values with the strides of a tensor made like `tensor`: a compiler relies on them."""
    if values.stride() == torch.empty_like(tensor, device="meta").stride():
        return values
    return torch.empty_like(tensor).copy_(values)


def _apart(values: Tensors, inputs: Tensors) -> list[Tensor]:
    """Return the values, copied where they share memory with an input or with each other, which torch forbids here."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    apart = []
    for tensor in values:
        place = tensor.untyped_storage().data_ptr()
        apart.append(tensor.clone() if place in taken else tensor)
        taken.add(place)
    return apart

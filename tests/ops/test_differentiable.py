"""Operators with hand-written gradients: what a compiler is told of them is true, and they choose as asked."""

from __future__ import annotations

import weakref

import pytest
import torch

from ergoflow.ops import axial, conv, low_rank, pool
from ergoflow.ops.choice import choose_impl, is_reference, use_impl
from ergoflow.ops.differentiable import Differentiable


def drawn(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]


CASES = {
    "axial_pool": (pool._POOL, drawn((2, 3, 4, 5), (6, 5), (6, 5)), [0, 1]),
    "axial_mix": (axial._MIX, drawn((2, 3, 4, 5), (6, 5), (4, 6), (2, 2, 3, 3), (2, 2, 4, 4)), [2]),
    "circular_conv": (conv._CONV, drawn((2, 4, 5, 6), (6, 2, 5, 5), (6,)), [2, 0]),
}


@pytest.mark.parametrize("name", list(CASES))
def test_shapes_strides_and_gradients_are_as_the_compiler_is_told(name):
    operator, tensors, numbers = CASES[name]
    assert operator.name == name
    opaque = getattr(torch.ops.ergoflow, name).default
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(opaque, (tensors, numbers, "torch"), test_utils=checks)


@pytest.mark.parametrize("name", [*CASES, "sequence_kernel"])
def test_results_lie_in_memory_as_the_compiler_is_told(name):
    """opcheck compares sizes and leaves strides to a compiler's own assertion, in the middle of a training."""
    table, query, key, *sequences = drawn((5, 6), (12, 4), (12, 4), (2, 5, 4), (2, 5, 4))
    of_kernels = (low_rank._KERNEL, (table, query, key, *sequences), [2, 2])
    operator, tensors, numbers = (CASES | {"sequence_kernel": of_kernels})[name]
    made = operator.forward([tensor.detach() for tensor in tensors], numbers, "torch")
    told = operator.shapes([tensor.detach() for tensor in tensors], numbers, "torch")
    assert [(x.shape, x.stride(), x.dtype) for x in made] == [(x.shape, x.stride(), x.dtype) for x in told]


@pytest.mark.parametrize("name", list(CASES))
def test_opaque_operator_is_the_eager_one(name):
    operator, tensors, numbers = CASES[name]
    count = operator.results(len(tensors))
    eager, opaque = operator(tensors, numbers, "torch"), operator.opaque(tensors, numbers, "torch")[:count]
    seeds = [torch.randn_like(result) for result in eager]
    gradients = [torch.autograd.grad(results, tensors, seeds) for results in (eager, opaque)]
    for first, second in zip([*eager, *gradients[0]], [*opaque, *gradients[1]], strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_block_of_code_can_be_told_to_take_the_reference():
    x = torch.zeros(1)
    assert choose_impl(x, "auto") == "torch"
    with use_impl("reference"):
        assert is_reference(x)
        assert choose_impl(x, "torch") == "torch"
    assert not is_reference(x)


def test_tensors_without_data_take_the_reference():
    assert is_reference(torch.zeros(1, device="meta"))


# torch warns about itself while it imports its compiler.
@pytest.mark.filterwarnings("ignore")
def test_compiled_gradients_that_share_memory_are_returned_apart():
    def backward(gradients, tensors, kept, numbers, impl):
        both = torch.stack([gradients[0] * tensors[1], gradients[0] * tensors[0]])
        return [*both.unbind(), gradients[0]]

    operator = Differentiable(
        "sharing",
        lambda inputs: 1,
        lambda t, *_: [t[0] * t[1] + t[2]],
        backward,
        lambda t, *_: [torch.empty_like(t[0])],
    )
    a, b, c = drawn((3,), (3,), (3,))
    compiled = torch.compile(lambda *tensors: operator(tensors, (), "torch")[0], backend="aot_eager", fullgraph=True)
    compiled(a, b, c).sum().backward()
    torch.testing.assert_close(a.grad, b.detach())
    torch.testing.assert_close(b.grad, a.detach())
    torch.testing.assert_close(c.grad, torch.ones(3))


# torch warns about itself while it imports its compiler.
@pytest.mark.filterwarnings("ignore")
def test_reused_results_come_before_the_other_kept_tensors():
    # exp(x)³ and its gradient, which takes exp(x)³ from the results and 3 from the tensors kept beside them.
    operator = Differentiable(
        "cubed_exponential",
        lambda inputs: 1,
        lambda t, *_: [(3 * t[0]).exp(), torch.full_like(t[0], 3)],
        lambda gradients, tensors, kept, *_: [gradients[0] * kept[0] * kept[1]],
        lambda t, *_: [torch.empty_like(t[0]), torch.empty_like(t[0])],
        reused=1,
    )
    (x,) = drawn((4,))
    compiled = torch.compile(lambda x: operator((x,), (), "torch")[0], backend="aot_eager", fullgraph=True)
    for run in (lambda x: operator((x,), (), "torch")[0], compiled):
        (gradient,) = torch.autograd.grad(run(x).sum(), x)
        torch.testing.assert_close(gradient, 3 * (3 * x.detach()).exp())


def test_spared_tensors_are_let_go():
    # (2a)·b: the gradient of 2a needs b alone, that of b is left out.
    operator = Differentiable(
        "spared_product",
        lambda inputs: 1,
        lambda t, *_: [t[0] * t[1]],
        lambda gradients, tensors, *_: [(gradients[0] * tensors[1]).expand(tensors[0].shape), None],
        lambda t, *_: [torch.empty_like(t[0])],
        spared=lambda numbers: tuple(numbers),
    )
    a, b = drawn((4,), (4,))
    doubled = 2 * a
    held = weakref.ref(doubled)
    result = operator((doubled, b.detach()), (0,), "torch")[0]
    del doubled
    assert held() is None
    torch.testing.assert_close(torch.autograd.grad(result.sum(), a)[0], 2 * b.detach())

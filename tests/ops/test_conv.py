"""The Fourier convolution against torch's own in float64, and against the written sum."""

from __future__ import annotations

import pytest
import torch

from ergoflow.ops import conv
from ergoflow.ops.conv import circular_conv

# (grid, taps, channels in, out, groups): odd and even sizes, a kernel wider than the grid.
CASES = [((9,), 5, 4, 6, 2), ((8, 9), 5, 4, 6, 1), ((5, 12), 9, 4, 6, 2), ((5, 4, 7), 3, 2, 3, 1)]


def drawn(grid, taps, inputs, outputs, groups, *, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, inputs, *grid), (outputs, inputs // groups, *[taps] * len(grid)), (outputs,)]
    return [torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.fixture
def always_fourier(monkeypatch):
    monkeypatch.setattr(conv, "DIRECT_TAPS", 0)


@pytest.mark.usefixtures("always_fourier")
@pytest.mark.parametrize("case", CASES)
def test_fourier_convolution_is_torchs(case):
    tensors, groups = drawn(*case), case[-1]
    fast, direct = (circular_conv(*tensors, groups=groups, impl=impl) for impl in ("torch", "reference"))
    torch.testing.assert_close(fast, direct, rtol=1e-10, atol=1e-10)
    seed = torch.randn_like(direct)
    pairs = zip(*(torch.autograd.grad(y, tensors, seed) for y in (fast, direct)), strict=True)
    for first, second in pairs:
        torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("always_fourier")
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_convolution_is_the_written_sum(impl):
    x, weight, bias = drawn((6, 7), 3, 2, 4, 2)
    expected = bias[:, None, None].expand(2, 4, 6, 7)
    for row in range(3):
        for column in range(3):
            neighbour = x.roll((1 - row, 1 - column), (2, 3)).unflatten(1, (2, 1))
            taps = weight[..., row, column].unflatten(0, (2, 2))
            expected = expected + torch.einsum("goi,bgixy->bgoxy", taps, neighbour).flatten(1, 2)
    torch.testing.assert_close(circular_conv(x, weight, bias, groups=2, impl=impl), expected)


@pytest.mark.usefixtures("always_fourier")
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_bent_convolution_is_that_of_gelu(impl):
    x, weight, bias = drawn((6, 7), 3, 2, 4, 2)
    bent = circular_conv(x, weight, bias, groups=2, bend=True, impl=impl)
    expected = circular_conv(x * torch.special.ndtr(x), weight, bias, groups=2, impl="reference")
    torch.testing.assert_close(bent, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("always_fourier")
def test_convolution_commutes_with_translations():
    x, weight, bias = drawn((8, 9), 5, 4, 6, 2)
    moved = circular_conv(x.roll((3, 2), (2, 3)), weight, bias, groups=2)
    torch.testing.assert_close(moved, circular_conv(x, weight, bias, groups=2).roll((3, 2), (2, 3)))


@pytest.mark.usefixtures("always_fourier")
def test_transforms_stay_in_float32_under_autocast():
    tensors = drawn((16, 12), 9, 4, 6, 2, dtype=torch.float32)
    exact = circular_conv(*tensors, groups=2)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = circular_conv(*tensors, groups=2)
    assert rounded.dtype == torch.float32
    assert (rounded - exact).norm() < 4e-3 * exact.norm()
    for gradient in torch.autograd.grad(rounded.square().sum(), tensors):
        assert gradient.dtype == torch.float32


@pytest.mark.usefixtures("always_fourier")
def test_compiled_convolution_is_one_graph_with_the_same_gradients():
    tensors = drawn((8, 9), 5, 4, 6, 2)

    def loss(*tensors):
        return circular_conv(*tensors, groups=2).square().sum()

    expected = torch.autograd.grad(loss(*tensors), tensors)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for first, second in zip(torch.autograd.grad(compiled(*tensors), tensors), expected, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


def test_few_taps_are_summed_directly(monkeypatch):
    monkeypatch.setattr(conv, "_spectra", None)
    assert circular_conv(*drawn((8, 9), 3, 4, 6, 2), groups=2).shape == (2, 6, 8, 9)


def test_kernels_that_wrap_twice_are_refused():
    with pytest.raises(ValueError, match="9 taps needs at least 4 points per axis, got 3 on axis 1; use a finer"):
        circular_conv(*drawn((8, 3), 9, 4, 6, 2), groups=2)

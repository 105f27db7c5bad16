"""The fast value path against the written-out one in float64: values, gradients, the head norm, compilation."""

from __future__ import annotations

import math

import pytest
import torch

from ergoflow.ops.axial import apply_kernels, axial_mix, head_norm

GRIDS = [(7,), (5, 7), (9, 2), (3, 4, 5)]


def drawn(*shape, seed=0, dtype=torch.float64):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return values.requires_grad_()


def inputs(grid, *, batch=2, heads=3, scale=1.0, dtype=torch.float64):
    x, value, merge = drawn(batch, *grid, 6), drawn(heads * 4, 6, seed=1), drawn(5, heads * 4, seed=2)
    kernels = [drawn(batch, heads, size, size, seed=3 + axis) for axis, size in enumerate(grid)]
    tensors = [x, value, merge, *(scale * kernel for kernel in kernels)]
    return [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]


def mixed(tensors, impl):
    x, value, merge, *kernels = tensors
    return axial_mix(x, value, kernels, merge, impl=impl)


@pytest.mark.parametrize("scale", [1.0, 1e-4])
@pytest.mark.parametrize("grid", GRIDS)
def test_fast_value_path_is_the_written_one(grid, scale):
    """Also with kernels so small that the values leave two axes with a variance of 1e-16."""
    tensors = inputs(grid, scale=scale)
    fast, written = (mixed(tensors, impl) for impl in ("torch", "reference"))
    torch.testing.assert_close(fast, written, rtol=1e-10, atol=1e-10)
    seed = torch.randn_like(written)
    pairs = zip(*(torch.autograd.grad(y, tensors, seed) for y in (fast, written)), strict=True)
    for first, second in pairs:
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-10 * second.abs().max().item())


def test_written_value_path_is_the_formula():
    x, value, merge, *kernels = inputs((3, 4))
    v = torch.einsum("bxyd,hcd->bhxyc", x, value.unflatten(0, (3, 4)))
    u = torch.einsum("bhix,bhjy,bhxyc->bhijc", *kernels, v) / 12
    z = (u - u.mean((2, 3, 4), keepdim=True)) / u.std((2, 3, 4), correction=0, keepdim=True)
    expected = torch.einsum("bhijc,ehc->bije", z, merge.unflatten(1, (3, 4)))
    torch.testing.assert_close(mixed((x, value, merge, *kernels), "reference"), expected)


def test_a_mean_far_from_zero_costs_no_digits():
    """Values around 1000 ± 1 in float32: the variance is taken about the mean."""
    x = 1000 + torch.randn(1, 8, 8, 1, generator=torch.Generator().manual_seed(0))
    kernels = [8 * torch.eye(8).expand(1, 1, 8, 8)] * 2
    one = torch.ones(1, 1)
    y = axial_mix(x, one, kernels, one, impl="torch")
    exact = axial_mix(x.double(), one.double(), [k.double() for k in kernels], one.double(), impl="reference")
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-3)


def test_kernels_may_be_transposed_views():
    x, value, merge, *kernels = inputs((5, 7))
    straight = axial_mix(x, value, [kernel.mT.contiguous() for kernel in kernels], merge)
    torch.testing.assert_close(axial_mix(x, value, [kernel.mT for kernel in kernels], merge), straight)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode_derivative_is_the_finite_difference():
    x, value, merge, *kernels = (tensor.detach() for tensor in inputs((4, 5)))
    direction = drawn(*x.shape, seed=9).detach()

    def of(features):
        return axial_mix(features, value, kernels, merge)

    _, tangent = torch.func.jvp(of, (x,), (direction,))
    difference = (of(x + 1e-6 * direction) - of(x - 1e-6 * direction)) / 2e-6
    torch.testing.assert_close(tangent, difference, rtol=1e-6, atol=1e-6)


def test_autocast_stays_close_and_gives_float32_gradients():
    tensors = inputs((6, 7), dtype=torch.float32)
    exact = mixed(tensors, "reference")
    with torch.autocast("cpu", torch.bfloat16):
        rounded = mixed(tensors, "torch")
    assert rounded.dtype == torch.bfloat16
    # Five roundings of 2^-9 in a row.
    assert (rounded.float() - exact).norm() < 0.02 * exact.norm()
    for gradient in torch.autograd.grad(rounded.float().square().sum(), tensors):
        assert gradient.dtype == torch.float32
        assert gradient.isfinite().all()


def test_compiled_value_path_is_one_graph_with_the_same_gradients():
    tensors = inputs((5, 7))

    def loss(*tensors):
        return mixed(tensors, "auto").square().sum()

    expected = torch.autograd.grad(loss(*tensors), tensors)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for first, second in zip(torch.autograd.grad(compiled(*tensors), tensors), expected, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_second_derivatives_are_refused():
    tensors = inputs((4, 5))
    (gradient,) = torch.autograd.grad(mixed(tensors, "torch").square().sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_one_kernel_per_axis_is_needed():
    x, value, merge, *kernels = inputs((4, 5))
    with pytest.raises(ValueError, match=r"one kernel per grid axis .*, got 1; give"):
        axial_mix(x, value, kernels[:1], merge)


def test_triton_is_refused_without_a_gpu_or_the_interpreter(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tensors = [tensor.detach().float() for tensor in inputs((4, 5))]
    with pytest.raises(ValueError, match="needs CUDA tensors or TRITON_INTERPRET=1, got tensors on cpu; choose"):
        mixed(tensors, "triton")


def test_public_pieces_make_up_the_value_path():
    x, value, merge, *kernels = inputs((5, 7))
    values = (x @ value.mT).unflatten(-1, (3, 4)).movedim(-2, 1)
    joined = head_norm(apply_kernels(kernels, values)).flatten(1, 2).movedim(1, -1) @ merge.mT
    torch.testing.assert_close(mixed((x, value, merge, *kernels), "auto"), joined)


def test_programs_share_the_lines_of_a_head_so_that_all_multiprocessors_end_together():
    """16 heads on 132 multiprocessors: eight programs each, 32 of 256 lines; no more programs than lines."""
    walkers = pytest.importorskip("ergoflow.ops.tiles_triton").count_walkers
    assert walkers(16, 256, 1) == 8
    assert walkers(132, 256, 1) == 1
    assert walkers(1, 3, 2) == 3
    # Two waves of short walks end before one wave of long ones.
    assert walkers(67, 300, 1) > 1


@pytest.mark.gpu
@pytest.mark.parametrize(("transposed", "dtype"), [(False, torch.bfloat16), (True, torch.float16)])
@pytest.mark.parametrize("walkers", [2, 5])
@pytest.mark.parametrize("grid", [(256, 27), (27, 256), (128, 35), (3, 128, 12)])
def test_streamed_lines_are_integrated_as_written(grid, walkers, transposed, dtype):
    """Some rounds of the ring, odd numbers of lines, columns of a wider field; nothing beside them is touched."""
    stream = pytest.importorskip("ergoflow.ops.axial_stream_triton").stream
    module = pytest.importorskip("ergoflow.ops.axial_integral_triton")
    axis = next(axis for axis, size in enumerate(grid) if size in (128, 256))
    size, points = grid[axis], math.prod(grid)
    generator = torch.Generator("cuda").manual_seed(walkers)
    wide = 1 + torch.randn(2, points, 5 * 64, device="cuda", generator=generator).to(dtype)
    kernel = 1 + torch.randn(2, 3, size, size, device="cuda", generator=generator).to(dtype)
    kernel = kernel.mT if transposed else kernel
    into = torch.full_like(wide, float("nan"))
    values, out = wide[..., 64:256], into[..., 64:256]
    moments = stream(kernel, values, out, module.sides(grid, axis), walkers, statistics=True)
    v = values.double().unflatten(2, (3, 64)).unflatten(1, grid).movedim(1 + axis, -1)  # (B, rest, H, d, S)
    u = torch.einsum("bhij,b...hcj->b...hci", kernel.double(), v) / size
    exact = u.movedim(-1, 1 + axis).reshape(out.shape)
    # The result is rounded once.
    assert (out.double() - exact).norm() < torch.finfo(dtype).eps * exact.norm()
    assert into[..., :64].isnan().all()
    assert into[..., 256:].isnan().all()
    mean, rate = module.statistics_of(moments)
    heads = exact.unflatten(2, (3, 64)).movedim(2, 1).flatten(2)  # (B, H, N·d)
    torch.testing.assert_close(mean[..., 0].double(), heads.mean(2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rate[..., 0].double(), heads.std(2, correction=0).reciprocal(), rtol=1e-4, atol=0)


@pytest.mark.gpu
def test_lines_stream_on_hopper_where_head_length_and_precision_allow():
    module = pytest.importorskip("ergoflow.ops.axial_integral_triton")

    def streams(*, size=256, head_dim=64, dtype=torch.bfloat16, start=0):
        values = torch.empty(1, 4 * size, 2 * head_dim + 8, device="cuda", dtype=dtype)[
            ..., start : start + 2 * head_dim
        ]
        kernel = torch.empty(1, 2, size, size, device="cuda", dtype=dtype)
        return module._can_stream(kernel, values, values, (4, size, 1))

    hopper = torch.cuda.get_device_capability()[0] == 9
    assert streams() == streams(size=128, dtype=torch.float16, start=8) == hopper
    assert not any((streams(size=192), streams(head_dim=32), streams(dtype=torch.float32), streams(start=1)))


@pytest.mark.gpu
@pytest.mark.parametrize(("wanted", "dtype"), [(False, torch.bfloat16), (True, torch.float16), (True, torch.bfloat16)])
@pytest.mark.parametrize("walkers", [1, 2, 5])
@pytest.mark.parametrize("grid", [(256, 27), (256, 1), (128, 35), (128, 3, 4)])
def test_values_are_projected_rounded_and_integrated_as_written(grid, walkers, wanted, dtype):
    """Some rounds of the ring, odd numbers of lines, also fewer than programs; nothing beside them is touched."""
    module = pytest.importorskip("ergoflow.ops.axial_value_triton")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    size, rest = grid[0], math.prod(grid[1:])
    generator = torch.Generator("cuda").manual_seed(walkers)
    features = 1 + torch.randn(2, size * rest, 128, device="cuda", generator=generator).to(dtype)
    value = torch.randn(3 * 64, 128, device="cuda", generator=generator).to(dtype) / 8
    kernel = 1 + torch.randn(2, 3, size, size, device="cuda", generator=generator).to(dtype)
    into = torch.full((2, 2, size * rest, 5 * 64), float("nan"), device="cuda", dtype=dtype)
    out, values = into[..., 64:256]
    given = values if wanted else None
    module.project_and_integrate(kernel, features, value, out, (1, size, rest), walkers, values=given)
    v = (features.double() @ value.double().mT).to(dtype).double()
    lines = v.view(2, size, rest, 3, 64)
    exact = (torch.einsum("bhij,bjrhc->birhc", kernel.double(), lines) / size).reshape(out.shape)
    # The result is rounded once more.
    assert (out.double() - exact).norm() < torch.finfo(dtype).eps * exact.norm()
    # Sums of another order round to the same but where they lie between two numbers.
    assert (values.double() - v).norm() < 0.1 * torch.finfo(dtype).eps * v.norm() if wanted else values.isnan().all()
    assert into[..., :64].isnan().all()
    assert into[..., 256:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("walkers", [1, 2, 5, 27])
@pytest.mark.parametrize("grid", [(256, 27), (27, 256), (128, 35), (3, 128, 12)])
def test_paired_gradients_of_an_axis_are_those_written(grid, walkers, dtype):
    """Walks of one line and of many rounds of the ring; columns of wider fields."""
    pair = pytest.importorskip("ergoflow.ops.axial_pair_triton").pair
    axis = next(axis for axis, size in enumerate(grid) if size in (128, 256))
    size = grid[axis]
    shape = math.prod(grid[:axis]), size, math.prod(grid[axis + 1 :])
    generator = torch.Generator("cuda").manual_seed(walkers)
    wide = 1 + torch.randn(2, math.prod(grid), 9 * 64, device="cuda", generator=generator).to(dtype)
    kernel = 1 + torch.randn(2, 3, size, size, device="cuda", generator=generator).to(dtype)
    d_out, values = wide[..., 64:256], wide[..., 320:512]
    parts = torch.full((2, walkers, 3, size, size), float("nan"), device="cuda")
    d_values, d_kernel = pair(kernel, d_out, values, shape, parts), parts.sum(1)
    d, v = (t.double().unflatten(2, (3, 64)).unflatten(1, shape) for t in (d_out, values))  # (B, P, S, Q, H, d)
    exact = torch.einsum("bhji,bpjqhc->bpiqhc", kernel.double(), d).reshape(d_values.shape) / size
    # The result is rounded once. The kernel's gradient is 144 sums in a row, each cut off after some 22 bits.
    assert (d_values.double() - exact).norm() < torch.finfo(dtype).eps * exact.norm()
    exact = torch.einsum("bpiqhc,bpjqhc->bhij", d, v) / size
    assert (d_kernel.double() - exact).norm() < 1e-4 * exact.norm()


@pytest.mark.gpu
def test_values_are_projected_on_the_way_where_streams_are_and_features_have_128_channels():
    module = pytest.importorskip("ergoflow.ops.axial_integral_triton")

    def projects(*, size=256, channels=128, dtype=torch.bfloat16, transposed=False):
        features = torch.empty(1, 4 * size, channels, device="cuda", dtype=dtype)
        value, kernel = features.new_empty(128, channels), features.new_empty(1, 2, size, size)
        out = features.new_empty(1, 4 * size, 128)
        return module._can_project(kernel.mT if transposed else kernel, features, value, out, (1, size, 4))

    hopper = torch.cuda.get_device_capability()[0] == 9
    assert projects() == projects(size=128, dtype=torch.float16) == hopper
    assert not any(
        (projects(size=192), projects(channels=64), projects(dtype=torch.float32), projects(transposed=True))
    )


@pytest.mark.gpu
def test_gradients_are_paired_on_hopper_where_head_length_and_precision_allow():
    module = pytest.importorskip("ergoflow.ops.axial_triton")

    def pairs(*, size=256, head_dim=64, dtype=torch.bfloat16, transposed=False):
        values = torch.empty(1, 4 * size, 2 * head_dim, device="cuda", dtype=dtype)
        kernel = torch.empty(1, 2, size, size, device="cuda", dtype=dtype)
        return module._can_pair(kernel.mT if transposed else kernel, values, (4, size, 1))

    hopper = torch.cuda.get_device_capability()[0] == 9
    assert pairs() == pairs(size=128, dtype=torch.float16) == hopper
    assert not any((pairs(size=192), pairs(head_dim=32), pairs(dtype=torch.float32), pairs(transposed=True)))


def test_samples_are_worked_on_in_equal_parts(monkeypatch):
    """Samples of ten numbers, four of which fit: as many as divide the batch; never less than one."""
    module = pytest.importorskip("ergoflow.ops.axial_triton")
    monkeypatch.setattr(module, "CHUNK", 40)
    for batch, width, length in ((12, 2, 4), (6, 2, 3), (7, 2, 1), (2, 24, 1)):
        parts = module._chunks(torch.empty(batch, 5, width))
        assert [index for part in parts for index in range(batch)[part]] == list(range(batch))
        assert {part.stop - part.start for part in parts} == {length}

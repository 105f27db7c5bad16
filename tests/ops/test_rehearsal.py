"""A rehearsal: every kernel that is launched is compiled, none is run, and the launches after it find them all."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ergoflow.ops.choice import Impl
from ergoflow.ops.rehearsal import rehearsed

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the triton package is missing")
# Triton 3.9 warns where this is left to its default.
OPTIONS = {"num_warps": 1, "enable_fp_fusion": True}


class Hopper:
    """A driver that says what Triton asks of an H200; it makes launchers, and can launch nothing."""

    def __init__(self) -> None:
        self.launchers: list[str] = []

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        self.launchers.append(source.fn.__name__)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Hopper:
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    active = Hopper()
    monkeypatch.setattr(driver, "_active", active)
    return active


@pytest.fixture
def compiled(hopper: Hopper, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, str], str]]:
    """Kernel, types and thread of every compilation: there is nothing else to them."""
    import triton.compiler

    made: list[tuple[str, dict[str, str], str]] = []

    def compile_nothing(source: Any, **_: Any) -> Any:
        made.append((source.fn.__name__, source.signature, threading.current_thread().name))
        return SimpleNamespace(src=source, metadata=None)

    monkeypatch.setattr(triton.compiler, "compile", compile_nothing)
    return made


def fresh_kernels() -> tuple[Any, Any]:
    """Two kernels that nobody has compiled yet."""
    import triton
    import triton.language as tl

    @triton.jit
    def double_kernel(x, out, size, BLOCK: tl.constexpr) -> None:
        i = tl.arange(0, BLOCK)
        tl.store(out + i, 2 * tl.load(x + i, mask=i < size), mask=i < size)

    @triton.jit
    def square_kernel(x, out, size, BLOCK: tl.constexpr) -> None:
        i = tl.arange(0, BLOCK)
        values = tl.load(x + i, mask=i < size)
        tl.store(out + i, values * values, mask=i < size)

    return double_kernel, square_kernel


def launch(kernel: Any, size: int = 5, dtype: torch.dtype = torch.float32, block: int = 32) -> None:
    x = torch.zeros(size, dtype=dtype)
    kernel[(1,)](x, x, size, BLOCK=block, **OPTIONS)


@contextmanager
def counted() -> Iterator[list[str]]:
    """Within the block Triton notes down what it compiles or loads from disk."""
    from triton import knobs

    names: list[str] = []

    def note(*, fn: Any, **_: Any) -> None:
        names.append(fn.name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs.runtime, "jit_post_compile_hook", note)
        yield names


@needs_triton
def test_distinct_launches_are_compiled_once_and_equal_ones_not_again(compiled, hopper: Hopper) -> None:
    from ergoflow.ops.rehearsal_triton import rehearsal

    double, square = fresh_kernels()
    with rehearsal():
        for _ in range(3):
            launch(double)
            launch(double, size=7)
            launch(double, size=48)
            launch(double, dtype=torch.bfloat16)
            launch(double, block=64)
            launch(square)
    # 7 is no more a number of its own than 5 is, 48 has a divisor.
    assert sorted(name.split(".")[-1] for name, *_ in compiled) == 4 * ["double_kernel"] + ["square_kernel"]
    assert sorted(hopper.launchers) == sorted(name for name, *_ in compiled)
    with rehearsal():
        launch(double)
    assert len(compiled) == 5


@needs_triton
def test_launches_of_a_backward_pass_are_compiled_in_the_pool_too(compiled) -> None:
    from ergoflow.ops.rehearsal_triton import rehearsal

    double, square = fresh_kernels()
    with rehearsal():
        launch(double)
        autograd = threading.Thread(target=launch, args=(square,), name="autograd")
        autograd.start()
        autograd.join()
    assert len(compiled) == 2
    assert not {thread for *_, thread in compiled} & {"autograd", threading.current_thread().name}


@needs_triton
def test_kernels_are_compiled_at_the_same_time(hopper: Hopper, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton.compiler

    from ergoflow.ops.rehearsal_triton import rehearsal

    met = []
    barrier = threading.Barrier(2, timeout=30)

    def wait_for_the_other(source: Any, **_: Any) -> Any:
        met.append(barrier.wait())
        return SimpleNamespace(src=source, metadata=None)

    monkeypatch.setattr(triton.compiler, "compile", wait_for_the_other)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with rehearsal():
        for kernel in fresh_kernels():
            launch(kernel)
    assert sorted(met) == [0, 1]


@needs_triton
def test_after_the_block_kernels_run_as_before_also_if_it_raised(compiled) -> None:
    from triton.runtime.jit import JITFunction

    from ergoflow.ops.rehearsal_triton import rehearsal

    run = JITFunction.run
    double, square = fresh_kernels()
    with rehearsal():
        assert JITFunction.run is not run
        launch(double)
    assert JITFunction.run is run

    def fail() -> None:
        with rehearsal():
            launch(square)
            raise ValueError("of the function's own")

    with pytest.raises(ValueError, match="own"):
        fail()
    assert JITFunction.run is run
    assert len(compiled) == 2


@needs_triton
def test_what_cannot_be_compiled_is_reported_by_its_launch_alone(hopper: Hopper) -> None:
    import triton
    import triton.language as tl

    from ergoflow.ops.rehearsal_triton import rehearsal

    @triton.jit
    def wrong_kernel(x, out, size, BLOCK: tl.constexpr) -> None:
        tl.static_assert(BLOCK == 0, "never")

    with rehearsal():
        launch(wrong_kernel)
        launch(wrong_kernel)
    with pytest.raises(triton.compiler.errors.CompilationError, match="never"):
        launch(wrong_kernel)


@needs_triton
def test_a_rehearsed_kernel_is_not_compiled_again(hopper: Hopper) -> None:
    from ergoflow.ops.rehearsal_triton import rehearsal

    kernels = fresh_kernels()
    with counted() as made, rehearsal():
        for kernel in kernels:
            launch(kernel)
    assert sorted(name.split(".")[-1] for name in made) == ["double_kernel", "square_kernel"]
    with counted() as made:
        for kernel in kernels:
            x = torch.zeros(5)
            found = kernel.run(x, x, 5, grid=(1,), warmup=True, BLOCK=32, **OPTIONS)
            assert found.asm["cubin"]
    assert made == []


@needs_triton
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_gluon_kernels_and_descriptors_are_rehearsed_too(hopper: Hopper) -> None:
    from ergoflow.ops.axial_stream_triton import _stream_kernel, stream
    from ergoflow.ops.rehearsal_triton import rehearsal

    _stream_kernel.device_caches.clear()  # another test of this process may have compiled it
    kernel = torch.empty(2, 3, 128, 128, dtype=torch.bfloat16)
    values = torch.empty(2, 128 * 128, 3 * 64, dtype=torch.bfloat16)
    with counted() as made, rehearsal():
        for statistics in (True, False, True):
            stream(kernel, values, torch.empty_like(values), (1, 128, 128), 7, statistics=statistics)
    assert len(made) == len(hopper.launchers) == 2


@needs_triton
def test_a_rehearsal_that_fails_is_a_warning() -> None:
    def failing() -> None:
        raise IndexError("garbage is no index")

    with pytest.warns(UserWarning, match="rehearsal failed: garbage is no index"):
        rehearsed(failing, torch.device("cuda"))


def test_on_the_cpu_nothing_is_rehearsed() -> None:
    def never() -> None:
        raise AssertionError("called")

    rehearsed(never, torch.device("cpu"))


@needs_triton
@pytest.mark.gpu
def test_after_a_rehearsal_a_gpu_compiles_nothing_and_computes_the_reference(monkeypatch, tmp_path) -> None:
    from ergoflow.ops.depthwise import depthwise_norm

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    generator = torch.Generator().manual_seed(0)

    def drawn(dim: int) -> list[Tensor]:
        shapes = ((2, 9, 10, dim), (dim, 1, 3, 3), (dim,), (dim,), (dim,))
        return [torch.randn(shape, generator=generator).cuda().requires_grad_() for shape in shapes]

    def passes(tensors: list[Tensor], impl: Impl) -> list[Tensor]:
        stream, z = depthwise_norm(*tensors, periodic=(True, False), impl=impl)
        gradients = torch.autograd.grad(stream.square().sum() + z.square().sum(), tensors)
        return [z.detach(), *gradients]

    # Numbers of channels that no other test has.
    tensors, others = drawn(52), drawn(44)
    with counted() as rehearsals:
        rehearsed(lambda: passes(tensors, "triton"), torch.device("cuda"))
    with counted() as launches:
        found = passes(tensors, "triton")
    assert launches == []
    expected = passes([tensor.detach().double().requires_grad_() for tensor in tensors], "reference")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3, check_dtype=False)
    with counted() as launches:
        passes(others, "triton")
    assert sorted(launches) == sorted(rehearsals) != []

"""The block in which Triton kernels, plain and Gluon ones, are compiled in a pool of threads instead of being run.

Threads do, because Triton gives Python's lock away where it takes its time: in the passes of its compiler, in LLVM and
in the assembler. It keeps the lock while it reads a kernel's source, a tenth of the time or less where that is long.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton.runtime import driver
from triton.runtime._async_compile import AsyncCompileMode, active_mode
from triton.runtime.jit import JITFunction


@contextmanager
def rehearsal() -> Iterator[None]:
    """Within the block no launch runs, of any thread; each is compiled, equal ones once. Leaving it waits for all.

    Arguments are looked at when a kernel is launched with them, and not kept. A kernel that cannot be compiled is left
    to the launch that needs it, which tries again and says why.
    """
    run = JITFunction.run
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        mode = _Mode(threads)

        def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            # For each launch anew: those of a backward pass come from a thread of autograd's, which inherits nothing.
            token = active_mode.set(mode)
            try:
                run(kernel, *args, grid=grid, warmup=True, **options)
            finally:
                active_mode.reset(token)

        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = run
            # This also puts a kernel where its launch will look for it.
            for kernel in mode.future_kernels.values():
                kernel.result(ignore_errors=True)


class _Mode(AsyncCompileMode):
    """Triton's own mode; its threads also compile the C code that launches a kernel, which some versions write."""

    def submit(self, key: str, compiled: Callable[[], Any], *then: Callable[[Any], None]) -> Any:
        def with_launcher() -> Any:
            kernel = compiled()
            # The first launch finds it on disk.
            driver.active.launcher_cls(kernel.src, kernel.metadata)
            return kernel

        return super().submit(key, with_launcher, *then)

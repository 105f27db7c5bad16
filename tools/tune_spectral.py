"""Spectral step on the GPU: right first, then how fast, then which settings. Run in the repository root:

PYTHONPATH=src python3 tools/tune_spectral.py check | speed | sweep | memory
"""

import itertools
import sys
import time

import torch
import triton

import ergoflow.ops.spectral_step_triton as kernels
from ergoflow.ops.spectral_step import SpectralFlow
from ergoflow.solvers import kolmogorov
from ergoflow.solvers.kolmogorov import KolmogorovConfig, initial_vorticity, make_step

CONFIG = KolmogorovConfig()
SUBSTEPS = 12
# Work columns and state blocks of one stage; MB per field-step.
FLOOR_MB = 5 * (4 * 256 * 171 * 8 + 3.6 * 171 * 86 * 8) / 1e6


def states(count):
    few = initial_vorticity(CONFIG, min(count, 8), seed=0, device="cuda")
    return few.repeat((count + 7) // 8, 1, 1, 1)[:count].contiguous()


def seconds(function, repeats=10):
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[repeats // 2]


def flow():
    return SpectralFlow(
        grid=CONFIG.grid,
        length=CONFIG.length,
        linear=kolmogorov._linear(CONFIG),
        forcing=kolmogorov._forcing(CONFIG),
        forcing_wavenumber=CONFIG.forcing_wavenumber,
        dt=CONFIG.dt,
    )


def check():
    start = states(4)
    exact = make_step(CONFIG, substeps=SUBSTEPS, device="cuda", dtype=torch.float64)(start.double())
    for impl in ("torch", "triton"):
        began = time.perf_counter()
        found = make_step(CONFIG, substeps=SUBSTEPS, device="cuda", impl=impl)(start)
        torch.cuda.synchronize()
        error = float((found.double() - exact).norm() / exact.norm())
        print(f"{impl:7s} error {error:.2e} first call {time.perf_counter() - began:.1f} s", flush=True)


def speed():
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    copy = 8 * source.numel() / seconds(lambda: target.copy_(source))
    print(f"copy {copy / 1e12:.2f} TB/s, floor {copy / FLOOR_MB / 1e6:,.0f} field-steps/s")
    for impl, count in itertools.product(("torch", "triton"), (1, 16, 48, 50, 60, 64, 220)):
        state, step = states(count), make_step(CONFIG, substeps=SUBSTEPS, device="cuda", impl=impl)
        took = seconds(lambda: step(state)) / SUBSTEPS
        rate = count / took
        print(
            f"{impl:7s} batch {count:4d} {1e3 * took:.4f} ms {rate:12,.0f} field-steps/s "
            f"{rate * FLOOR_MB * 1e6 / copy:.0%} of floor",
            flush=True,
        )


def sweep():
    """Kernel by kernel at 48 fields (528 column programs: four per multiprocessor), then the whole step."""
    count = 48

    def buffers(plan):
        vorticity = torch.randn(count, 2, 256, plan.half, device="cuda")
        return torch.randn(count, 2, 256, 2 * plan.half, device="cuda"), vorticity, torch.zeros_like(vorticity)

    best = {}
    for warps, registers in ((2, None), (4, None), (8, None), (4, 64)):
        kernels.ROW_SETTINGS = (warps, registers)
        plan = kernels.make_plan(flow(), torch.device("cuda"))
        work, _, _ = buffers(plan)
        took = seconds(lambda: kernels.launch_rows(work, plan), 50)
        best["rows", warps, registers] = took
        print(
            f"rows    warps {warps} registers {registers}: {1e6 * took:.1f} us, "
            f"{count * 4 * 256 * 171 * 4 / took / 1e12:.2f} TB/s",
            flush=True,
        )
    kernels.ROW_SETTINGS = min((k for k in best if k[0] == "rows"), key=best.get)[1:]
    for warps, registers in ((4, 128), (4, 168), (4, 96), (8, 128), (2, 128), (2, 168)):
        kernels.COLUMN_SETTINGS = (warps, registers)
        plan = kernels.make_plan(flow(), torch.device("cuda"))
        work, vorticity, memory = buffers(plan)
        took = seconds(lambda: kernels.launch_columns(work, vorticity, memory, plan, 1), 50)
        best["columns", warps, registers] = took
        print(f"columns warps {warps} registers {registers}: {1e6 * took:.1f} us", flush=True)
    kernels.COLUMN_SETTINGS = min((k for k in best if k[0] == "columns"), key=best.get)[1:]
    print("best", kernels.ROW_SETTINGS, kernels.COLUMN_SETTINGS)
    for total, chunk in itertools.product((50, 220), (16, 24, 32, 48, 64, 110, 220)):
        if chunk > total and chunk != 64:
            continue
        kernels.FIELDS_PER_CHUNK = chunk
        state, step = states(total), make_step(CONFIG, substeps=SUBSTEPS, device="cuda", impl="triton")
        took = seconds(lambda: step(state)) / SUBSTEPS
        print(f"batch {total} chunk {chunk}: {total / took:,.0f} field-steps/s", flush=True)


def memory():
    """kf256 into GPU memory, as `simulate` does it but without a writer."""
    began = time.perf_counter()
    step = make_step(CONFIG, substeps=SUBSTEPS, device="cuda")
    kept = []
    for number, count in enumerate((50, 50, 50, 40, 30)):
        state = initial_vorticity(CONFIG, count, seed=number, device="cuda")
        for _ in range(2000):
            state = step(state)
        frames = torch.empty(count, 500, 1, 256, 256, device="cuda")
        for t in range(500):
            frames[:, t] = state
            state = step(state)
        assert bool(torch.isfinite(state).all())
        kept.append(frames)
        print(f"{count} after {time.perf_counter() - began:.1f} s", flush=True)
    torch.cuda.synchronize()
    spread = float(torch.cat([frames[:, ::100] for frames in kept]).std())
    print(f"kf256 to GPU memory: {time.perf_counter() - began:.1f} s, omega rms {spread:.3f} (4.6-4.7)")


if __name__ == "__main__":
    print(torch.__version__, triton.__version__, torch.cuda.get_device_name())
    with torch.no_grad():
        {"check": check, "speed": speed, "sweep": sweep, "memory": memory}[sys.argv[1]]()

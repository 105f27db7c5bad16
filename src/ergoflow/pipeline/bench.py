"""`ergoflow bench`: what this machine does per second, as numbers that can be compared.

    solver     steps of the spectral solver, beside the floor that memory sets
    lbm        lattice updates, beside the same
    training   a recipe's model: forward pass and training step, by batch
    rollout    a recipe's `predict`: steps per second with streaming statistics
    models     all models: parameters, work, time and memory, beside the paper's numbers
    ops        the operators of `a3m` beside their references, and each kernel under other settings

No bench needs data: weights and states are random.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ergoflow.config import FilesDatasetConfig, KolmogorovDatasetConfig, Recipe, to_dict
from ergoflow.data.info import DatasetInfo
from ergoflow.metrics import PCABasis, TrajectoryStatistics
from ergoflow.models.a3m import A3MConfig
from ergoflow.numerics.fourier import dealias_limit
from ergoflow.numerics.imex import WEIGHTS
from ergoflow.numerics.trajectory import rollout
from ergoflow.ops.bench import Sizes, operator_rows, tuning_rows
from ergoflow.ops.choice import Impl, use_impl
from ergoflow.ops.spectral_step import Impl as StepImpl
from ergoflow.pipeline.bench_models import bench_models, count_work, paper_cases, recipe_case
from ergoflow.pipeline.bench_timing import (
    OUT_OF_MEMORY,
    PRECISIONS,
    Findings,
    copy_bandwidth,
    dataset_info,
    in_units,
    median_seconds,
    per_sample_ms,
    product_rate,
    recipe_facts,
    synchronize,
    training_cost,
    with_crosses,
)
from ergoflow.pipeline.predict import rolled_out
from ergoflow.pipeline.progress import bar
from ergoflow.pipeline.reference import BASIS_SIZE, HISTOGRAM_BINS, HISTOGRAM_SIGMAS, Yardstick, new_statistics
from ergoflow.pipeline.runs import build_step, write_json
from ergoflow.pipeline.workspace import commit, hardware, versions
from ergoflow.solvers.channel import ChannelConfig, initial_populations
from ergoflow.solvers.channel import make_step as make_channel_step
from ergoflow.solvers.kolmogorov import initial_vorticity, make_step
from ergoflow.training.stepper import PhysicalStep

# What each bench can be told besides recipe, settings and device.
TAKES: dict[str, tuple[str, ...]] = {
    "solver": (),
    "lbm": (),
    "training": ("precision", "batch"),
    "rollout": ("batch", "steps"),
    "models": ("grids", "precision", "batch"),
    "ops": ("precision", "batch"),
}
# Bytes that one lattice update must move: 19 populations read and written, by storage.
FLOOR_BYTES: dict[Literal["float32", "float16"], int] = {"float32": 153, "float16": 77}
# The operators that are timed, with their names in the table; references at larger batches only if --batch asks for it.
BESIDE: dict[Impl, str] = {"reference": "reference", "auto": "fast"}
LARGEST_REFERENCE_BATCH = 8
# The length of roll-out for which the time is projected.
PROJECTED_STEPS = 1000


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What was asked for beyond the recipe; None leaves the choice to the bench."""

    grids: tuple[int, ...] | None = None
    precision: tuple[str, ...] | None = None
    batch: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers and the names of precisions."""
        for name, numbers in (("grids", self.grids or ()), ("batch", (self.batch,)), ("steps", (self.steps,))):
            if any(number is not None and number < 1 for number in numbers):
                raise ValueError(f"--{name} must be positive, got {getattr(self, name)}; choose 1 or more")
        if not set(self.precision or ()) <= set(PRECISIONS):
            raise ValueError(f"--precision must be out of {','.join(PRECISIONS)}, got {','.join(self.precision or ())}")

    @classmethod
    def parse(cls, *, grids: str | None, precision: str | None, batch: int | None, steps: int | None) -> BenchOptions:
        """The options of a command line, on which lists have commas."""
        try:
            sides = tuple(int(part) for part in grids.split(",")) if grids else None
        except ValueError:
            raise ValueError(f"--grids must be whole numbers such as 32,64,128, got {grids!r}") from None
        names = tuple(precision.split(",")) if precision else None
        return cls(grids=sides, precision=names, batch=batch, steps=steps)


def bench(
    what: str,
    recipes: Sequence[Recipe],
    options: BenchOptions,
    *,
    device: torch.device,
    console: Console,
    output: Path | None,
) -> None:
    """Run one bench, print its table, and write its JSON if asked.

    `models` without recipes takes all paper models; `lbm` takes none.
    """
    if what not in TAKES:
        raise ValueError(f"bench knows {', '.join(TAKES)}, got {what!r}; choose one of them")
    for name, value in dataclasses.asdict(options).items():
        if value is not None and name not in TAKES[what]:
            raise ValueError(f"bench {what} takes no --{name}, got {value}; drop it")
    findings = _run(what, recipes, options, device=device, console=console)
    of = f" of {recipes[0].name}" if len(recipes) == 1 else ""
    print_findings(findings, f"{what}{of} on {hardware(device)['device']}", console)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        facts = {"bench": what, "recipes": to_dict(list(recipes)), "options": dataclasses.asdict(options)}
        facts |= {"rows": findings.rows, "notes": findings.notes, "hardware": hardware(device)}
        write_json(output, facts | {"versions": versions(), "commit": commit()})


def _run(
    what: str, recipes: Sequence[Recipe], options: BenchOptions, *, device: torch.device, console: Console
) -> Findings:
    precisions, batch = options.precision or PRECISIONS, options.batch
    if what == "models":
        if recipes and options.grids:
            raise ValueError("bench models takes --recipe, whose data have a grid, or --grids, got both; drop one")
        cases = [recipe_case(recipe, recipe_facts(recipe)) for recipe in recipes]
        cases = cases or paper_cases(options.grids)
        return bench_models(cases, device=device, console=console, precisions=precisions, batch=batch or 1)
    if what == "lbm":
        return bench_lbm(device=device, console=console)
    if len(recipes) != 1:
        raise ValueError(f"bench {what} times one recipe, got {len(recipes)}; name one")
    recipe = recipes[0]
    match what:
        case "solver":
            return bench_solver(recipe, device=device, console=console)
        case "ops":
            return bench_operators(recipe, device=device, precisions=precisions, batch=batch)
        case "training":
            return bench_training(recipe, device=device, console=console, precisions=precisions, batch=batch)
    return bench_rollout(recipe, device=device, console=console, trajectories=batch, steps=options.steps)


def bench_solver(recipe: Recipe, *, device: torch.device, console: Console) -> Findings:
    """Kolmogorov steps per second, and their share of what the memory allows (`solver_floor_bytes`)."""
    dataset = recipe.dataset
    if not isinstance(dataset, KolmogorovDatasetConfig):
        raise ValueError(f"bench solver times Kolmogorov flow, got {dataset.name}; use `ergoflow bench lbm`")
    flow, substeps = dataset.flow, dataset.substeps
    bandwidth = copy_bandwidth(device)
    batches = (1, 16, 64, 220) if device.type == "cuda" else (1, 8)
    impls: tuple[StepImpl, ...] = ("torch", "triton") if device.type == "cuda" else ("torch",)
    rows = []
    with bar(console, "bench solver", len(impls) * len(batches), "rows") as advance:
        for impl, batch in itertools.product(impls, batches):
            step = make_step(flow, substeps=substeps, device=device, impl=impl)
            state = initial_vorticity(flow, batch, seed=0, device=device)
            seconds = median_seconds(lambda step=step, state=state: step(state), device) / substeps  # type: ignore[misc]
            row = {"grid": with_crosses(flow.grid), "step": impl, "batch": batch, "ms per step": 1e3 * seconds}
            row |= {"field-steps/s": batch / seconds, "copy TB/s": bandwidth / 1e12}
            rows.append(row | {"share of floor": batch * solver_floor_bytes(flow.grid) / bandwidth / seconds})
            advance()
    return Findings(
        rows, ["floor: what a fused step must move at the speed of a large copy; what stays in cache can be faster"]
    )


def bench_training(
    recipe: Recipe, *, device: torch.device, console: Console, precisions: Sequence[str], batch: int | None
) -> Findings:
    """Milliseconds per sample of the recipe's model, forward alone and in training; `batch` None tries several.

    The fast operators stand beside their references. The floor is the work of the model's products at the speed of a
    large one: forward once, in training three times.
    """
    facts = recipe_facts(recipe)
    step = build_step(recipe, facts, seed=0)
    shape = (len(facts.fields), *facts.grid)
    work = count_work(step.model, (1, *shape)).total
    step.to(device)
    usual = (1, 8, 32) if device.type == "cuda" else (1, recipe.training.batch_size)
    cases: list[tuple[str, Impl, int]] = [
        (precision, impl, size)
        for precision in precisions
        for impl in BESIDE
        for size in ((batch,) if batch else usual)
        if impl == "auto" or batch or size <= LARGEST_REFERENCE_BATCH
    ]
    rates = {precision: product_rate(device, precision) for precision in precisions}
    rows = []
    with bar(console, "bench training", len(cases), "rows") as advance:
        for precision, impl, size in cases:
            with use_impl(impl):
                recorded = impl == "auto"
                cost = training_cost(step, (size, *shape), precision=precision, device=device, recorded=recorded)
            floor = size * work / rates[precision]
            forward, training = cost.forward_seconds, cost.training_seconds
            row = {"precision": precision, "operators": BESIDE[impl], "batch": size}
            row |= {"forward ms": per_sample_ms(forward, size), "forward share": _share(floor, forward)}
            row |= {"training ms": per_sample_ms(training, size), "training share": _share(3 * floor, training)}
            row |= {"samples/s": OUT_OF_MEMORY if isinstance(training, str) else size / training}
            rows.append(row | {"GB": in_units(cost.training_bytes, 1e9)})
            advance()
    speeds = ", ".join(f"{2e-12 * rate:.3g} TFLOP/s in {precision}" for precision, rate in rates.items())
    return Findings(
        rows,
        [
            "milliseconds are per sample; GB is the GPU allocator's peak in a training step",
            "reference: kernels launched one by one; fast: on a GPU as recorded graphs",
            f"share: of the floor, {2e-9 * work:.4g} GFLOP forward and three times as many in training at the speed of "
            f"a large product, {speeds}",
        ],
    )


def _share(floor: float, seconds: float | str) -> float | str:
    return seconds if isinstance(seconds, str) else floor / seconds


def bench_operators(recipe: Recipe, *, device: torch.device, precisions: Sequence[str], batch: int | None) -> Findings:
    """The fast operators of `a3m` beside their references, and on a GPU each kernel under other settings."""
    model = recipe.model
    if not isinstance(model, A3MConfig):
        raise ValueError(f"bench ops times the operators of a3m, got {recipe.name}; name a recipe of a3m")
    sizes = Sizes(
        batch=batch or 8,
        grid=(recipe.dataset.grid[0], recipe.dataset.grid[1]),
        dim=model.dim,
        heads=model.heads,
        head_dim=model.head_dim,
        latent=model.latent,
        widths=model.decoder_widths,
        taps=model.decoder_kernels,
        groups=model.groups,
    )
    rows, notes = [], ["milliseconds per sample"]
    for precision in precisions:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        rows += [{"precision": precision} | row for row in operator_rows(sizes, device=device, dtype=dtype)]
    if device.type == "cuda":
        tuned = tuning_rows(sizes, device=device, dtype=torch.bfloat16)
        notes += [", ".join(f"{key} {value}" for key, value in row.items()) for row in tuned]
    return Findings(rows, notes)


def solver_floor_bytes(grid: tuple[int, int]) -> int:
    """Bytes that one float32 Kolmogorov step of one field must move when everything that can be is fused.

    Each of the five Runge–Kutta stages carries one complex field (the velocity u + iv, then its square) through the
    transforms along x and y. Only the columns inside the 2/3 mask, 2M_y + 1 of them, lie in memory between the two:
    P = 8X(2M_y + 1) bytes, written and read on the way to physical space and on the way back. State, explicit and
    implicit terms are S = 8(2M_x + 1)(M_y + 1) bytes each, four of which a stage reads or writes (the first and the
    last one less):

        bytes = 5 · 4P + (5 · 4 − 2) S.
    """
    x_modes, y_modes = 2 * dealias_limit(grid[0]) + 1, dealias_limit(grid[1]) + 1
    products, state = 8 * grid[0] * (2 * y_modes - 1), 8 * x_modes * y_modes
    return 4 * len(WEIGHTS) * products + (4 * len(WEIGHTS) - 2) * state


def bench_lbm(*, device: torch.device, console: Console) -> Findings:
    """Lattice updates per second with walls, force and eddies, and their share of what the memory allows.

    One call in the suite of a CPU is small; the numbers that count come from a GPU.
    """
    bandwidth = copy_bandwidth(device)
    boxes = ((512, 96, 96), (512, 192, 192), (1024, 192, 192)) if device.type == "cuda" else ((48, 32, 32),)
    steps = 100 if device.type == "cuda" else 2
    rows = []
    with bar(console, "bench lbm", len(boxes) * len(FLOOR_BYTES), "rows") as advance:
        for sides in boxes:
            for storage, bytes_per_cell in FLOOR_BYTES.items():
                flow = ChannelConfig(box=sides, storage=storage)
                state = initial_populations(flow, seed=0, device=device)
                step = make_channel_step(flow, substeps=steps, device=device)
                seconds = median_seconds(lambda step=step, state=state: step(state), device) / steps  # type: ignore[misc]
                rate = math.prod(sides) / seconds
                row = {
                    "box": with_crosses(sides),
                    "storage": storage,
                    "ms per step": 1e3 * seconds,
                    "GLUPS": rate / 1e9,
                }
                row |= {"copy TB/s": bandwidth / 1e12, "share of floor": rate * bytes_per_cell / bandwidth}
                rows.append(row)
                del state
                advance()
    return Findings(rows)


def bench_rollout(
    recipe: Recipe, *, device: torch.device, console: Console, trajectories: int | None, steps: int | None
) -> Findings:
    """Steps per second of `ergoflow predict`: all test trajectories at once, with streaming statistics.

    Every timed step does the full work: the statistics are first filled with as many frames as they have lags.
    (`predict` skips most of that work before its evaluation window, so the projection is an upper bound.) None means
    the recipe's test trajectories, and 100 steps on a GPU or 5 on a CPU.
    """
    length = steps or (100 if device.type == "cuda" else 5)
    facts = recipe_facts(recipe)
    assert not isinstance(recipe.dataset, FilesDatasetConfig)
    count = trajectories or recipe.dataset.test
    plain = PhysicalStep(build_step(recipe, facts, seed=0), facts.normalizer).to(device).eval()
    step = rolled_out(plain, recipe, device)
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(count, len(facts.fields), *facts.grid, generator=generator).to(device)
    statistics = _statistics(dataset_info(recipe), count, max_lag=recipe.evaluation.max_lag, device=device)
    with torch.inference_mode():
        model_seconds = median_seconds(lambda: step(state), device)
        one_seconds = median_seconds(lambda: step(state[:1]), device)
        bf16 = recipe.evaluation.precision == "bf16"
        with use_impl("reference"), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            eager_seconds = median_seconds(lambda: plain(state[:1]), device)
        for _ in range(recipe.evaluation.max_lag + 1):
            statistics.update(state)
        with bar(console, f"bench rollout {recipe.name}", length, "steps") as advance:
            synchronize(device)
            started = time.perf_counter()
            for frame in rollout(step, state, length):
                statistics.update(frame)
                advance()
            synchronize(device)
            seconds = (time.perf_counter() - started) / length
    row = {
        "grid": with_crosses(facts.grid),
        "precision": recipe.evaluation.precision,
        "trajectories": count,
        "steps": length,
        "one state, eager ms": 1e3 * eager_seconds,
        "one state ms": 1e3 * one_seconds,
        "model ms": 1e3 * model_seconds,
    }
    row |= {"model + statistics ms": 1e3 * seconds, "steps/s": 1 / seconds}
    row[f"s per {PROJECTED_STEPS} steps"] = PROJECTED_STEPS * seconds
    return Findings(
        [row],
        [
            "random weights; storing frames and scoring are not included",
            "eager: the reference operators, called one by one; the others as `predict` calls them",
        ],
    )


def _statistics(info: DatasetInfo, count: int, *, max_lag: int, device: torch.device) -> TrajectoryStatistics:
    """The statistics of `ergoflow predict` with random components: as large as fitted ones, and as dear."""
    points = len(info.fields) * math.prod(info.grid)
    generator = torch.Generator().manual_seed(0)
    basis = PCABasis(
        mean=torch.zeros(points, dtype=torch.float64),
        components=torch.randn(BASIS_SIZE, points, generator=generator, dtype=torch.float64),
        variances=torch.ones(BASIS_SIZE, dtype=torch.float64),
    )
    edges = np.linspace(-HISTOGRAM_SIGMAS, HISTOGRAM_SIGMAS, HISTOGRAM_BINS + 1)
    yardstick = Yardstick(basis=basis, edges=np.tile(edges, (len(info.fields), 1)), limit=math.inf)
    return new_statistics(info, yardstick, count, max_lag=max_lag, skip=0, device=device)


def print_findings(findings: Findings, title: str, console: Console) -> None:
    """A table of the rows, the value under `printed X` in brackets behind X, and the notes below."""
    names = [name for name in findings.rows[0] if not name.startswith("printed ")]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    columns = []
    for name in names:
        column = [_cell(row[name], row.get(f"printed {name}")) for row in findings.rows]
        # On a narrow screen headings are broken, and brackets go to the next line; numbers stay whole.
        table.add_column(name, overflow="fold", min_width=max(len(word) for cell in column for word in cell.split()))
        columns.append(column)
    for cells in zip(*columns, strict=True):
        table.add_row(*cells)
    console.print(table, crop=False)
    for note in findings.notes:
        console.print(note, style="dim", highlight=False)


def _cell(value: Any, printed: Any = None) -> str:
    if printed is not None:
        return f"{_cell(value)} ({_cell(printed)})"
    if value is None:
        return "–"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)

"""The benches: counts that can be done by hand, rows that can be compared, limits that are results."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from ergoflow.cli import main
from ergoflow.config import Recipe, override
from ergoflow.models.a3m import A3MConfig
from ergoflow.models.performer import PerformerConfig
from ergoflow.ops.choice import use_impl
from ergoflow.pipeline import bench_models as table
from ergoflow.pipeline import bench_timing
from ergoflow.pipeline.bench import BenchOptions, bench, bench_rollout, solver_floor_bytes
from ergoflow.pipeline.bench_models import Case, Work, count_kept_bytes, count_work, paper_cases, printed_costs
from ergoflow.pipeline.bench_timing import OUT_OF_MEMORY, median_seconds, recipe_facts, training_cost
from ergoflow.recipes import find_recipe
from ergoflow.report.published import COST_BY_GRID, COST_BY_MODEL

CPU = torch.device("cpu")
GIGA = 1e9
SMALL = A3MConfig(
    dim=8, latent=8, depth=1, heads=3, head_dim=4, decoder_widths=(8,), decoder_kernels=(3,), groups=2, sigma=1.0
)


@pytest.fixture(autouse=True)
def one_call_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_timing, "WARM_UP", 0)
    monkeypatch.setattr(bench_timing, "REPEATS", 1)


def quiet() -> Console:
    return Console(quiet=True)


def case(config: A3MConfig = SMALL, grid: tuple[int, ...] = (16, 12), channels: int = 1) -> Case:
    return Case(name="model", config=config, channels=channels, grid=grid, periodic=(True, True))


class Function(nn.Module):
    """A model made of one function."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.function(x)  # type: ignore[operator]
        return out


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (nn.Linear(3, 5), (2, 7, 3), 2 * 7 * 3 * 5),
        (nn.Conv2d(2, 6, 1), (1, 2, 5, 7), 2 * 6 * 5 * 7),
        (nn.Conv2d(4, 6, 3, groups=2), (3, 4, 5, 7), 3 * 6 * 2 * 9 * 3 * 5),
        (nn.Sequential(nn.GELU(), nn.LayerNorm(3)), (2, 3), 0),
        (Function(lambda x: x @ x.mT), (2, 5, 3), 2 * 5 * 5 * 3),
        (Function(lambda x: nn.functional.scaled_dot_product_attention(x, x, x)), (1, 2, 8, 4), 2 * 2 * 8 * 8 * 4),
    ],
    ids=["linear", "1x1 convolution", "grouped convolution", "elementwise", "product", "attention"],
)
def test_products_count_one_per_multiplication(model: nn.Module, shape: tuple[int, ...], expected: int) -> None:
    work = count_work(model, shape)
    assert work == Work(real=expected, complex=0, transforms=0)
    assert work.products == work.total == expected


def test_a_transform_counts_five_n_log_n_operations_and_half_of_it_on_real_numbers() -> None:
    channels, points, log2 = 3, 8 * 16, 3 + 4
    real = round(2.5 * channels * points * log2 / 2)
    there = count_work(Function(torch.fft.rfft2), (1, channels, 8, 16))
    back = count_work(Function(lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=(8, 16))), (1, channels, 8, 16))
    full = count_work(Function(torch.fft.fft2), (1, channels, 8, 16))
    one_axis = count_work(Function(lambda x: torch.fft.rfft(x, dim=2)), (1, channels, 8, 16))
    assert there == Work(real=0, complex=0, transforms=real)
    assert back.transforms == 2 * real
    assert full.transforms == 2 * real
    assert one_axis.transforms == round(2.5 * channels * points * 3 / 2)


def test_a_complex_product_is_one_in_print_and_four_in_truth() -> None:
    weight = torch.ones(4, 7, 3, 3, dtype=torch.complex64)

    def spectral(x: Tensor) -> Tensor:
        modes = torch.fft.rfft2(x)[..., :3, :3]
        return torch.einsum("bixy,ioxy->boxy", modes, weight)

    work = count_work(Function(spectral), (2, 4, 8, 8))
    assert (work.real, work.complex) == (0, 2 * 4 * 7 * 9)
    assert work.products == work.complex
    assert work.total == 4 * work.complex + work.transforms
    assert work.transforms > 0


def test_a3m_has_the_printed_work_but_for_the_mean_which_is_taken_before_its_projection() -> None:
    config = A3MConfig()
    for row, columns in ((COST_BY_GRID.rows["32×32"], 32), (COST_BY_GRID.rows["256×256"], 256)):
        grid = (columns, columns)
        work = count_work(table.build(case(config, grid)), (1, 1, *grid))
        # Two axes, one projection of the mean each: of all points in print, of one line of points here.
        saved = config.depth * 2 * config.dim**2 * (columns**2 - columns)
        printed = dict(zip(COST_BY_GRID.columns, row, strict=True))["gflops"]
        assert (work.products + saved) / GIGA == pytest.approx(printed, rel=0.02)
        assert work.total == work.products, "a3m has no transforms"
    assert round((work.products + saved) / GIGA) == 268


def test_kept_bytes_are_parameters_input_and_what_the_backward_pass_needs() -> None:
    rows, floats = 10, 4
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
    # The linear map keeps its input, the tanh its output; what flows between them is needed by neither.
    assert count_kept_bytes(model, (rows, 3)) == floats * (3 * 5 + 5 + 3 * rows + 5 * rows)
    twice = Function(lambda x: x)
    twice.layer = nn.Linear(3, 3, bias=False)
    twice.function = lambda x: twice.layer(x) * twice.layer(x)
    # The input and the weight are kept twice and counted once; each factor is kept, and the output is held.
    assert count_kept_bytes(twice, (rows, 3)) == floats * (9 + 4 * 3 * rows)


def test_counting_needs_no_memory_and_leaves_the_model_alone() -> None:
    model = table.build(case())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    # An input of 0.8 PB, were it real.
    assert count_work(model, (10**12, 1, 16, 12)).products > 10**12 * SMALL.dim * 16 * 12
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_paper_prints_costs_for_its_own_configuration_alone() -> None:
    wanted = dict(zip(COST_BY_MODEL.columns, COST_BY_MODEL.rows["Ours"], strict=True))
    assert printed_costs(case(A3MConfig(), (256, 256)), precision="fp32", batch=1) == wanted
    assert printed_costs(case(A3MConfig(), (64, 64)), precision="fp32", batch=1)["memory_mb"] == 537
    assert printed_costs(case(A3MConfig(), (48, 48)), precision="fp32", batch=1) == {}
    assert printed_costs(case(A3MConfig(heads=8), (256, 256)), precision="fp32", batch=1) == {}
    assert printed_costs(case(A3MConfig(), (256, 256), 3), precision="fp32", batch=1) == {}
    rebuttal = printed_costs(case(PerformerConfig(), (192, 192), 3), precision="fp32", batch=1)
    assert (rebuttal["parameters"], rebuttal["gflops"]) == (7_717_931, 271)
    assert printed_costs(case(PerformerConfig(), (192, 192)), precision="fp32", batch=1) == {}
    assert printed_costs(case(A3MConfig(), (256, 256)), precision="bf16", batch=1) == {}
    assert printed_costs(case(A3MConfig(), (256, 256)), precision="fp32", batch=2) == {}


def test_every_printed_name_is_in_the_papers_table_and_every_paper_model_builds() -> None:
    assert set(table.PRINTED_NAMES.values()) == set(COST_BY_MODEL.rows)
    *_, rebuttal = paper_cases(None)
    wanted = printed_costs(rebuttal, precision="fp32", batch=1)
    model = table.build(rebuttal)
    assert sum(p.numel() for p in model.parameters()) == wanted["parameters"]
    assert round(count_work(model, (1, 3, 192, 192)).products / 1e9) == wanted["gflops"]
    printed = {table.PRINTED_NAMES.get(c.name): c for c in paper_cases([256])}
    for label, values in COST_BY_MODEL.rows.items():
        model = table.build(printed[label])
        assert sum(p.numel() for p in model.parameters()) == values[0]


def test_a_cpu_does_not_try_what_its_memory_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {c.grid[0] for c in paper_cases(None)} == {32, 64, 128, 192, 256}

    def times(memory: float) -> list[object]:
        monkeypatch.setattr(table, "_memory_bytes", lambda: memory)
        (row,) = table.bench_models([case()], device=CPU, console=quiet(), precisions=("fp32",), batch=1).rows
        return [row["forward ms"], row["training ms"], row["kept MB"]]

    *fits, kept = times(float("inf"))
    assert all(isinstance(value, float) for value in fits)
    assert times(2.1e6 * kept)[0] > 0
    assert times(1.9e6 * kept) == ["out of memory", "out of memory", kept]


def test_a_row_holds_counts_times_and_no_peak_on_a_cpu() -> None:
    cases = [case(), case(grid=(20, 12))]
    found = table.bench_models(cases, device=CPU, console=quiet(), precisions=("fp32", "bf16"), batch=2)
    timed, bf16, larger, _ = found.rows
    assert (timed["grid"], timed["precision"], timed["batch"]) == ("16×12", "fp32", 2)
    assert timed["parameters"] == sum(p.numel() for p in table.build(case()).parameters())
    assert timed["forward ms"] > 0
    assert timed["training ms"] > timed["forward ms"]
    assert timed["kept MB"] > bf16["parameters"] * 4e-6
    assert bf16["kept MB"] is None
    assert larger["G mult-adds"] > timed["G mult-adds"] > 0
    assert all(row["forward MB"] is row["training MB"] is None for row in found.rows)


def test_a_grid_that_a_model_cannot_take_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    build = table.build_model

    def picky(config: object, i: int, o: int, grid: tuple[int, ...], **rest: object) -> nn.Module:
        if grid[0] < 16:
            raise ValueError("at least 16 points were expected, got 8; refine the grid")
        return build(config, i, o, grid, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(table, "build_model", picky)
    few, many = case(grid=(8, 8)), case()
    found = table.bench_models([few, many], device=CPU, console=quiet(), precisions=("fp32",), batch=1)
    assert [row["grid"] for row in found.rows] == ["16×12"]
    assert found.notes[-1].startswith("model has no 8×8: at least 16 points")
    with pytest.raises(ValueError, match="choose other grids"):
        table.bench_models([few], device=CPU, console=quiet(), precisions=("fp32",), batch=1)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_memory_that_runs_out_is_a_cell(error: RuntimeError) -> None:
    class Hungry(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                raise error
            return super().forward(x)

    cost = training_cost(Hungry(3, 3), (2, 3), precision="fp32", device=CPU)
    assert isinstance(cost.forward_seconds, float)
    assert cost.training_seconds == OUT_OF_MEMORY


def test_any_other_error_of_a_model_is_not_swallowed() -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("shapes do not match")

    model = Function(broken)
    model.weight = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match="shapes"):
        training_cost(model, (2, 3), precision="fp32", device=CPU)


def test_slow_calls_are_repeated_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_timing, "WARM_UP", 2)
    monkeypatch.setattr(bench_timing, "REPEATS", 10)
    calls: list[int] = []
    median_seconds(lambda: calls.append(0), CPU)
    assert len(calls) == 12
    monkeypatch.setattr(bench_timing, "PATIENCE_SECONDS", 0.0)
    median_seconds(lambda: calls.append(0), CPU)
    assert len(calls) == 12 + 1 + bench_timing.FEWEST_REPEATS


def test_the_solvers_floor_counts_what_lies_inside_the_mask() -> None:
    X, Y = 8, 16
    # Modes up to 2 of 8 and 5 of 16 points: 11 columns of products, a state of 5 × 6 modes, 8 bytes each.
    products, state = 8 * X * 11, 8 * 5 * 6
    assert solver_floor_bytes((X, Y)) == 20 * products + 18 * state


def channel() -> Recipe:
    return find_recipe("tcf32-a3m")


def plane() -> Recipe:
    return override(find_recipe("kf64-a3m"), ["dataset.flow.grid=[16, 16]"])


def test_channel_data_have_three_fields_and_walls() -> None:
    facts = recipe_facts(channel())
    assert (len(facts.fields), facts.grid, facts.periodic) == (3, (32, 32), (False, True))
    facts = recipe_facts(plane())
    assert (len(facts.fields), facts.grid, facts.periodic) == (1, (16, 16), (True, True))


@pytest.mark.parametrize(
    ("what", "recipes", "options", "columns"),
    [
        ("solver", [plane()], {}, {"field-steps/s", "copy TB/s", "share of floor"}),
        ("lbm", [], {}, {"GLUPS", "copy TB/s", "share of floor"}),
        ("training", [channel()], {"batch": 1}, {"forward ms", "training ms", "samples/s"}),
        ("training", [plane()], {"precision": ("fp32",)}, {"forward ms", "training ms", "samples/s"}),
        ("rollout", [channel()], {"batch": 2, "steps": 2}, {"model ms", "steps/s", "s per 1000 steps"}),
        ("rollout", [plane()], {"steps": 2}, {"model ms", "steps/s", "s per 1000 steps"}),
        ("models", [plane(), channel()], {"precision": ("fp32",)}, {"parameters", "G mult-adds", "forward ms"}),
    ],
)
def test_every_bench_writes_positive_numbers_with_their_provenance(
    what: str, recipes: list[Recipe], options: dict[str, object], columns: set[str], tmp_path: Path
) -> None:
    output = tmp_path / "new" / "bench.json"
    chosen = BenchOptions(**options)  # type: ignore[arg-type]
    bench(what, recipes, chosen, device=CPU, console=quiet(), output=output)
    data = json.loads(output.read_text())
    assert {"bench", "recipes", "options", "rows", "notes", "hardware", "versions", "commit"} == set(data)
    assert [recipe["name"] for recipe in data["recipes"]] == [recipe.name for recipe in recipes]
    assert data["rows"]
    for row in data["rows"]:
        assert all(row[name] > 0 for name in columns)


def test_a_roll_out_is_projected_from_its_own_rate() -> None:
    found = bench_rollout(plane(), device=CPU, console=quiet(), trajectories=None, steps=3)
    (row,) = found.rows
    assert (row["trajectories"], row["steps"]) == (plane().dataset.test, 3)
    assert row["s per 1000 steps"] == pytest.approx(1000 / row["steps/s"])


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["ergoflow", "bench", *words])
    monkeypatch.setenv("COLUMNS", "250")
    with pytest.raises(SystemExit) as stop:
        main()
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def test_the_command_prints_our_numbers_beside_the_papers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "_memory_bytes", lambda: 0)  # counted, not run
    monkeypatch.setattr(table, "GRIDS", (256,))
    monkeypatch.setattr(table, "full_size_models", lambda: {"a3m": A3MConfig()})
    code, out, _ = run(monkeypatch, capsys, "models", "--precision", "fp32", "--device", "cpu")
    assert code == 0
    assert "7,325,665 (7,325,665)" in out
    assert "259.1 (268)" in out
    assert "– (7,684)" in out
    assert "printed in the paper" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["solver", "--grids", "32"], "bench solver takes no --grids"),
        (["lbm", "--batch", "3"], "bench lbm takes no --batch"),
        (["models", "--steps", "3"], "bench models takes no --steps"),
        (["models", "--grids", "32,big"], "whole numbers such as 32,64,128"),
        (["models", "--grids", "32,-1"], "--grids must be positive"),
        (["models", "--precision", "fp32,fp8"], "out of fp32,bf16"),
        (["models", "--grids", "32", "--recipe", "kf64-a3m"], "got both; drop one"),
        (["models", "--set", "model.heads=8"], "name one with --recipe"),
        (["training", "--recipe", "kf64-a3m", "--recipe", "kf128-a3m"], "got 2; name one"),
        (["rollout", "--steps", "0"], "--steps"),
        (["solver", "--recipe", "tcf32-a3m"], "use `ergoflow bench lbm`"),
    ],
)
def test_what_a_bench_cannot_do_is_refused_in_one_line(
    words: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert expected in err


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_own_clock_unless_the_host_is_slower() -> None:
    cuda, cycles = torch.device("cuda"), 2_000_000
    once, twice = (median_seconds(lambda n=n: torch.cuda._sleep(n * cycles), cuda) for n in (1, 2))
    assert twice == pytest.approx(2 * once, rel=0.1)

    def hurried() -> None:
        time.sleep(once / 3)
        torch.cuda._sleep(cycles)

    def late() -> None:
        time.sleep(3 * once)
        torch.cuda._sleep(cycles)

    # What the host does while the GPU works costs nothing; what the GPU waits for does.
    assert median_seconds(hurried, cuda) == pytest.approx(once, rel=0.2)
    assert median_seconds(late, cuda) > 2.5 * once


@pytest.mark.gpu
def test_the_allocators_peak_is_at_least_what_is_kept() -> None:
    model = table.build(case(A3MConfig(), (64, 64)))
    kept = count_kept_bytes(model, (1, 1, 64, 64))
    # What is counted is the model as it is written down; the fast operators keep less.
    with use_impl("reference"):
        cost = training_cost(model.cuda(), (1, 1, 64, 64), precision="fp32", device=torch.device("cuda"))
    assert isinstance(cost.forward_bytes, int)
    assert isinstance(cost.training_bytes, int)
    assert kept < cost.forward_bytes
    assert cost.training_bytes > kept + 3 * 4 * 7_325_665, "gradients and two moments on top"

"""The table of all tasks in the README: which numbers stand where."""

from __future__ import annotations

from collections.abc import Callable

from ergoflow.report.evidence import Evidence
from ergoflow.report.runs import RunView, group_runs
from ergoflow.report.standing import MODELS, standing_block

MakeRun = Callable[..., RunView]


def rows(runs: list[RunView]) -> dict[tuple[str, str], list[str]]:
    """Cells of the block's table by flow and step, under their headings."""
    lines = [line for line in standing_block(Evidence(groups=group_runs(runs))).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][3:7] == [f"`{model}`" for model in MODELS]
    return {(row[0], row[1]): row[2:] for row in cells[2:]}


def shown(runs: list[RunView]) -> str:
    """Errors after 5 and 25 steps, the mean over seeds."""
    means = [
        sum(run.scores["metrics"][f"relative_l2@{lead}"]["rows"]["model"]["value"] for run in runs) / len(runs)
        for lead in (5, 25)
    ]
    return "/".join(f"{mean:.3g}" for mean in means)


def test_every_task_has_a_row_with_its_own_runs(make_run: MakeRun) -> None:
    good = make_run("kf256-coarse-ergoformer", dataset="kf256", skill=0.05)
    weak = make_run("kf256-coarse-a3m", dataset="kf256", skill=0.2)
    fine = make_run("kf128-a3m", dataset="kf128", skill=0.1)
    fine.scores["step_seconds"] = 0.02  # type: ignore[index]
    coarse = [make_run("kf128-coarse-a3m", seed=seed, dataset="kf128", skill=0.3 + seed / 10) for seed in (0, 1)]
    other = make_run("kf128-a3m-base", dataset="kf128", skill=0.01)
    table = rows([good, weak, fine, *coarse, other])
    assert len(table) == 3
    by_model = {flow: dict(zip(MODELS, cells[1:5], strict=True)) for (flow, _), cells in table.items()}
    assert f"**{shown([good])}**" in by_model["Kolmogorov flow, 256²"]["ergoformer"]
    assert f"[{shown([weak])}](results/kf256-coarse-a3m/seed0.json)" == by_model["Kolmogorov flow, 256²"]["a3m"]
    assert by_model["Kolmogorov flow, 256²"]["convnext"] == "–"
    text = standing_block(Evidence(groups=group_runs([good, weak, fine, *coarse, other])))
    assert f"**{shown([fine])}**](results/kf128-a3m/seed0.json)" in text
    assert f"**{shown(coarse)}**](results/kf128-coarse-a3m/seed0.json) (2 seeds)" in text
    assert shown([other]) not in text


def test_nothing_run_names_the_command() -> None:
    assert "ergoflow reproduce table1" in standing_block(Evidence())

from __future__ import annotations

import re

import pytest

from ergoflow.report import published
from ergoflow.report.published import PublishedTable, main_table


@pytest.mark.parametrize(
    ("dataset", "source"),
    [("kf256", "Table 1"), ("tcf192", "Table 2"), ("kf128", "Table 3"), ("kf256-coarse", "Table 1")],
)
def test_each_dataset_is_held_against_its_printed_table(dataset: str, source: str) -> None:
    table = main_table(dataset)
    assert table is not None
    assert table.source == source


def test_a_dataset_the_paper_does_not_have_has_no_printed_table() -> None:
    assert main_table("kf64") is None
    assert main_table("kf2560") is None


@pytest.mark.parametrize("table", [published.TABLE_1, published.TABLE_2])
def test_printed_advantage_follows_from_the_printed_rows(table: PublishedTable) -> None:
    """Advantage = (best baseline − ours)/best baseline, which a wrongly copied digit would break."""
    *baselines, ours, advantage = table.rows.values()
    for column, printed in enumerate(advantage):
        best = min(row[column] for row in baselines)
        assert 100 * (best - ours[column]) / best == pytest.approx(printed, abs=0.06), table.columns[column]


def test_tables_3_and_4_and_the_cost_tables_share_their_common_row() -> None:
    assert published.TABLE_3.rows["+ Unitary Op."] == published.TABLE_4.rows["σ = 8"]
    assert published.COST_BY_MODEL.rows["Ours"][1:] == published.COST_BY_GRID.rows["256×256"]
    count = re.search(r"[\d,]{9}", published.COST_BY_GRID.caption)
    assert count is not None
    assert int(count.group().replace(",", "")) == published.COST_BY_MODEL.rows["Ours"][0]


def test_a_row_with_a_number_too_few_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Table 9 needs 2 numbers a row, got 1 in 'x'; copy"):
        PublishedTable(source="Table 9", caption="", dataset="kf256", columns=("a", "b"), rows={"x": (1.0,)})

"""Documents made of results: blocks between marks, figures that follow their cells, and the committed page itself."""

from __future__ import annotations

import json
import shutil
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from ergoflow.cli import main
from ergoflow.pipeline import pictures
from ergoflow.pipeline.document import BLOCKS, MARK, PAPER_BLOCKS, document, filled, gather, mark
from ergoflow.pipeline.pictures import draw_figures, figures_to_draw, read_index
from ergoflow.report.evidence import Evidence
from ergoflow.report.paper_figures import MAX_BYTES

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if MARK.search(page.read_text())
]
REPAIR = "run `ergoflow reproduce figures` and `ergoflow report --results results --no-page --document FILE`"


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda p: p.name)
def test_the_committed_document_is_what_the_results_say(page: Path) -> None:
    place = "results" if page.parent == ROOT else "../results"
    assert filled(page.read_text(), gather(ROOT / "results", place=place), where=page.name) == page.read_text(), REPAIR


def test_the_committed_figures_belong_to_the_committed_cells_and_are_small() -> None:
    evidence = gather(ROOT / "results")
    assert [p.slug for p in figures_to_draw(evidence, ROOT / "results")] == [], REPAIR
    files = sorted((ROOT / "results" / "figures").glob("*.png"))
    assert {path.name for path in files} == {e["file"] for e in read_index(ROOT / "results").values() if e["file"]}
    assert all(path.stat().st_size <= MAX_BYTES for path in files)


def test_every_block_is_in_a_committed_page_and_those_about_the_paper_in_one() -> None:
    names = {page.name: {match[1] for match in MARK.finditer(page.read_text())} for page in DOCUMENTS}
    assert names["reproduction.md"] == set(PAPER_BLOCKS)
    assert set().union(*names.values()) == set(BLOCKS)


def test_only_what_stands_between_the_marks_changes(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    begin, end = mark("claims").split("\n")
    page.write_text(f"# Ours\n\n{begin}\nyesterday\n{end}\n\nLast words.\n")
    document(tmp_path / "results", page)
    text = page.read_text()
    assert text.startswith(f"# Ours\n\n{begin}\n\n")
    assert text.endswith(f"\n\n{end}\n\nLast words.\n")
    assert "yesterday" not in text
    assert "| Table 1 | on KF256" in text
    document(tmp_path / "results", page)
    assert page.read_text() == text


def test_a_new_document_has_all_blocks_about_the_paper_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    document(tmp_path / "results", tmp_path / "new.md")
    assert {match[1] for match in MARK.finditer((tmp_path / "new.md").read_text())} == set(PAPER_BLOCKS)
    for text, found in (("no marks", "no pair of marks"), (mark("tabel1"), "the unknown tabel1")):
        (tmp_path / "bad.md").write_text(text)
        with pytest.raises(ValueError, match=f"must hold blocks .* got {found}"):
            document(tmp_path / "results", tmp_path / "bad.md")
        assert (tmp_path / "bad.md").read_text() == text
    with pytest.raises(ValueError, match="a folder of results was expected"):
        document(tmp_path / "nowhere", tmp_path / "new.md")


@pytest.fixture
def lorenz_results(tmp_path: Path) -> Path:
    """The one result that a checkout surely has."""
    shutil.copytree(ROOT / "results" / "lorenz", tmp_path / "results" / "lorenz")
    return tmp_path / "results"


def test_a_figure_is_drawn_once_and_again_when_its_numbers_change(lorenz_results: Path) -> None:
    def drawn() -> tuple[list[str], Evidence]:
        evidence = gather(lorenz_results)
        wanted = [picture.slug for picture in figures_to_draw(evidence, lorenz_results)]
        draw_figures(evidence, lorenz_results, console=Console(quiet=True))
        return wanted, gather(lorenz_results)

    wanted, evidence = drawn()
    assert wanted == ["lorenz63"]
    assert (evidence.stale, list(evidence.pictures)) == ([], ["lorenz63"])
    assert drawn()[0] == []
    path = lorenz_results / "lorenz" / "lorenz63.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"reference": 0.9}))
    assert gather(lorenz_results).stale == ["lorenz63"]
    assert drawn()[0] == ["lorenz63"]
    (lorenz_results / "figures" / "lorenz63.png").unlink()
    assert drawn()[0] == ["lorenz63"]


def test_a_picture_that_cannot_be_made_small_is_an_error(lorenz_results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="lorenz63 must have at most 1,000 bytes"):
        draw_figures(gather(lorenz_results), lorenz_results, console=Console(quiet=True))


def test_a_palette_keeps_the_picture() -> None:
    stream = BytesIO()
    rows = np.linspace(0, 255, 120).astype(np.uint8)
    Image.fromarray(np.stack(np.broadcast_arrays(rows, rows[:, None], 0 * rows), axis=-1)).save(stream, format="png")
    before, after = (np.asarray(Image.open(BytesIO(png)).convert("RGB"), float) for png in
                     (stream.getvalue(), pictures._with_palette(stream.getvalue())))  # fmt: skip
    assert float(np.abs(before - after).mean()) < 8


def test_documents_can_be_written_without_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["report", "--results", str(ROOT / "results"), "--no-page", "--document", str(tmp_path / "new.md")]
    monkeypatch.setattr(sys, "argv", ["ergoflow", *words, "--root", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    assert [path.name for path in tmp_path.iterdir()] == ["new.md"]


def test_the_command_line_writes_documents_before_there_are_cells(
    lorenz_results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = lorenz_results.parent

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["ergoflow", *words, "--root", str(root)])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0)

    (root / "b.md").write_text(mark("headline") + "\n")
    pages = ["--document", str(root / "a.md"), "--document", str(root / "b.md")]
    assert run("report", "--results", str(lorenz_results), *pages) == 0
    assert "learned map" in (root / "a.md").read_text()
    assert "has not been run yet" in (root / "b.md").read_text()
    assert not (root / "report").exists()
    assert run("reproduce", "figures", "--dry-run") == 0
    assert "draw 1" in capsys.readouterr().out
    for option in ("--budget", "--within"):
        assert run("reproduce", "cost", option, "4m") == 2
        assert "are for recipes, got cost alone" in capsys.readouterr().err
        assert run("reproduce", "mini", option, "soon") == 2
        assert f"{option} must be a duration such as 90s, 4m or 1h, got 'soon'" in capsys.readouterr().err

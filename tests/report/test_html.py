from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from ergoflow.report.html import names_drawn, render
from ergoflow.report.runs import RunView

Make = Callable[..., RunView]
VOID = {"meta", "link", "input", "br", "img", "hr"}
SIZE_LIMIT = 15_000_000


class Outline(HTMLParser):
    """Checks that every element is closed in order, and gathers ids, references and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.references: list[str] = []
        self.unlabelled: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        given = dict(attrs)
        if "id" in given:
            self.ids[str(given["id"])] += 1
        self.references += [str(given[name]) for name in ("src", "href", "action", "srcset") if name in given]
        if tag == "svg" and not given.get("aria-label"):
            self.unlabelled.append(tag)
        self.faults += [f"{tag} has {name}" for name in given if name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> out of order")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def outline(page: Path) -> Outline:
    parser = Outline()
    parser.feed(page.read_text(encoding="utf-8"))
    parser.close()
    return parser


@pytest.fixture(scope="module")
def folder(make_run: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of two seeds of one model, another model, and a channel."""
    runs = [
        make_run("kf256-a", seed=0, dataset="kf256"),
        make_run("kf256-a", seed=1, dataset="kf256"),
        make_run("kf256-b", dataset="kf256", skill=0.4),
        make_run("tcf192-a", dataset="tcf192", walls=True),
    ]
    runs[2].scores["metrics"]["me_ape"]["rows"]["model"].update(value=None, low=None, high=None, verdict="failed")
    for run in runs:
        run.scores["metrics"]["delta_lambda"]["rows"]["zero"].update(value=None, low=None, high=None, verdict=None)
    return render(runs, tmp_path_factory.mktemp("report"), title="A & B").parent


def only(run: RunView, *families: str) -> RunView:
    """The run with some of its curves and without a log."""
    return dataclasses.replace(run, curves={k: v for k, v in run.curves.items() if k.startswith(families)}, log=[])


def test_the_page_is_well_formed_with_unique_ids(folder: Path) -> None:
    parsed = outline(folder / "index.html")
    assert parsed.faults == []
    assert parsed.open == []
    assert [name for name, count in parsed.ids.items() if count > 1] == []
    assert parsed.unlabelled == []


def test_the_page_loads_nothing(folder: Path) -> None:
    parsed = outline(folder / "index.html")
    assert [ref[:60] for ref in parsed.references if not ref.startswith(("data:", "#"))] == []
    text = (folder / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"https?://|//[a-z0-9-]+\.[a-z]|@import|url\((?!#)", text) == []


def test_inner_links_lead_somewhere(folder: Path) -> None:
    parsed = outline(folder / "index.html")
    targets = [ref[1:] for ref in parsed.references if ref.startswith("#")]
    assert set(targets) <= set(parsed.ids)
    assert {"main", "kf256", "tcf192"} <= set(targets)


def test_every_figure_is_also_a_png(folder: Path) -> None:
    parsed = outline(folder / "index.html")
    pictures = {path.stem for path in folder.glob("*.png")}
    assert pictures
    assert pictures <= set(parsed.ids)
    assert {"kf256-error-growth", "kf256-spectrum", "kf256-snapshots-2-kf256-b", "tcf192-walls"} <= pictures
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))


def test_tables_beside_the_page_hold_what_the_page_shows(folder: Path) -> None:
    tables = json.loads((folder / "tables.json").read_text(encoding="utf-8"))["tables"]
    assert [table["dataset"] for table in tables] == ["kf256", "tcf192"]
    with (folder / "tables.csv").open(newline="", encoding="utf-8") as stream:
        lines = list(csv.DictReader(stream))
    assert len(lines) == sum(len(row["cells"]) for table in tables for row in table["rows"])
    text = (folder / "index.html").read_text(encoding="utf-8")
    for table in tables:
        for row in table["rows"]:
            for cell in row["cells"].values():
                shown = "Infinity" if cell["value"] is None else repr(cell["value"])
                assert cell["verdict"] == "undefined" or f'data-value="{shown}"' in text


def test_the_best_run_comes_first_and_the_cards_say_whose_they_are(make_run: Make, tmp_path: Path) -> None:
    runs = [make_run(name, skill=skill) for name, skill in (("poor", 0.5), ("best", 0.01), ("fair", 0.06))]
    bare = [dataclasses.replace(run, curves={}, log=[]) for run in runs]
    text = render(bare, tmp_path, title="t").read_text(encoding="utf-8")
    assert re.findall(r'<tr class="model"><th scope="row">(\w+)', text)[:3] == ["best", "fair", "poor"]
    assert '<h3>Best of 3: best</h3><ul class="cards">' in text
    rows = json.loads((tmp_path / "tables.json").read_text(encoding="utf-8"))["tables"][0]["rows"]
    assert [row["label"] for row in rows[:3]] == ["best", "fair", "poor"]


def test_a_menu_of_runs_stands_where_there_is_a_choice(folder: Path) -> None:
    ids = outline(folder / "index.html").ids
    assert "kf256-runs" in ids
    assert "tcf192-snapshots-1-tcf192-a" in ids
    assert "tcf192-runs" not in ids


def test_a_null_score_is_shown_as_failed(folder: Path) -> None:
    text = (folder / "index.html").read_text(encoding="utf-8")
    assert re.search(r'class="cell failed" data-metric="me_ape" data-value="Infinity"><b>failed</b>', text)


def test_a_constant_has_no_mixing_rate_and_its_cell_is_not_red(folder: Path) -> None:
    text = (folder / "index.html").read_text(encoding="utf-8")
    (zero, *_) = re.findall(r'<tr class="reference"><th scope="row">zero</th>.*?</tr>', text)
    assert "failed" not in zero
    (cell,) = re.findall(r'<span class="cell missing" data-metric="delta_lambda" title="([^"]+)">–<', zero)
    assert "not defined" in cell


def test_equal_runs_give_equal_bytes(make_run: Make, tmp_path: Path) -> None:
    curves = {name: value for name, value in make_run().curves.items() if name.startswith(("spectrum", "player"))}
    pages = [
        render([dataclasses.replace(make_run(), curves=curves)], tmp_path / name, title="t") for name in ("a", "b")
    ]
    assert pages[0].read_bytes() == pages[1].read_bytes()


@pytest.mark.parametrize(
    ("family", "identifier"),
    [
        ("spectrum", "kf64-spectrum"),
        ("relative_l2", "kf64-error-growth"),
        ("player", "kf64-player"),
        ("tke", "kf64-kinetic-energy-1-kf64-a3m"),
    ],
)
def test_missing_curves_leave_their_section_out(make_run: Make, tmp_path: Path, family: str, identifier: str) -> None:
    chosen = ("spectrum", "relative_l2", "player", "tke")
    curves = {name: value for name, value in make_run().curves.items() if name.startswith(chosen)}
    kept = {name: value for name, value in curves.items() if not name.startswith(family)}
    ids = outline(render([dataclasses.replace(make_run(), curves=kept)], tmp_path, title="t")).ids
    assert identifier not in ids
    assert len([name for name in ids if name.startswith("kf64-")]) > 3


def test_every_run_and_task_is_told_when_it_is_drawn(make_run: Make, tmp_path: Path) -> None:
    runs = [make_run("one"), make_run("bare"), make_run("two"), make_run("other", dataset="kf128")]
    for name in [name for name in runs[1].curves if name.startswith(("tke", "snapshots", "attention"))]:
        del runs[1].curves[name]  # type: ignore[attr-defined]
    told: list[str] = []
    render(runs, tmp_path, title="t", drawn=told.append)
    assert told == names_drawn(runs) == ["kf64", "one", "bare", "two", "kf128", "other"]


def test_a_run_without_any_curve_still_has_its_table(make_run: Make, tmp_path: Path) -> None:
    page = render([dataclasses.replace(make_run(), curves={}, log=[])], tmp_path, title="t")
    parsed = outline(page)
    assert parsed.faults == []
    assert "kf64-scores" in parsed.ids
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.html", "tables.csv", "tables.json"]


@pytest.mark.parametrize(("dataset", "printed"), [("kf256-coarse", True), ("waves", False)])
def test_printed_numbers_stand_on_pages_of_data_that_the_paper_has(
    make_run: Make, tmp_path: Path, dataset: str, printed: bool
) -> None:
    page = render([dataclasses.replace(make_run(dataset=dataset), curves={}, log=[])], tmp_path, title="t")
    assert ("printed" in outline(page).ids) == printed
    assert ("ICML" in page.read_text(encoding="utf-8")) == printed


@pytest.mark.parametrize(("count", "tag"), [(1, "p"), (2, "p"), (3, "li")])
def test_a_page_of_many_tasks_opens_with_a_list(make_run: Make, tmp_path: Path, count: int, tag: str) -> None:
    runs = [dataclasses.replace(make_run(f"m{n}", dataset=f"flow{n}"), curves={}, log=[]) for n in range(count)]
    header, _, _ = render(runs, tmp_path, title="t").read_text(encoding="utf-8").partition("</header>")
    assert len(re.findall(rf"<{tag}[^>]*>On flow\d in steps", header)) == count


@pytest.mark.parametrize(("names", "said"), [(("a",), False), (("a", "b"), True)])
def test_a_page_that_names_the_best_model_says_how_it_is_found(
    make_run: Make, tmp_path: Path, names: tuple[str, ...], said: bool
) -> None:
    runs = [dataclasses.replace(make_run(name), curves={}, log=[]) for name in names]
    page = render(runs, tmp_path, title="t").read_text(encoding="utf-8")
    assert ("Best: most headline metrics" in page) == ("does best" in page) == said


def test_the_menu_under_a_heading_names_variants_and_does_not_repeat_the_heading(folder: Path) -> None:
    text = (folder / "index.html").read_text(encoding="utf-8")
    (menu, *_) = re.findall(r'ME-APE</button>(<select class="variant".*?</select>)', text)
    assert 'aria-label="Variant of ME-APE"' in menu
    assert re.findall(r"<option[^>]*>(.*?)</option>", menu) == ["main", "shells 1–16"]


def definitions(runs: list[RunView], folder: Path) -> str:
    text = render([dataclasses.replace(run, curves={}, log=[]) for run in runs], folder, title="t").read_text("utf-8")
    return text.partition("How each number is defined")[2].partition("</details>")[0]


def test_what_all_definitions_share_is_said_once(make_run: Make, tmp_path: Path) -> None:
    run = make_run()
    metrics = run.scores["metrics"]
    for key in ("me_ape", "me_lrw", "delta_lambda"):
        metrics[key]["definition"] = f"mean of |Ep-Et|/Et; {key}; 8 x 150 model and 8 x 150 truth frames."
    text = definitions([run], tmp_path / "same")
    assert text.count("8 x 150 model") == text.count("Lower is better") == text.count("Ep and Et are") == 1
    assert "<dd>mean of |Ep-Et|/Et; me_lrw.</dd>" in text
    metrics["me_lrw"].update(better="higher", definition="8 x 9 model and 8 x 9 truth frames.")
    text = definitions([run], tmp_path / "differing")
    assert text.count("Lower is better") == len(metrics) - 1
    assert "<dd>8 x 9 model and 8 x 9 truth frames. Higher is better.</dd>" in text


def provenance(page: Path) -> list[str]:
    """The cells of the only run's line in the table of provenance."""
    _, _, table = page.read_text(encoding="utf-8").partition("Runs behind this page")
    return re.findall(r"<td>(.*?)</td>", table.partition("</tbody>")[0])


def test_a_training_is_shown_with_its_own_commit_where_another_scored_it(make_run: Make, tmp_path: Path) -> None:
    run = dataclasses.replace(make_run(), curves={}, log=[])
    same, other = ({"commit": commit} for commit in (run.scores["commit"], "fedcba9876543210"))
    known = render([dataclasses.replace(run, training=same)], tmp_path, title="t")
    assert provenance(known)[-4:] == provenance(render([run], tmp_path, title="t"))[-4:]
    cells = provenance(render([dataclasses.replace(run, training=other)], tmp_path, title="t"))
    assert cells[-5] == "0123456789ab"
    assert cells[-3].endswith(", commit fedcba987654")


def test_imported_data_were_not_simulated(make_run: Make, tmp_path: Path) -> None:
    run = dataclasses.replace(make_run(), curves={}, log=[])
    assert provenance(render([run], tmp_path, title="t"))[-4] == "31 s"
    run = dataclasses.replace(run, recipe={"dataset": {"kind": "files"}})
    assert provenance(render([run], tmp_path, title="t"))[-4] == "imported"


def test_hostile_names_are_text(make_run: Make, tmp_path: Path) -> None:
    name = '</script><img src=x onerror="alert(1)">\'../../$a_b$'
    run = make_run(name, dataset="<i>kf</i>/../x")
    families = ("spectrum", "player", "tke", "series")
    run = dataclasses.replace(
        run,
        recipe={"note": "</pre><script>alert(2)</script>"},
        curves={key: value for key, value in run.curves.items() if key.startswith(families)},
    )
    page = render([run], tmp_path / "report", title="<script>alert(3)</script>")
    parsed = outline(page)
    assert parsed.faults == []
    assert parsed.tags["img"] == 0
    # The player's data and the page's own script.
    assert parsed.tags["script"] == 2
    assert any(name in text for text in parsed.text)
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
    assert all(re.fullmatch(r"[a-z0-9-]+\.png|index\.html|tables\.(csv|json)", p.name) for p in page.parent.iterdir())


def test_hostile_names_of_several_runs_end_no_attribute_and_no_menu(make_run: Make, tmp_path: Path) -> None:
    names = ['"><img src=x onerror=alert(1)>', "</option></select><img src=y>", "<img src=z>&amp;"]
    runs = [only(make_run(name, dataset="kf"), "relative_l2", "tke", "player") for name in names]
    late = runs[2].curves["player/steps"] + 1
    runs[2] = dataclasses.replace(runs[2], curves={**runs[2].curves, "player/steps": late})
    parsed = outline(render(runs, tmp_path, title="t"))
    assert parsed.faults == []
    assert parsed.tags["img"] == 0
    assert set(names) <= set(parsed.text)


def test_hostile_words_of_scores_are_text(make_run: Make, tmp_path: Path) -> None:
    word = '"><img src=x onerror=alert(1)>'
    runs = [only(make_run(f"m{n}", dataset=f"{word}{n}")) for n in range(3)]
    for run in runs:
        run.scores.update(remark=word, commit=word)
        for metric in run.scores["metrics"].values():
            metric.update(label=word + metric["label"], unit=word, definition=word)
    parsed = outline(render(runs, tmp_path, title="t"))
    assert parsed.faults == []
    assert parsed.tags["img"] == 0
    assert any(word in text for text in parsed.text)


def test_runs_of_different_tests_are_to_be_compared_with_care(make_run: Make, tmp_path: Path) -> None:
    runs = [only(make_run(name)) for name in ("a", "b")]
    assert "with care" not in render(runs, tmp_path, title="t").read_text(encoding="utf-8")
    runs[1].scores["rollout_steps"] = 2000
    text = render(runs, tmp_path, title="t").read_text(encoding="utf-8")
    assert "4 test trajectories, 1,000 steps; 4 test trajectories, 2,000 steps. Runs were scored on different" in text


def test_a_model_has_one_colour_in_all_chapters(make_run: Make, tmp_path: Path) -> None:
    names = {"kf": ("kf-a", "kf-b"), "tcf": ("tcf-b", "tcf-a", "tcf-c")}
    skill = {"kf-a": 0.05, "kf-b": 0.5, "tcf-b": 0.05, "tcf-a": 0.5, "tcf-c": 0.6}
    runs = [
        only(make_run(name, dataset=dataset, skill=skill[name]), "relative_l2")
        for dataset in names
        for name in names[dataset]
    ]
    text = render(runs, tmp_path, title="t").read_text(encoding="utf-8")
    kf, tcf = (
        dict(re.findall(r"stroke: (#\w{6});[^>]*/></g><g><text[^>]*>([abc])</text>", drawing))
        for drawing in re.findall(r'<figure id="\w+-error-growth".*?</figure>', text, flags=re.DOTALL)
    )
    assert len(tcf) == 3
    assert kf.items() < tcf.items()


def test_printed_tables_have_the_digits_of_print(make_run: Make, tmp_path: Path) -> None:
    text = render([only(make_run(dataset="kf256"))], tmp_path, title="t").read_text(encoding="utf-8")
    for row, cells in (
        ("MNO", "1.02 1.29 0.42 0.70 0.40 0.42"),
        ("Advantage (%)", "6.12 5.80 6.67 9.52 20.0"),
        ("128×128", "42 1,986 50.2"),
        ("UNO", "17,438,305 12 769 6.88"),
    ):
        assert f'<th scope="row">{row}</th>' + "".join(f"<td>{cell}</td>" for cell in cells.split()) in text


def test_every_table_that_moves_sideways_can_be_moved_by_keys(make_run: Make, tmp_path: Path) -> None:
    text = render([only(make_run(dataset="kf256"))], tmp_path, title="t").read_text(encoding="utf-8")
    tables = re.findall(r'<div class="scroll"[^>]*>', text)
    assert len(tables) > 5
    assert all('role="region" aria-label="' in tag and 'tabindex="0"' in tag for tag in tables)


def test_time_is_told_in_the_units_of_the_data(make_run: Make, tmp_path: Path) -> None:
    families = ("relative_l2", "autocorrelation", "snapshots", "player")
    run = only(make_run(), *families)
    channel = dataclasses.replace(
        only(make_run("c", dataset="tcf"), *families), recipe={"dataset": {"kind": "channel"}}
    )
    text = render([run], tmp_path, title="t").read_text(encoding="utf-8")
    assert "steps of 0.1 s," in text
    assert "δ/u_τ" not in text
    text = render([run, channel], tmp_path, title="t").read_text(encoding="utf-8")
    for words in (
        *("<span>0.1 δ/u_τ</span>", "<span>0.1 δ/u_τ per step</span>", "steps of 0.1 δ/u_τ, c"),
        *("lead time (steps of 0.1 δ/u_τ)", "lag (steps of 0.1 δ/u_τ)", ">0.5 δ/u_τ<"),
        '"time_unit":' + json.dumps("δ/u_τ"),
    ):
        assert words in text, words


def test_the_player_names_the_runs_it_cannot_show(make_run: Make, tmp_path: Path) -> None:
    runs = [only(make_run(name, skill=skill), "player") for name, skill in (("a", 0.1), ("b", 0.5))]
    assert "not shown" not in render(runs, tmp_path, title="t").read_text(encoding="utf-8")
    late = runs[1].curves["player/steps"] + 1
    runs[1] = dataclasses.replace(runs[1], curves={**runs[1].curves, "player/steps": late})
    assert "other steps, not shown: b.</p>" in render(runs, tmp_path, title="t").read_text(encoding="utf-8")


def test_every_task_of_a_data_set_has_its_chapter_whatever_others_are_called(make_run: Make, tmp_path: Path) -> None:
    runs = [only(make_run(name, dataset=dataset)) for name, dataset in (("a", "kf"), ("b", "kf-3"), ("c", "kf"))]
    runs[2].scores["step_seconds"] = 0.2
    assert names_drawn(runs) == ["kf", "a", "kf-3", "b", "kf-2", "c"]
    assert {"kf", "kf-2", "kf-3"} <= set(outline(render(runs, tmp_path, title="t")).ids)


def test_twenty_runs_fit_on_one_page(make_run: Make, tmp_path: Path) -> None:
    runs = [make_run(f"model-{n:02d}", skill=0.02 * 1.2**n, grid=(32, 32), frames=30) for n in range(20)]
    families = ("relative_l2", "tke", "player", "series")
    runs = [
        dataclasses.replace(run, curves={k: v for k, v in run.curves.items() if k.startswith(families)}) for run in runs
    ]
    page = render(runs, tmp_path, title="Twenty")
    parsed = outline(page)
    assert page.stat().st_size < SIZE_LIMIT
    assert parsed.faults == []
    assert "".join(parsed.text).count("model-19") > 5


def test_a_large_run_stays_small_enough_to_send(make_run: Make, tmp_path: Path) -> None:
    run = make_run(grid=(160, 160), frames=60)
    noise = np.random.default_rng(0).standard_normal((60, 160, 160))
    families = ("player", "snapshots", "tke")
    curves = {key: value for key, value in run.curves.items() if key.startswith(families)}
    # White noise does not compress: the worst case.
    run = dataclasses.replace(run, curves={**curves, "player/truth": noise, "player/model": noise[::-1]})
    assert render([run], tmp_path, title="Large").stat().st_size < 5_000_000


def test_figures_that_only_an_earlier_page_had_are_gone_and_other_files_are_not(make_run: Make, tmp_path: Path) -> None:
    runs = [only(make_run(name), "spectrum", "tke") for name in ("first", "second")]
    render([runs[0]], tmp_path, title="t")
    (tmp_path / "kf64-kinetic-energy.png").write_bytes(b"mine")
    assert (tmp_path / "kf64-kinetic-energy-1-first.png").exists()
    for _ in range(2):
        render([runs[1]], tmp_path, title="t")
        assert sorted(path.name for path in tmp_path.glob("*.png")) == [
            "kf64-kinetic-energy-1-second.png",
            "kf64-kinetic-energy.png",
            "kf64-spectrum.png",
        ]


def test_a_damaged_page_is_replaced(make_run: Make, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_bytes(b"\xff\x00")
    assert "<title>t</title>" in render([only(make_run())], tmp_path, title="t").read_text(encoding="utf-8")


def test_the_page_is_written_last(make_run: Make, tmp_path: Path) -> None:
    written: list[str] = []
    render([only(make_run(), "spectrum")], tmp_path, title="t", write=lambda path, content: written.append(path.name))
    assert written == ["kf64-spectrum.png", "tables.json", "tables.csv", "index.html"]
    assert list(tmp_path.iterdir()) == []


def test_the_scripts_hash_in_the_policy_is_the_scripts(folder: Path) -> None:
    text = (folder / "index.html").read_text(encoding="utf-8")
    script = text[text.rindex("<script>") + len("<script>") : text.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text

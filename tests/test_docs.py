"""The documentation tells the truth: commands parse, names and links exist, tables are complete, snippets run."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import re
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from rich.console import Console

from ergoflow.cli import app
from ergoflow.config import ChannelDatasetConfig, FilesDatasetConfig, KolmogorovDatasetConfig, Recipe, override, to_dict
from ergoflow.config.recipe import KINDS
from ergoflow.metrics import CATALOGUE
from ergoflow.pipeline import reference
from ergoflow.pipeline.predict import predict
from ergoflow.pipeline.score import score
from ergoflow.pipeline.simulate import simulate
from ergoflow.pipeline.train import train
from ergoflow.pipeline.verify import verify
from ergoflow.pipeline.workspace import Workspace
from ergoflow.recipes import catalogue, find_dataset, find_recipe, find_recipes

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
HOWTO = (ROOT / "docs" / "howto.md").read_text()
VERBS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELLS = ("", "bash", "sh", "console", "shell")
# Words that end one command and begin another.
SEPARATORS = ("&&", "||", ";", "|")
# A data set or a recipe written like this stands for any.
PLACEHOLDER = re.compile(r"[A-Z]+")


def page_id(value: object) -> str:
    return value.name if isinstance(value, Path) else str(value)


def fenced(text: str, languages: typing.Sequence[str]) -> list[str]:
    return [body for language, body in FENCE.findall(text) if language in languages]


def shell_commands(text: str) -> Iterator[list[str]]:
    """The simple commands of all shell blocks, without prompts, comments and variables set in front."""
    for block in fenced(text, SHELLS):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.strip().removeprefix("$ ")
            if not re.match(r"(\w+=\S* )*(\S*/)?(ergoflow|torchrun|make) ", line):
                continue
            words = shlex.split(line, comments=True)
            for ends, group in itertools.groupby(words, SEPARATORS.__contains__):
                command = list(itertools.dropwhile(lambda word: re.match(r"\w+=", word), group))
                if not ends and command:
                    yield command


def ergoflow_arguments(command: list[str]) -> list[str] | None:
    """What follows `ergoflow`, typed or under torchrun; None for another program."""
    if command[0] == "torchrun":
        assert command[command.index("-m") + 1] == "ergoflow", command
        return command[command.index("-m") + 2 :]
    return command[1:] if Path(command[0]).name == "ergoflow" else None


def parsed(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """(verb, parameters) as the command line understands them; nothing is run."""
    verb, *rest = arguments
    assert verb in VERBS, f"no verb {verb!r}"
    return verb, VERBS[verb].make_context(verb, list(rest)).params


COMMANDS = [
    pytest.param(arguments, id=f"{page.name}: {' '.join(arguments)}")
    for page in PAGES
    for command in shell_commands(page.read_text())
    if (arguments := ergoflow_arguments(command)) is not None and not arguments[0].startswith("-")
]


def test_the_documentation_has_commands_to_check() -> None:
    assert {command.values[0][0] for command in COMMANDS} >= {"simulate", "train", "predict", "score", "report"}  # type: ignore[index]


@pytest.mark.parametrize("arguments", COMMANDS)
def test_every_command_parses_and_names_what_exists(arguments: list[str]) -> None:
    verb, params = parsed(arguments)
    settings = params.get("settings") or []
    names = params.get("names") or [name for name in (params.get("name"), params.get("recipe")) if name]
    if verb == "import":
        # It names what is not there yet.
        names = []
    for name in names:
        if PLACEHOLDER.fullmatch(name):
            continue
        if verb == "simulate" and not name.endswith(".json"):
            assert find_dataset(name, settings)
        else:
            # A recipe file is the reader's own: its settings are checked on a recipe that has them all.
            for recipe in find_recipes(["kf64-a3m" if name.endswith(".json") else name]):
                override(recipe, settings)


def test_the_commands_of_the_reproduction_go_on_with_the_results_of_this_repository(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cell made under another budget would be refused."""
    page, results = (ROOT / "docs" / "reproduction.md").read_text(), ROOT / "results"
    commands = [found for command in shell_commands(page) if (found := ergoflow_arguments(command)) is not None]
    plans = [rest for verb, *rest in commands if verb == "reproduce"]
    for rest in plans:
        words = [*rest, "--dry-run", "--results", str(results), "--root", str(tmp_path), "--device", "cpu"]
        VERBS["reproduce"].main(words, standalone_mode=False)
    shown = capsys.readouterr().out
    assert len(plans) >= 2
    assert sum("done" in line for line in shown.splitlines()) >= len(list(results.glob("kf*/seed*.json")))


@pytest.mark.parametrize(
    "line", ["ergoflow dance kf64", "ergoflow train kf64-a3m --speed 9", "ergoflow train kf64-a3m --seed x"]
)
def test_a_wrong_command_would_be_noticed(line: str) -> None:
    (command,) = shell_commands(f"```bash\n{line}\n```\n")
    arguments = ergoflow_arguments(command)
    assert arguments is not None
    with pytest.raises((AssertionError, typer.BadParameter.__mro__[2])):
        parsed(arguments)


def test_commands_are_found_behind_variables_prompts_and_comments() -> None:
    lines = ["$ A=1 B=2 ergoflow report --title 'a b' && ergoflow recipes  # all", "torchrun -m ergoflow demo"]
    text = "\n".join(["```bash", *lines, "```", ""])
    found = [ergoflow_arguments(command) for command in shell_commands(text)]
    assert found == [["report", "--title", "a b"], ["recipes"], ["demo"]]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_make_target_exists(page: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    used = [command[1] for command in shell_commands(page.read_text()) if command[0] == "make"]
    assert set(used) <= set(targets)


def test_the_command_line_table_lists_every_verb_with_its_options() -> None:
    rows = dict(re.findall(r"^\| `ergoflow (\w+)[^`]*` \|.*\|([^|]*)\|$", REFERENCE, re.MULTILINE))
    assert set(rows) == set(VERBS)
    for verb, cell in rows.items():
        options = {name for p in VERBS[verb].params for name in p.opts if name.startswith("--")}
        assert set(re.findall(r"--[\w-]+", cell)) == options - {"--help"}, verb


def settings_of(cls: Any, prefix: str = "", made: Any = None) -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, type, default) of every setting of a recipe, of every kind of data set and model.

    Where a field makes its default, that is `made`: its values are the defaults, not those of its class.
    """
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if (prefix, field.name) == ("", "dataset"):
            # Settings of other data are listed under names of their own; `--set` leaves the mark out.
            yield from settings_of(KolmogorovDatasetConfig, "dataset.")
            yield from settings_of(ChannelDatasetConfig, "channel:dataset.")
            yield from settings_of(FilesDatasetConfig, "files:dataset.")
        elif (prefix, field.name) == ("", "model"):
            # So are those of the models other than the paper's.
            for mark, model in KINDS.items():
                if model in typing.get_args(kind):
                    yield from settings_of(model, "model." if mark == "a3m" else f"{mark}:model.")
        elif dataclasses.is_dataclass(kind):
            factory = field.default_factory
            own = None if factory is dataclasses.MISSING else factory()
            yield from settings_of(kind, f"{prefix}{field.name}.", own)
        else:
            yield f"{prefix}{field.name}", kind, field.default if made is None else getattr(made, field.name)


SETTINGS = {name: (kind, default) for name, kind, default in settings_of(Recipe)}
SETTING_ROWS = {
    name: (default, meaning)
    for name, default, meaning in re.findall(
        r"^\| `([\w.:]+)` \| [^|]+ \| (required|`[^`]+`) \| (.+) \|$", REFERENCE, re.MULTILINE
    )
}


def test_the_tables_of_settings_are_complete() -> None:
    assert set(SETTING_ROWS) == set(SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_documented_with_its_default_and_its_choices(name: str) -> None:
    (kind, default), (printed, meaning) = SETTINGS[name], SETTING_ROWS[name]
    if default is dataclasses.MISSING:
        assert printed == "required"
        return
    assert _value(printed.strip("`")) == json.loads(json.dumps(default))
    if typing.get_origin(kind) is typing.Literal:
        assert set(typing.get_args(kind)) <= set(re.findall(r"`([^`]+)`", meaning))


def _value(text: str) -> Any:
    """A default as `--set` would read it."""
    if text == "none":
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def test_every_metric_is_described_with_its_parent() -> None:
    rows = dict(re.findall(r"^\| `([^`]+)` \| .+ \| (?:`([^`]+)`)? ?\|$", REFERENCE, re.MULTILINE))
    for key, info in CATALOGUE.items():
        assert key in rows, f"{key} has no row in docs/reference.md"
        assert (rows[key] or None) == info.variant_of, key


def slugs(text: str) -> set[str]:
    """Anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=page_id)
def test_every_relative_link_resolves(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        goal = page.parent / path if path else page
        assert goal.exists(), f"{page.name} links to {target}"
        if anchor and goal.suffix == ".md":
            assert anchor in slugs(goal.read_text()), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", LINKED, ids=page_id)
def test_python_snippets_compile(page: Path) -> None:
    for number, snippet in enumerate(fenced(page.read_text(), ("python", "py"))):
        compile(snippet, f"{page.name}[{number}]", "exec")


def test_named_recipes_exist() -> None:
    known = {*catalogue(), *(recipe.dataset.name for recipe in catalogue().values())}
    for page in PAGES:
        for name in re.findall(r"`(kf\d+[\w-]*)`", page.read_text()):
            assert name in known, f"{page.name} names {name}"


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder that the script of "Use your own data" and the verbs after it leave, in a small way."""
    (script,) = [snippet for snippet in fenced(HOWTO, ("python",)) if "ShardWriter(" in snippet]
    fast = ["training.max_steps=2", "training.tensorboard=false", "evaluation.resamples=20", "evaluation.steps=130"]
    root, console = tmp_path_factory.mktemp("own"), Console(quiet=True)
    with contextlib.chdir(root):
        exec(compile(script, "howto.md", "exec"), {})
    recipe = override(find_recipe(str(root / "waves.json")), fast)
    assert verify(root / "data" / "waves", console=console)
    where: dict[str, Any] = {"seed": 0, "device": torch.device("cpu"), "console": console}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "TRIVIAL_RESAMPLES", 2)
        train(recipe, Workspace(root), **where)
        predict(recipe, Workspace(root), **where)
        return score(recipe, Workspace(root), **where)


def test_the_script_for_own_data_leads_through_the_pipeline_to_scores(own_run: Path) -> None:
    scores = json.loads((own_run / "scores.json").read_text())
    assert (scores["name"], scores["dataset"], scores["survival"]["steps"]) == ("waves-a3m", "waves", 130)
    assert set(CATALOGUE) <= set(scores["metrics"])


def test_a_model_of_ones_own_is_measured_as_the_pipeline_measures_it(own_run: Path) -> None:
    """The model of the example changes nothing: its numbers are those of persistence."""
    (script,) = [snippet for snippet in fenced(HOWTO, ("python",)) if "class MyModel" in snippet]
    found: dict[str, Any] = {}
    root = own_run.parents[2]
    (root / "waves.json").write_text((own_run / "recipe.json").read_text())
    with contextlib.chdir(root):
        exec(compile(script, "howto.md", "exec"), found)
    metrics = json.loads((root / found["folder"] / "scores.json").read_text())["metrics"]
    for key in ("relative_l2@5", "me_lrw", "tke_error"):
        assert metrics[key]["rows"]["model"]["value"] == metrics[key]["rows"]["persistence"]["value"]


def test_the_settings_for_a_vorticity_of_ones_own_train_on_it(tmp_path: Path) -> None:
    (settings,) = [json.loads(f"{{{text}}}") for text in fenced(HOWTO, ("json",)) if '"ergoformer"' in text]
    sizes = ["dataset.flow.grid=[32, 32]", "dataset.frames=12", "dataset.spin_up_seconds=1", "dataset.train=2"]
    recipe = to_dict(override(find_recipe("kf64-a3m"), [*sizes, "dataset.valid=1", "dataset.test=2"])) | settings
    (tmp_path / "mine.json").write_text(json.dumps(recipe))
    chosen = override(find_recipe(str(tmp_path / "mine.json")), ["training.max_steps=2", "training.tensorboard=false"])
    where: dict[str, Any] = {"device": torch.device("cpu"), "console": Console(quiet=True)}
    simulate(chosen.dataset, Workspace(tmp_path), **where)
    folder = train(chosen, Workspace(tmp_path), seed=0, **where)
    assert math.isfinite(json.loads((folder / "log.jsonl").read_text().splitlines()[-1])["loss"])


def test_every_key_of_the_files_is_documented(own_run: Path) -> None:
    for name in ("run.json", "training.json", "rollout/rollout.json", "scores.json"):
        for key in json.loads((own_run / name).read_text()):
            assert re.search(rf"`{key}[`.]", REFERENCE), f"{name} has {key}"


def test_every_curve_is_documented(own_run: Path) -> None:
    table = REFERENCE.split("### curves.npz")[1].split("\n## ")[0]
    known = {name for entry in re.findall(r"`([^`]+)`", table) for name in spelled_out(entry)}
    with np.load(own_run / "curves.npz") as curves:
        for name in curves.files:
            described = re.sub(r"^(attention(?:_last)?)/.*", r"\1/<axis>", name)
            assert described in known, f"{name} is not in docs/reference.md"


def spelled_out(entry: str) -> list[str]:
    """`a/{b,c}` is a/b and a/c, as in a shell."""
    parts = [part.split(",") for part in re.split(r"[{}]", entry)]
    return ["".join(choice) for choice in itertools.product(*parts)]

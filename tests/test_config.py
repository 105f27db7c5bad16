"""Recipes and their JSON twins."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from ergoflow.config import Recipe, first_difference, from_dict, load_recipe, override, to_dict
from ergoflow.pipeline.reference import skipped_frames
from ergoflow.recipes import catalogue, datasets, find_dataset, find_recipe


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_recipe_survives_the_round_trip_through_json(name: str) -> None:
    recipe = catalogue()[name]
    assert from_dict(Recipe, json.loads(json.dumps(to_dict(recipe)))) == recipe


def test_recipe_file_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = override(find_recipe("kf64-a3m"), ["training.epochs=7", "model.sigma=4"])
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(to_dict(recipe)))
    assert load_recipe(path) == recipe == find_recipe(str(path)) == find_recipe(str(path.parent))
    assert find_dataset(str(path.parent), []) == recipe.dataset
    monkeypatch.chdir(path.parent)
    assert find_recipe(".") == recipe


def test_override_changes_one_setting_and_nothing_else() -> None:
    before = find_recipe("kf64-a3m")
    after = override(before, ["training.epochs=11"])
    assert after.training.epochs == 11
    assert dataclasses.replace(after, training=before.training) == before


def test_the_first_difference_is_named_with_its_path_and_both_values() -> None:
    recipe = find_recipe("kf64-a3m")
    assert first_difference(recipe, override(recipe, [])) is None
    changed = override(recipe, ["dataset.flow.grid=[32, 48]", "training.epochs=11"])
    assert first_difference(recipe, changed) == ("dataset.flow.grid", [64, 64], [32, 48])
    assert first_difference(changed.training, recipe.training) == ("epochs", 11, recipe.training.epochs)


def test_configurations_of_two_kinds_differ_in_their_kind_first() -> None:
    a3m, mno = (find_recipe(f"kf64-{name}").model for name in ("a3m", "mno"))
    assert first_difference(a3m, mno) == ("kind", "a3m", "mno")


@pytest.mark.parametrize("name", [" ", "", ".hidden", "a/b"])
def test_a_name_that_is_no_folder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="names a folder, so it must be a word"):
        dataclasses.replace(find_recipe("kf64-a3m"), name=name)


def test_a_switch_takes_the_words_of_json() -> None:
    with pytest.raises(ValueError, match=r"training\.augment must be true or false, got 'True'"):
        override(find_recipe("kf64-a3m"), ["training.augment=True"])


def test_a_roll_out_is_held_or_guarded() -> None:
    assert override(find_recipe("kf64-a3m"), ["task.hold=0.1"]).task.hold == 0.1
    with pytest.raises(ValueError, match="either held or guarded"):
        override(find_recipe("kf64-mno"), ["task.hold=0.1"])


def test_override_types_values() -> None:
    recipe = override(
        find_recipe("kf64-a3m"),
        [
            "training.learning_rate=1",
            "task.predict=state",
            "training.ema_decay=none",
            "dataset.flow.grid=[32, 48]",
        ],
    )
    assert isinstance(recipe.training.learning_rate, float)
    assert recipe.task.predict == "state"
    assert recipe.training.ema_decay is None
    assert recipe.dataset.grid == (32, 48)


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("training.epoch=5", "unknown key 'training.epoch'; did you mean epochs"),
        ("task.hold=1", "task.hold must be in [0, 1), got 1.0"),
        ("trainning.epochs=5", "unknown key 'trainning'; did you mean training"),
        ("training.epochs=five", "training.epochs must be of type int, got 'five'"),
        ("training.epochs=true", "training.epochs must be of type int, got True"),
        ("training.epochs=2.5", "training.epochs must be of type int, got 2.5"),
        ("task.predict=future", "task.predict must be one of state, increment, got 'future'"),
        ("training=5", "training is a group of settings"),
        ("training.epochs.more=5", "goes too deep"),
        ("training.epochs", "--set must look like training.epochs=5"),
        ("dataset.flow.grid=[63, 64]", "even"),
        ("dataset.flow.dt=0.03", "whole number of solver steps"),
        ("dataset.flow.grid=[64]", "must have 2 entries, got 1"),
        ("dataset.frame_seconds=0", "dataset.frame_seconds must be above 0, got 0.0"),
        ("dataset.frame_seconds=-0.2", "dataset.frame_seconds must be above 0, got -0.2"),
        ("dataset.spin_up_seconds=Infinity", "whole number of frames"),
        ("dataset.name=../kf64", "dataset.name names a folder"),
        ("name=", "name names a folder"),
        ("name=a3m/wide", "without '/' or a leading '.', got 'a3m/wide'"),
        ("name=..", "name names a folder"),
        ("model.kind=zero", "cannot be set alone"),
        ("evaluation.steps=50", "evaluation.steps must exceed"),
    ],
)
def test_bad_setting_says_what_was_expected(assignment: str, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        override(find_recipe("kf64-a3m"), [assignment])


@pytest.mark.parametrize("key", ["spin_up", "coarse_spin_up"])
@pytest.mark.parametrize("value", ["-1", "NaN", "Infinity"])
def test_a_channel_is_spun_up_for_some_time_or_not_at_all(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"dataset\.{key} must be a number of δ/u_τ from 0 on, got (-1\.0|nan|inf);"):
        override(find_recipe("tcf96-a3m"), [f"dataset.{key}={value}"])
    assert getattr(override(find_recipe("tcf96-a3m"), [f"dataset.{key}=0"]).dataset, key) == 0


@pytest.mark.parametrize(
    ("part", "kind", "expected"),
    [
        ("model.unet", "a3m", "model.unet.kind must be convnext, got 'a3m'; correct it"),
        ("model.unet", None, "model.unet.kind must be convnext, got None; correct it"),
        ("model", "rubbish", "model.kind must be one of a3m, "),
        ("model", "kolmogorov", "model.kind must be one of a3m, "),
        ("training", "rubbish", "unknown key 'training.kind'; "),
        ("dataset.flow", "channel", "unknown key 'dataset.flow.kind'; "),
    ],
)
def test_a_kind_that_is_not_the_settings_own_is_refused(part: str, kind: str | None, expected: str) -> None:
    data = to_dict(find_recipe("kf64-ergoformer"))
    settings = data
    for name in part.split("."):
        settings = settings[name]
    settings["kind"] = kind
    with pytest.raises(ValueError, match=re.escape(expected)):
        from_dict(Recipe, data)


def test_a_setting_below_a_kind_is_unknown() -> None:
    with pytest.raises(ValueError, match=r"unknown key 'model\.kind'"):
        override(find_recipe("kf64-a3m"), ["model.kind.depth=1"])
    with pytest.raises(ValueError, match="unknown key 'kind'"):
        override(find_recipe("kf64-a3m"), ["kind.depth=1"])


def test_every_published_recipe_is_still_read() -> None:
    """Those of the cells and of the shipped models."""
    root = Path(__file__).parents[1]
    cells = [json.loads(path.read_text())["recipe"] for path in root.glob("results/**/seed*.json")]
    shipped = [json.loads(path.read_text()) for path in root.glob("src/ergoflow/pretrained/*/recipe.json")]
    assert cells
    assert shipped
    for recipe in (*cells, *shipped):
        assert to_dict(from_dict(Recipe, recipe))["model"]["kind"] == recipe["model"]["kind"]


def test_a_word_that_may_be_none_says_so() -> None:
    with pytest.raises(ValueError, match=r"model\.flow must be one of velocity, carried or none, got 'carreid'"):
        override(find_recipe("kf64-ergoformer"), ["model.flow=carreid"])
    assert override(find_recipe("kf64-ergoformer"), ["model.flow=none"]).model.flow is None


def test_unknown_names_list_near_misses() -> None:
    with pytest.raises(ValueError, match="did you mean kf64-a3m"):
        find_recipe("kf64-a3n")
    with pytest.raises(ValueError, match="did you mean kf256"):
        find_dataset("kf265", [])
    with pytest.raises(ValueError, match="there is none"):
        find_recipe("no/such/recipe.json")
    with pytest.raises(ValueError, match=r"expected at tests/recipe\.json, but there is none"):
        find_recipe("tests/")


def test_missing_key_in_a_file_is_named(tmp_path: Path) -> None:
    data = to_dict(find_recipe("kf64-a3m"))
    del data["dataset"]["name"]
    path = tmp_path / "r.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"dataset\.name is missing"):
        load_recipe(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="syntax error at line 1"):
        load_recipe(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"r\.json must be a recipe in JSON, got a file that is not text"):
        load_recipe(path)


def test_coarse_recipes_share_the_fine_data() -> None:
    fine, coarse = find_recipe("kf128-a3m"), find_recipe("kf128-coarse-a3m")
    assert fine.dataset == coarse.dataset
    assert coarse.step_seconds == pytest.approx(0.1)
    assert fine.step_seconds == pytest.approx(0.02)


def test_kf128_is_every_second_point_of_kf256() -> None:
    known = datasets()
    assert known["kf128"].grid == (128, 128)
    assert dataclasses.replace(known["kf128"], name="kf256", subsample=1) == known["kf256"]
    assert known["kf256"].substeps == 12
    assert known["kf256"].spin_up_frames == 2000


@pytest.mark.parametrize(("name", "skipped"), [("kf256-transient-a3m", 0), ("kf256-a3m", 501), ("tcf96-a3m", 406)])
def test_statistics_of_a_transient_are_of_the_times_of_the_truth_and_others_of_the_last_steps(
    name: str, skipped: int
) -> None:
    recipe = find_recipe(name)
    assert skipped_frames(recipe.evaluation, recipe.dataset.frames) == skipped
    assert recipe.evaluation.steps + 1 - skipped == recipe.dataset.frames

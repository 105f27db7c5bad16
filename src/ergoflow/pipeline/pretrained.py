"""Models that come with the package, and how a run becomes one.

    src/ergoflow/pretrained/<recipe>/{recipe.json, run.json, training.json, scores.json, model.safetensors, check.*}

The weights are in half precision: a relative rounding error of 5e-4 per weight, far below what training leaves. What
that does to the score is measured when a model is exported, and again by the tests (`ergoflow.pipeline.check`).
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from ergoflow.config import Recipe, load_recipe
from ergoflow.data.files import read_json, read_npz, write_bytes_atomic
from ergoflow.models.ergoformer import ErgoformerConfig
from ergoflow.pipeline.check import LEAD, SCORES_FILE, STATES_FILE, write_check
from ergoflow.pipeline.hub import fetch_model, is_hub_id
from ergoflow.pipeline.runs import SUMMARY_FILE, build_step, is_trained, read_facts, weights_digest, write_run
from ergoflow.pipeline.workspace import Workspace
from ergoflow.training.checkpoint import WEIGHTS_FILE, load_weights, save_weights

SHELF = Path(__file__).parents[1] / "pretrained"
FACTS = ("recipe.json", "run.json", SUMMARY_FILE, "scores.json")
# Parameters times points of the grid up to which 1000 steps take about a minute on two cores.
SMALL = 6e10


def pretrained_models() -> dict[str, Path]:
    """Folders of the models that come with the package, by the name of their recipe."""
    return {path.parent.name: path.parent for path in sorted(SHELF.glob(f"*/{WEIGHTS_FILE}"))}


def find_model(name: str | Path) -> Path:
    """The run folder `name`, the pretrained model of that name, or the model of the hub with that id, downloaded."""
    folder, known = Path(name), pretrained_models()
    if folder.is_dir():
        return folder
    if str(name) in known:
        return known[str(name)]
    if isinstance(name, str) and is_hub_id(name):
        return fetch_model(name, (*FACTS, WEIGHTS_FILE), optional=(STATES_FILE, SCORES_FILE))
    raise ValueError(
        f"a run folder, a pretrained model or a hub id owner/name was expected, got {str(name)!r}; "
        f"train one, or choose one of: {', '.join(known) or 'none is shipped'}"
    )


def stored_states(folder: Path) -> Tensor:
    """First frames (B, C, *grid) of the test windows that go with an exported model, in physical units."""
    path = folder / STATES_FILE
    if not path.exists():
        raise ValueError(
            f"an exported model with its {STATES_FILE} was expected in {folder}, which has none; "
            "run `ergoflow export`, or take a state from the data set"
        )
    facts = read_facts(folder)
    states = torch.from_numpy(read_npz(path, remedy="export the model again")["states"][:, 0]).float()  # normalised
    return facts.normalizer.denormalize(states, grid_ndim=len(facts.grid))


def best_small_model() -> Path:
    """The shipped model with the largest ratio of the persistence error to its own.

    Only those on periodic planes that are small enough for two CPU cores are looked at.
    """
    known = pretrained_models()
    small = {folder: gain for folder in known.values() if (gain := _gain(folder)) is not None}
    if not small:
        raise ValueError(
            f"a small pretrained model was expected in the package, which holds {', '.join(known) or 'none'}; "
            "name one, or a folder that `ergoflow export` wrote"
        )
    return max(small, key=lambda folder: small[folder])


def export_model(folder: Path, target: Path) -> Path:
    """Write a scored run without data, states and roll-out, its weights in half precision; return the weights' path.

    A few test windows go with it, and the score of the weights on them: `ergoflow.pipeline.check`.
    """
    # A second `predict` that was stopped leaves the scores, but not what they were made of.
    if not is_trained(folder) or not all((folder / name).exists() for name in ("scores.json", "rollout/rollout.json")):
        raise ValueError(
            f"a scored run was expected in {folder}, but it is not complete; train, predict and score it first"
        )
    scored = read_json(folder / "scores.json", remedy="run `ergoflow score` again").get("weights")
    if scored is not None and scored != weights_digest(folder):
        raise ValueError(f"{folder} was trained further since it was scored; `ergoflow predict` and `score` it again")
    recipe = load_recipe(folder / "recipe.json")
    if isinstance(recipe.model, ErgoformerConfig) and recipe.model.noise:
        raise ValueError(
            f"a model whose forecasts are the same on every machine was expected, got {recipe.name}, which draws them "
            f"(model.noise={recipe.model.noise}); share its run folder: `ergoflow.load` takes that, too"
        )
    model = build_step(recipe, read_facts(folder), seed=0).model
    metadata = load_weights(model, folder / WEIGHTS_FILE)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype == torch.float32:
            tensor.data = tensor.data.half()
    # A model that is refused must not take the place of an earlier one.
    with TemporaryDirectory() as place:
        draft = Path(place)
        for name in FACTS:
            shutil.copyfile(folder / name, draft / name)
        save_weights(model, draft / WEIGHTS_FILE, metadata=metadata)
        write_check(folder, draft)
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted(draft.iterdir()):
            write_bytes_atomic(target / path.name, path.read_bytes())
    return target / WEIGHTS_FILE


def install(name: str | Path, workspace: Workspace, *, seed: int, recipe: Recipe | None = None) -> Path:
    """Put a pretrained model where a training run of `recipe` would be; an existing run is left alone.

    None is the recipe it was trained by.
    """
    source = find_model(name)
    recipe = load_recipe(source / "recipe.json") if recipe is None else recipe
    folder = workspace.run(recipe.name, seed)
    if not (folder / "run.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for file in (SUMMARY_FILE, WEIGHTS_FILE):
            shutil.copyfile(source / file, folder / file)
        write_run(folder, recipe, read_facts(source))
    elif (folder / WEIGHTS_FILE).read_bytes() != (source / WEIGHTS_FILE).read_bytes():
        raise ValueError(f"{folder} was expected to hold the weights of {source}, but holds others; remove that folder")
    return folder


def _gain(folder: Path) -> float | None:
    """Error of persistence over the model's at τ = 5, as published; None for a channel or a model above SMALL."""
    facts = read_facts(folder)
    parameters = json.loads((folder / SUMMARY_FILE).read_text())["parameters"]
    if not all(facts.periodic) or parameters * math.prod(facts.grid) > SMALL:
        return None
    rows = json.loads((folder / "scores.json").read_text())["metrics"][f"relative_l2@{LEAD}"]["rows"]
    return float(rows["persistence"]["value"] / rows["model"]["value"])

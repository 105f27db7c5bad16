"""Models that come with the package, and how a run becomes one.

    src/ergoflow/pretrained/<recipe>/{recipe.json, run.json, training.json, scores.json, model.safetensors}

The weights are in half precision: a relative rounding error of 5e-4 per weight, far below what training leaves.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from ergoflow.config import load_recipe
from ergoflow.data.files import write_bytes_atomic
from ergoflow.pipeline.runs import build_step, is_trained, read_facts
from ergoflow.pipeline.workspace import Workspace
from ergoflow.training.checkpoint import WEIGHTS_FILE, load_weights, save_weights

SHELF = Path(__file__).parents[1] / "pretrained"
FACTS = ("recipe.json", "run.json", "training.json", "scores.json")


def pretrained_models() -> dict[str, Path]:
    """Folders of the models that come with the package, by the name of their recipe."""
    return {path.parent.name: path.parent for path in sorted(SHELF.glob(f"*/{WEIGHTS_FILE}"))}


def find_model(name: str | Path) -> Path:
    """The run folder `name`, or the pretrained model of that name."""
    folder, known = Path(name), pretrained_models()
    if folder.is_dir():
        return folder
    if str(name) in known:
        return known[str(name)]
    raise ValueError(
        f"a run folder or a pretrained model was expected, got {str(name)!r}; "
        f"train one, or choose one of: {', '.join(known) or 'none is shipped'}"
    )


def export_model(folder: Path, target: Path) -> Path:
    """Write a scored run without data, states and roll-out, its weights in half precision; return the weights' path."""
    if not is_trained(folder) or not (folder / "scores.json").exists():
        raise ValueError(f"a scored run was expected in {folder}, but it is not complete; train and score it first")
    target.mkdir(parents=True, exist_ok=True)
    for name in FACTS:
        write_bytes_atomic(target / name, (folder / name).read_bytes())
    model = build_step(load_recipe(folder / "recipe.json"), read_facts(folder), seed=0).model
    metadata = load_weights(model, folder / WEIGHTS_FILE)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype == torch.float32:
            tensor.data = tensor.data.half()
    save_weights(model, target / WEIGHTS_FILE, metadata=metadata)
    return target / WEIGHTS_FILE


def install(name: str, workspace: Workspace, *, seed: int) -> Path:
    """Put a pretrained model where a training run of its recipe would be; an existing run is left alone."""
    folder = workspace.run(name, seed)
    if not (folder / "recipe.json").exists():
        source = find_model(name)
        folder.mkdir(parents=True, exist_ok=True)
        for file in (*FACTS[:-1], WEIGHTS_FILE):
            shutil.copyfile(source / file, folder / file)
    return folder

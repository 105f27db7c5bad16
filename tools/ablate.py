"""One recipe with one thing changed at a time, judged on the validation split. Run in the repository root:

    python tools/ablate.py kf128-coarse-ergoformer --minutes 1 --root R --output F.json \
        --variant "as it is:" --variant "no flow: model.flow=none" ...

A variant is a name, a colon and settings. Every one gets the same minutes (or samples, with --samples) and the
same seed; those that are in the output file already are left out. With --steps their roll-outs are followed that far,
and it is written down which share of them ends with a mean square of the field within 5 σ of the truth's, and how far
profiles over the first axis of the grid (the height of a channel), of steps beyond PROFILES_FROM, are from those of
the training split: mean |difference| of each field's mean, in units of its root mean square, and of its variance, in
units of the mean variance; and the ME-APE of their spectra along the last axis. The test split is not touched.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import torch
from rich.console import Console

from ergoflow.config import Recipe, override
from ergoflow.data.files import read_json
from ergoflow.metrics.pointwise import relative_l2
from ergoflow.metrics.spectrum import me_ape, spanwise_spectrum
from ergoflow.metrics.stability import share_in_range
from ergoflow.numerics.trajectory import rollout
from ergoflow.pipeline.reproduce import Budget
from ergoflow.pipeline.runs import load_run, open_store, write_json
from ergoflow.pipeline.simulate import simulate
from ergoflow.pipeline.train import train
from ergoflow.pipeline.workspace import Workspace, commit, hardware, versions
from ergoflow.recipes import find_recipe
from ergoflow.report.runs import slugify

LEADS = (1, 5, 25)
# Forecasts start at the first frame and in the middle of every trajectory, long roll-outs in two more places.
STARTS = (0, 0.5)
LONG_STARTS = (0, 0.25, 0.5, 0.75)
PROFILES_FROM, PROFILES_EVERY = 300, 10


def main() -> None:
    """Train what is missing, print a table, write the file after every variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--variant", action="append", required=True, metavar="NAME: SETTINGS")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float)
    budget.add_argument("--samples", type=int)
    parser.add_argument("--steps", type=int, help="length of long roll-outs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, default=Path())
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    device, console = torch.device("cuda" if torch.cuda.is_available() else "cpu"), Console()
    found = read_json(options.output, remedy="remove it") if options.output.exists() else {"recipe": options.recipe}
    if found["recipe"] != options.recipe:
        raise SystemExit(f"{options.output} holds variants of {found['recipe']}; choose another --output")
    found = {"rows": [], "hardware": hardware(device), "versions": versions()} | found
    for text in options.variant:
        label, _, settings = text.partition(":")
        row = {"variant": label, "settings": settings.strip(), "seed": options.seed}
        row |= {"minutes": options.minutes, "asked samples": options.samples}
        recipe = override(find_recipe(options.recipe), settings.split())
        recipe = Budget(minutes=options.minutes, samples=options.samples).apply(recipe)
        budget_name = f"{options.samples} samples" if options.samples else f"{options.minutes:g}m"
        recipe = dataclasses.replace(recipe, name=f"{recipe.name}--{slugify(label)}-{slugify(budget_name)}")
        workspace, known = Workspace(options.root), [old for old in found["rows"] if row.items() <= old.items()]
        if known:
            row = known[0]
        else:
            row |= _measure(recipe, options.seed, workspace, device, console)
            row["commit"] = commit()
            found["rows"].append(row)
        if options.steps and (key := f"in range after {options.steps}") not in row:
            row |= _long_run(recipe, options.seed, options.steps, workspace, device)
        commits = [row.get("commit", found.get("commit", "unknown")) for row in found["rows"]]
        found["commit"] = ", ".join(dict.fromkeys(commits))
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.output, found)
        errors = " ".join(f"{row['valid'][str(lead)]:.4f}" for lead in LEADS if str(lead) in row["valid"])
        inside = f"  {row[key]:.0%} in range" if options.steps else ""
        print(
            f"{label:32s} {row['parameters']:>10,} parameters {row['samples']:>9,} samples  {errors}{inside}",
            flush=True,
        )


def _measure(recipe: Recipe, seed: int, workspace: Workspace, device: torch.device, console: Console) -> dict:
    simulate(recipe.dataset, workspace, device=device, console=console)
    started = time.perf_counter()
    folder = train(recipe, workspace, seed=seed, device=device, console=console, overwrite=True)
    facts = json.loads((folder / "training.json").read_text())
    row = {key: facts[key] for key in ("parameters", "samples", "seconds", "samples_per_second")}
    return row | {"valid": _errors(recipe, folder, workspace, device), "wall_seconds": time.perf_counter() - started}


@torch.inference_mode()
def _errors(recipe: Recipe, folder: Path, workspace: Workspace, device: torch.device) -> dict[str, float]:
    """Relative L2 after each lead, in float32, over all validation trajectories and starts."""
    step = load_run(folder, device=device)
    frames = open_store(recipe, workspace).load("valid", device=device, stride=recipe.task.stride)
    last = max(lead for lead in LEADS if lead < frames.shape[1] * (1 - STARTS[-1]))
    windows = torch.cat([frames[:, int(s * frames.shape[1]) :][:, : last + 1] for s in STARTS])
    predicted = torch.stack(list(rollout(step, windows[:, 0], last)), dim=1)
    errors = relative_l2(predicted, windows[:, 1:])
    return {str(lead): float(errors[lead - 1]) for lead in LEADS if lead <= last}


@torch.inference_mode()
def _long_run(recipe: Recipe, seed: int, steps: int, workspace: Workspace, device: torch.device) -> dict:
    """The share of long roll-outs that end within 5 σ of the validation split's mean square, and their profiles."""
    step, store = load_run(workspace.run(recipe.name, seed), device=device), open_store(recipe, workspace)
    frames = store.load("valid", device=device, stride=recipe.task.stride)
    first = torch.cat([frames[:, int(start * frames.shape[1])] for start in LONG_STARTS])
    squares, kept = [], []
    for k, state in enumerate(rollout(step, first, steps), start=1):
        squares.append(state.square().flatten(1).mean(1))
        if k > PROFILES_FROM and k % PROFILES_EVERY == 0:
            kept.append(state)
    share = share_in_range(torch.stack(squares, dim=1), frames.square().flatten(2).mean(2), step=steps - 1)
    row: dict = {f"in range after {steps}": share}
    if kept:
        truth = store.load("train", device=device, stride=recipe.task.stride)
        mean, variance = _profiles(truth.flatten(0, 1))
        found_mean, found_variance = _profiles(torch.cat(kept))
        row["mean off by"] = ((found_mean - mean).abs().mean(1) / (mean**2 + variance).mean(1).sqrt()).tolist()
        row["variance off by"] = ((found_variance - variance).abs().mean(1) / variance.mean(1)).tolist()
        row["spectrum off by"] = [me_ape(spanwise_spectrum(torch.stack(kept, dim=1)), spanwise_spectrum(truth))]
    return row


def _profiles(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance (C, X) over samples and all axes of the grid but the first, of states (N, C, X, ...)."""
    values = states.unsqueeze(-1).flatten(3).movedim(0, -1).flatten(2)  # (C, X, rest)
    return values.mean(2), values.var(2)


if __name__ == "__main__":
    main()

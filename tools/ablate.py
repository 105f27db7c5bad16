"""One recipe with one thing changed at a time, judged on the validation split. Run in the repository root:

    python tools/ablate.py kf128-coarse-ergoformer --minutes 1 --root R --output F.json \
        --variant "as it is:" --variant "no flow: model.flow=none" ...

A variant is a name, a colon and settings. Every one gets the same minutes (or samples, with --samples) and the
same seed; those that are in the output file already are left out. The test split is not touched.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import torch
from rich.console import Console

from ergoflow.config import Recipe, override
from ergoflow.metrics.pointwise import relative_l2
from ergoflow.numerics.trajectory import rollout
from ergoflow.pipeline.reproduce import Budget
from ergoflow.pipeline.runs import load_run, open_store
from ergoflow.pipeline.simulate import simulate
from ergoflow.pipeline.train import train
from ergoflow.pipeline.workspace import Workspace, commit, hardware, versions
from ergoflow.recipes import find_recipe
from ergoflow.report.runs import slugify

LEADS = (1, 5, 25)
# Roll-outs start at the first frame and in the middle of every trajectory.
STARTS = (0, 0.5)


def main() -> None:
    """Train what is missing, print a table, write the file after every variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--variant", action="append", required=True, metavar="NAME: SETTINGS")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float)
    budget.add_argument("--samples", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, default=Path())
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    device, console = torch.device("cuda" if torch.cuda.is_available() else "cpu"), Console()
    found = (
        json.loads(options.output.read_text()) if options.output.exists() else {"recipe": options.recipe, "rows": []}
    )
    found |= {"hardware": hardware(device), "versions": versions(), "commit": commit()}
    for text in options.variant:
        label, _, settings = text.partition(":")
        row = {"variant": label, "settings": settings.strip(), "seed": options.seed}
        row |= {"minutes": options.minutes, "asked samples": options.samples}
        if any(row.items() <= known.items() for known in found["rows"]):
            continue
        recipe = override(find_recipe(options.recipe), settings.split())
        recipe = Budget(minutes=options.minutes, samples=options.samples).apply(recipe)
        row |= _measure(recipe, label, options.seed, Workspace(options.root), device, console)
        found["rows"].append(row)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(found, indent=1) + "\n")
        errors = " ".join(f"{row['valid'][str(lead)]:.4f}" for lead in LEADS if str(lead) in row["valid"])
        print(f"{label:32s} {row['parameters']:>10,} parameters {row['samples']:>9,} samples  {errors}", flush=True)


def _measure(
    recipe: Recipe, label: str, seed: int, workspace: Workspace, device: torch.device, console: Console
) -> dict:
    simulate(recipe.dataset, workspace, device=device, console=console)
    named = dataclasses.replace(recipe, name=f"{recipe.name}--{slugify(label)}")
    started = time.perf_counter()
    folder = train(named, workspace, seed=seed, device=device, console=console, overwrite=True)
    facts = json.loads((folder / "training.json").read_text())
    row = {key: facts[key] for key in ("parameters", "samples", "seconds", "samples_per_second")}
    return row | {"valid": _errors(named, folder, workspace, device), "wall_seconds": time.perf_counter() - started}


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


if __name__ == "__main__":
    main()

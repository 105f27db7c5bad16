"""ergoflow: learn chaotic flows, and prove that you learned them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ergoflow.numerics.trajectory import Step
    from ergoflow.training.stepper import PhysicalStep

__version__ = "0.1.0"


def load(run: str | Path, *, device: str = "cpu") -> PhysicalStep:
    """A trained model as a step on physical states (B, C, *grid), ready for `rollout`.

    `run` is a run folder, the name of a model that comes with the package, or the id of one on the Hugging Face hub
    (`owner/name`, `owner/name@revision`); `device` is auto, cpu, cuda or cuda:N. Its weights ask for no gradients: a
    loop over thousands of steps holds one state, and derivatives with respect to the state can still be taken.
    """
    from ergoflow.pipeline.pretrained import find_model
    from ergoflow.pipeline.runs import load_run
    from ergoflow.pipeline.workspace import pick_device

    return load_run(find_model(run), device=pick_device(device)).requires_grad_(False)


def judge(
    step: Step,
    recipe: str | Path,
    *,
    name: str,
    root: str | Path = ".",
    seed: int = 0,
    parameters: int | None = None,
    device: str = "cpu",
) -> Path:
    """The run folder in which a step of your own is rolled out and scored, as `ergoflow report` shows it beside others.

    `step` maps states (B, C, *grid) in physical units, on `device`, to those one step later. It is called as it is,
    without gradients and once more before it is rolled out; a module is put into its eval mode. Data set, length of a
    step, number of steps and statistics are those of `recipe`, a name or a file; the data set lies below `root`.
    `parameters` is the size of a step that is no module. What was judged before under this name and seed is replaced.
    """
    from rich.console import Console

    from ergoflow.pipeline.judge import judge as run
    from ergoflow.pipeline.summary import print_summary
    from ergoflow.pipeline.workspace import Workspace, pick_device
    from ergoflow.recipes import find_recipe

    console = Console()
    place = Workspace(Path(root))
    folder = run(
        step,
        find_recipe(str(recipe)),
        place,
        name=name,
        seed=seed,
        parameters=parameters,
        device=pick_device(device),
        console=console,
    )
    print_summary(folder, console)
    return folder


def example(model: str | Path, *, device: str = "cpu") -> Tensor:
    """True states (B, C, *grid), in physical units, from which a model can be rolled out without simulating.

    `model` is as for `load`: one that comes with the package, one of the hub, or a folder that `ergoflow export` wrote.
    """
    from ergoflow.pipeline.pretrained import find_model, stored_states
    from ergoflow.pipeline.workspace import pick_device

    return stored_states(find_model(model)).to(pick_device(device))

"""The front door: one verb per stage.

    ergoflow demo                      everything below, small, on any machine
    ergoflow simulate kf128            -> ROOT/data/kf128
    ergoflow import waves waves.npy    -> ROOT/data/waves, ROOT/waves.json
    ergoflow train kf128-a3m           -> ROOT/runs/kf128-a3m/seed0
    ergoflow predict kf128-a3m         -> .../rollout
    ergoflow score kf128-a3m           -> .../scores.json
    ergoflow report                    -> ROOT/report/index.html

Bad input ends with exit code 2 and one line that says what was expected, what came and what to do.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
from rich.console import Console

from ergoflow import __version__
from ergoflow.config import ChannelDatasetConfig, FilesDatasetConfig, Recipe, load_recipe, override, to_dict
from ergoflow.pipeline.words import LARGEST_SEED, budget_of, minutes_of, number_list, seed_list, word_list
from ergoflow.pipeline.workspace import Workspace, pick_device, prepare_process
from ergoflow.recipes import datasets, find_dataset, find_parts, find_recipe, find_recipes

# Exit code after Ctrl-C, as shells have it; typer returns it in place of the exception.
STOPPED = 130
# Time over which `verify` gathers the statistics of a channel, in δ/u_τ.
TURNOVERS = 25.0
# Newer typers carry click inside, older ones use the installed one; the public BadParameter derives from either.
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="ergoflow",
    help="Learn chaotic flows, and prove that you learned them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

RecipeArgument = Annotated[
    str | None, typer.Argument(metavar="RECIPE", help="Name from `ergoflow recipes`, a recipe.json or a run folder.")
]
RecipeOption = Annotated[str | None, typer.Option("--recipe", help="The same as the argument.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, e.g. training.epochs=5. Repeatable."),
]
RootOption = Annotated[
    Path, typer.Option("--root", envvar="ERGOFLOW_ROOT", help="Folder that holds data/, runs/ and report/.")
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed",
        min=0,
        max=LARGEST_SEED,
        help="Seed of initialisation and sampling; names the run folder. Default 0, or that of the run folder given.",
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
BoxOption = Annotated[str | None, typer.Option("--box", help="Channel: cells along x,y,z, e.g. 512,192,192.")]
PrecisionOption = Annotated[
    str | None, typer.Option("--precision", help="fp32, bf16 or auto; shorthand for --set training.precision=...")
]


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(metavar="RECIPE", help="Print this recipe as JSON instead.")] = None,
) -> None:
    """List the catalogue: data sets, experiments and groups of experiments."""
    from ergoflow.pipeline.listing import print_catalogue

    console = _console()
    if name is not None:
        console.print_json(json.dumps(to_dict(find_recipe(name))))
    else:
        print_catalogue(console)


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="With --pretrained: a shipped model, a folder of `ergoflow export` or a hub id."
        ),
    ] = None,
    pretrained: Annotated[
        bool,
        typer.Option(
            "--pretrained", help="Show a shipped model instead of training one; without MODEL, the best small one."
        ),
    ] = False,
    root: RootOption = Path(),
    seed: SeedOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Simulate, train, roll out 1000 steps, score and report: the whole tool in a few minutes on a laptop."""
    from ergoflow.pipeline.demo import demo as run
    from ergoflow.pipeline.demo import demo_pretrained

    if model is not None and not pretrained:
        raise ValueError(f"MODEL is only for --pretrained, got {model!r}; add --pretrained or drop the name")
    if pretrained:
        _refuse("demo --pretrained", {"--seed": seed})
    console, place = _console(), _workspace(root)
    if pretrained:
        good = demo_pretrained(model, place, device=pick_device(device), console=console)
    else:
        good = run(find_recipe("kf64-a3m"), place, seed=seed or 0, device=pick_device(device), console=console)
    if not good:
        raise typer.Exit(1)


@app.command()
def simulate(
    name: Annotated[
        str | None, typer.Argument(metavar="DATASET", help="A data set or recipe name, or a recipe.json.")
    ] = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
    root: RootOption = Path(),
    device: DeviceOption = "auto",
    precision: Annotated[str, typer.Option("--precision", help="float32 or float64 arithmetic.")] = "float32",
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            min=0.0,
            help="Channel only: stop after this many minutes, spin-ups not counted, with the segments made so far.",
        ),
    ] = None,
    box: BoxOption = None,
) -> None:
    """Make a data set; continues where an earlier call stopped."""
    from ergoflow.pipeline.shards import completeness
    from ergoflow.pipeline.simulate import simulate as run

    dtypes = {"float32": torch.float32, "float64": torch.float64}
    if precision not in dtypes:
        raise ValueError(f"--precision must be float32 or float64 for simulate, got {precision!r}")
    dataset = find_dataset(_one(name, recipe), (settings or []) + _sides(box))
    if isinstance(dataset, FilesDatasetConfig):
        raise ValueError(
            f"{dataset.name} is imported data and cannot be simulated; name a data set from `ergoflow recipes`"
        )
    console = _console()
    place = _workspace(root)
    folder = run(dataset, place, device=pick_device(device), console=console, dtype=dtypes[precision], minutes=minutes)
    _tell(console, f"data set {dataset.name}, {completeness(dataset, folder)}, is in {folder}")


@app.command("import")
def import_data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="How the data set will be called.")],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A .npy array (trajectories, frames, fields, *grid), an .npz of three (train, valid, test), or a "
            "folder in The Well's layout, which needs no options.",
        ),
    ],
    fields: Annotated[
        str | None,
        typer.Option(
            "--fields", help="Names of the fields: vorticity, velocity components such as u,v, or one scalar."
        ),
    ] = None,
    frame_seconds: Annotated[float | None, typer.Option("--frame-seconds", help="Time between two frames.")] = None,
    axes: Annotated[str | None, typer.Option("--axes", help="Names of the axes of the grid; default x,y.")] = None,
    length: Annotated[
        str | None, typer.Option("--length", help="Sides of the domain, e.g. 6.28,3.14; default 2 pi each.")
    ] = None,
    walls: Annotated[str | None, typer.Option("--walls", help="Axes that end at walls; others are periodic.")] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", help="Shares of a single array used for validation and for testing; default 0.1,0.2."),
    ] = None,
    root: RootOption = Path(),
) -> None:
    """Bring your own data: write arrays as a data set, with a recipe to train on it."""
    from ergoflow.pipeline.import_data import Description, import_arrays, import_folder

    if file.is_dir():
        told = {"--fields": fields, "--frame-seconds": frame_seconds, "--axes": axes, "--length": length}
        _refuse("import of a folder", told | {"--walls": walls, "--split": split})
    if file.suffix == ".npz":
        _refuse("import of an .npz, which names its splits,", {"--split": split})
    console, place = _console(), _workspace(root)
    if file.is_dir():
        folder, recipe = import_folder(file, name, place)
        _print_import(f"data set {name} is linked in {folder}", folder, recipe, console)
        return
    if fields is None or frame_seconds is None:
        raise ValueError(
            f"{file} is no folder, so it needs --fields and --frame-seconds, got only one of them or neither; give both"
        )
    description = Description(
        name=name,
        fields=word_list(fields),
        frame_seconds=frame_seconds,
        axes=word_list("x,y" if axes is None else axes),
        length=None if length is None else number_list("--length", length),
        walls=() if walls is None else word_list(walls),
    )
    shares = number_list("--split", "0.1,0.2" if split is None else split)
    if len(shares) != 2 or not 0 < min(shares) <= sum(shares) < 1:
        raise ValueError(f"--split must be two parts that leave some to train, such as 0.1,0.2, got {split!r}")
    folder, recipe = import_arrays(file, description, place, shares=(shares[0], shares[1]), console=console)
    _print_import(f"data set {name} is in {folder}", folder, recipe, console)


def _print_import(told: str, folder: Path, recipe: Path, console: Console) -> None:
    """Say what was imported, how it is understood, and which command comes next."""
    from ergoflow.pipeline.import_data import describe
    from ergoflow.pipeline.predict import PLANE

    for line in describe(folder):
        _tell(console, f"  {line}")
    word = shlex.quote(str(recipe))
    _tell(console, f"{told}, a recipe in {recipe}")
    one_by_one = f"`ergoflow train {word}`"
    if len(load_recipe(recipe).dataset.grid) <= PLANE:
        one_by_one = f"`ergoflow reproduce {word}`, or one by one: {one_by_one}, predict, score, report"
    _tell(console, f"go on with {one_by_one}")


@app.command()
def train(
    name: RecipeArgument = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
    root: RootOption = Path(),
    seed: SeedOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Discard an earlier run of this name and seed.")
    ] = False,
) -> None:
    """Train a model on a data set made by `simulate`, or on your own. Works under torchrun on several GPUs."""
    from ergoflow.pipeline.train import train as run

    chosen, number = _recipe(name, recipe, settings, precision), _seed(name, recipe, seed)
    console = _console()
    folder = run(
        chosen,
        _workspace(root),
        seed=number,
        device=pick_device(device),
        console=console,
        resume=resume,
        overwrite=overwrite,
    )
    _tell(console, f"model of {chosen.name}, seed {number}, is in {folder}")


@app.command()
def predict(
    name: RecipeArgument = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
    root: RootOption = Path(),
    seed: SeedOption = None,
    device: DeviceOption = "auto",
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Length of the roll-out; default from the recipe.")
    ] = None,
    video: Annotated[
        Path | None, typer.Option("--video", help="Also write an .mp4 or .gif of truth beside prediction.")
    ] = None,
) -> None:
    """Roll a trained model out from the first frame of every test trajectory."""
    from ergoflow.pipeline.predict import predict as run

    settings = (settings or []) + ([f"evaluation.steps={steps}"] if steps else [])
    console = _console()
    folder = run(
        _recipe(name, recipe, settings),
        _workspace(root),
        seed=_seed(name, recipe, seed),
        device=pick_device(device),
        console=console,
        video=video,
    )
    _tell(console, f"roll-out is in {folder}" + (f", video in {video}" if video else ""))


@app.command()
def score(
    name: RecipeArgument = None,
    recipe: RecipeOption = None,
    settings: SetOption = None,
    root: RootOption = Path(),
    seed: SeedOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Measure a roll-out: short-term error, long-term statistics, noise floors, trivial forecasts."""
    from ergoflow.pipeline.score import score as run
    from ergoflow.pipeline.summary import print_summary

    console = _console()
    folder = run(
        _recipe(name, recipe, settings),
        _workspace(root),
        seed=_seed(name, recipe, seed),
        device=pick_device(device),
        console=console,
    )
    print_summary(folder, console)


@app.command()
def report(
    root: RootOption = Path(),
    results: Annotated[
        Path | None, typer.Option("--results", help="Also show the cells that `reproduce` wrote into this folder.")
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--document", help="Also write what --results say about the paper into this Markdown. Repeatable."
        ),
    ] = None,
    documents_alone: Annotated[bool, typer.Option("--no-page", help="Write the documents alone.")] = False,
    title: Annotated[str, typer.Option("--title", help="Heading of the page.")] = "ergoflow report",
) -> None:
    """Write one self-contained page about every scored run below the root."""
    from ergoflow.pipeline.cells import list_cells
    from ergoflow.pipeline.report import report as run

    if files and results is None:
        raise ValueError("--document is written from reproduced results, got none; add --results FOLDER")
    if documents_alone and not files:
        raise ValueError("--no-page writes only documents, but no --document was given; name one or drop --no-page")
    if results is not None and not results.is_dir():
        raise ValueError(f"--results must be an existing folder, got {results}; check the path or drop the option")
    console, place = _console(), _workspace(root)
    if files and results is not None:
        from ergoflow.pipeline.document import document

        for file in files:
            document(results, file)
            _tell(console, f"document: {file}")
    # A document says what has not been run; a page of nothing would be a mistake.
    shown = place.scored_runs() or (results is not None and list_cells(results))
    if not documents_alone and (shown or not files):
        _tell(console, f"report: {run(place, title=title, console=console, results=results)}")


@app.command()
def export(
    name: RecipeArgument = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="Folder to write; default ROOT/models/RECIPE.")
    ] = None,
    recipe: RecipeOption = None,
    root: RootOption = Path(),
    seed: SeedOption = None,
) -> None:
    """Write a scored model small enough to share: weights in half precision, its recipe, units and scores."""
    from ergoflow.pipeline.pretrained import export_model

    chosen, place = find_recipe(_one(name, recipe)).name, _workspace(root)
    run = place.run(chosen, _seed(name, recipe, seed))
    path = export_model(run, place.root / "models" / chosen if output is None else output)
    size = path.stat().st_size / 1e3
    _tell(_console(), f"model: {path} ({size:,.0f} kB); ergoflow.load({str(path.parent)!r})")


@app.command()
def verify(
    what: Annotated[str, typer.Argument(help="A data set folder, or the name of a channel such as tcf96.")],
    settings: SetOption = None,
    turnovers: Annotated[
        float | None, typer.Option("--turnovers", min=0.0, help="Channel: δ/u_τ of statistics; default 25.")
    ] = None,
    box: BoxOption = None,
    device: DeviceOption = "auto",
    output: Annotated[Path | None, typer.Option("--output", help="Channel: also write the profiles as JSON.")] = None,
) -> None:
    """Check a data set (layout, checksums, numbers, physics), or run a channel against direct numerical simulation."""
    from ergoflow.pipeline.verify import verify as check_folder
    from ergoflow.pipeline.verify_solver import verify_solver

    console = _console()
    known = datasets().get(what)
    if isinstance(known, ChannelDatasetConfig) and not Path(what).is_dir():
        chosen = find_dataset(what, (settings or []) + _sides(box))
        assert isinstance(chosen, ChannelDatasetConfig)
        length = TURNOVERS if turnovers is None else turnovers
        good = verify_solver(chosen, turnovers=length, device=pick_device(device), console=console, output=output)
    else:
        _refuse(
            "verify of a data folder", {"--set": settings, "--turnovers": turnovers, "--box": box, "--output": output}
        )
        good = check_folder(Path(what), console=console)
    if not good:
        raise typer.Exit(2)


@app.command()
def reproduce(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            help="Recipes, groups such as mini and table1, or cost, lorenz, long, figures; all: the tables of the "
            "paper (table2 on tcf192, 76 GB), seeds, and these four.",
        ),
    ],
    settings: SetOption = None,
    root: RootOption = Path(),
    results: Annotated[
        Path | None, typer.Option("--results", help="Folder of the cells, one JSON each; default ROOT/results.")
    ] = None,
    seeds: Annotated[str, typer.Option("--seeds", help="Comma-separated seeds.")] = "0",
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", help="The same wall-clock of training for each, e.g. 4m, 90s or 1h; by data set: 4m,kf128=3m."
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="The same number of training samples for each.")
    ] = None,
    within: Annotated[
        str | None, typer.Option("--within", help="Begin no cell that would end later than this, e.g. 25m or 4h.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done, and how long it takes.")
    ] = False,
    device: DeviceOption = "auto",
) -> None:
    """Run recipes end to end; what is already on disk is not done again, so it can be stopped and continued."""
    from ergoflow.pipeline.reproduce import Budget, print_plan
    from ergoflow.pipeline.reproduce import reproduce as run

    minutes, by_dataset = budget_of(budget)
    latest = None if within is None else minutes_of("--within", within)
    numbers = seed_list(seeds)
    limit = Budget(minutes=minutes, samples=samples, by_dataset=by_dataset)
    chosen = [limit.apply(override(recipe, settings or [])) for recipe in find_recipes(names)]
    parts = find_parts(names)
    if not chosen and (settings or within or limit != Budget()):
        raise ValueError(
            f"--set, --budget, --samples and --within are for recipes, got {' '.join(names)} alone; drop them"
        )
    console, place, chip = _console(), _workspace(root), pick_device(device)
    cells = place.root / "results" if results is None else results
    if dry_run:
        print_plan(chosen, place, seeds=numbers, results=cells, console=console, parts=parts, device=chip)
        return
    page = run(
        chosen,
        place,
        seeds=numbers,
        results=cells,
        device=chip,
        console=console,
        parts=parts,
        within=latest,
    )
    _tell(console, f"{'report' if page.suffix else 'results'}: {page}")


@app.command()
def bench(
    what: Annotated[str, typer.Argument(help="solver, lbm, training, rollout, models or ops.")] = "training",
    names: Annotated[
        list[str] | None,
        typer.Option("--recipe", help="What is timed (kf128-a3m); for `models` repeatable, none is all paper models."),
    ] = None,
    settings: SetOption = None,
    grids: Annotated[str | None, typer.Option("--grids", help="models: sides of square grids, e.g. 32,64.")] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="models, training: fp32, bf16 or, by default, fp32,bf16.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="models, training: samples; rollout: trajectories.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="rollout: steps to time.")] = None,
    device: DeviceOption = "auto",
    output: Annotated[Path | None, typer.Option("--output", help="Also write the numbers as JSON.")] = None,
) -> None:
    """Time solvers, training and roll-outs on this machine, or tabulate what every model costs."""
    from ergoflow.pipeline.bench import BenchOptions
    from ergoflow.pipeline.bench import bench as run

    options = BenchOptions.parse(grids=grids, precision=precision, batch=batch, steps=steps)
    if what == "lbm":
        _refuse("bench lbm", {"--recipe": names, "--set": settings})
    chosen = names or ([] if what in ("models", "lbm") else ["kf128-a3m"])
    if settings and not chosen:
        raise ValueError(f"--set changes a recipe, got {settings[0]!r} for all models; name one with --recipe")
    recipes = [override(find_recipe(name), settings or []) for name in chosen]
    run(what, recipes, options, device=pick_device(device), console=_console(), output=output)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        typer.echo(f"ergoflow {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; user errors become one line and exit code 2."""
    from ergoflow.pipeline.errors import USER_ERRORS

    prepare_process()
    try:
        code = app(standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        code = STOPPED
    except _UsageError as error:
        _fail(error.format_message())
    except USER_ERRORS as error:
        if "ERGOFLOW_TRACEBACK" in os.environ:
            raise
        if isinstance(error, PermissionError) and error.filename:
            _fail(f"no right to read or write {error.filename}; change its rights or choose another --root")
        _fail(str(error))
    if code == STOPPED:
        sys.stderr.write("stopped: what is whole is kept, and the same command makes the rest\n")
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    sys.exit(2)


def _console() -> Console:
    return Console()


def _tell(console: Console, line: str) -> None:
    """Print a line as it is: brackets in the name of a folder are no markup, and a long path is not broken."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _sides(box: str | None) -> list[str]:
    return [f"dataset.flow.box=[{box}]"] if box else []


def _refuse(verb: str, options: Mapping[str, object]) -> None:
    """Refuse options that a verb would ignore; those that were not given are None or empty."""
    for name, value in options.items():
        if value is not None and value != []:
            shown = " ".join(value) if isinstance(value, list) else value
            raise ValueError(f"{verb} takes no {name}, got {shown}; drop it")


def _one(name: str | None, option: str | None) -> str:
    chosen = name or option
    if not chosen:
        raise ValueError("a recipe is needed, got none; name one from `ergoflow recipes`, e.g. kf64-a3m")
    if name and option and name != option:
        raise ValueError(f"one recipe is needed, got {name!r} and --recipe {option!r}; drop one of them")
    return chosen


def _recipe(name: str | None, option: str | None, settings: list[str] | None, precision: str | None = None) -> Recipe:
    extra = [f"training.precision={precision}"] if precision else []
    return override(find_recipe(_one(name, option)), (settings or []) + extra)


def _seed(name: str | None, option: str | None, seed: int | None) -> int:
    """The seed that was asked for; without one that of the run folder which names the recipe, 0 elsewhere."""
    folder = Path(_one(name, option)).resolve()
    named = re.fullmatch(r"seed(\d+)", folder.name)
    if seed is None and named and folder.is_dir():
        return int(named[1])
    return seed or 0


def _workspace(root: Path) -> Workspace:
    if root.exists() and not root.is_dir():
        raise ValueError(f"--root must be a folder, got the file {root}; choose another")
    return Workspace(root)

"""The command line: help that helps, one line for bad input, exit codes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ergoflow
from ergoflow.cli import main
from ergoflow.config import to_dict
from ergoflow.recipes import find_recipe


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["ergoflow", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


VERBS = ("demo", "simulate", "train", "predict", "score", "report", "bench", "reproduce", "verify", "recipes")


def test_help_lists_every_verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(monkeypatch, capsys, "--help")
    assert code == 0
    for verb in VERBS:
        assert verb in out


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help(verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(monkeypatch, capsys, verb, "--help")
    assert code == 0
    assert "Usage" in out


def test_recipes_lists_the_catalogue(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run(monkeypatch, capsys, "recipes")
    assert code == 0
    for name in (
        "kf256",
        "kf128",
        "kf64",
        "kf256-transient",
        "kf128-coarse",
        "a3m[-common]",
        "convnext",
        "table4",
        "mini",
    ):
        assert name in out


def test_the_front_door_opens_without_the_compiler() -> None:
    """torch's compiler takes longer to import than the rest of torch, and most verbs never call it."""
    code = "import sys, ergoflow.cli; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "kf64-a4m"], "did you mean kf64-a3m"),
        (["train"], "a recipe is needed"),
        (["train", "kf128"], "got the data set kf128; choose one on it, such as kf128-a3m"),
        (["train", "kf64-a3m", "--recipe", "kf128-a3m"], "drop one of them"),
        (["train", "kf64-a3m", "--set", "training.epoch=5"], "did you mean epochs"),
        (["train", "kf64-a3m", "--set", "training.epochs=many"], "must be of type int"),
        (["train", "kf64-a3m", "--device", "gpu"], "the device must be auto, cpu, cuda"),
        (["train", "kf64-a3m", "--precision", "fp8"], "must be one of fp32, bf16"),
        (["train", "kf64-a3m", "--seed", "-1"], "--seed"),
        (["train", "kf64-a3m", "--seed", "99999999999999999999"], "--seed"),
        (["train", "kf64-a3m"], "run `ergoflow simulate` with this recipe"),
        (["train", "no/such.json"], "there is none"),
        (["simulate", "kf46"], "did you mean kf64"),
        (["reproduce", "tabel1"], "did you mean table1"),
        (["reproduce", "mini", "--budget", "4"], "must be a duration such as 90s, 4m or 1h"),
        (["reproduce", "mini", "--budget", ""], "must be a duration such as 90s, 4m or 1h, got ''"),
        (["reproduce", "mini", "--within", "x", "--dry-run"], "--within must be a duration such as 90s, 4m or 1h"),
        (["reproduce", "mini", "--budget", "4m,3m"], "one duration, and others by data set"),
        (["reproduce", "mini", "--budget", "4m,kf46=3m"], "did you mean kf64"),
        (["report", "--document", "x.md"], "got none; add --results FOLDER"),
        (["report", "--no-page"], "name one or drop --no-page"),
        (["report", "--results", "nowhere"], "must be an existing folder, got nowhere; check"),
        (["bench", "ops", "--recipe", "kf64-mno"], "name a recipe of a3m"),
        (["simulate", "kf64", "--set", "dataset.flow.grid=[63,64]"], "choose 62 or 64"),
        (["simulate", "kf64", "--precision", "half"], "float32 or float64"),
        (["predict", "kf64-a3m", "--steps", "0"], "--steps"),
        (["score", "kf64-a3m"], "run `ergoflow simulate` with this recipe"),
        (["report"], "run `ergoflow score RECIPE` first"),
        (["verify", "nowhere"], "not a folder"),
        (["verify", ".", "--output", "x.json"], "verify of a data folder takes no --output, got x.json; drop it"),
        (["verify", ".", "--box", "8,8,8"], "verify of a data folder takes no --box, got 8,8,8"),
        (["verify", ".", "--set", "dataset.seed=1"], "takes no --set, got dataset.seed=1"),
        (["verify", ".", "--turnovers", "0"], "takes no --turnovers, got 0.0"),
        (["import", "mine", ".", "--fields", "u"], "import of a folder takes no --fields, got u; drop it"),
        (["import", "mine", ".", "--frame-seconds", "0"], "takes no --frame-seconds, got 0.0"),
        (["import", "mine", ".", "--axes", "x,y"], "takes no --axes, got x,y"),
        (["import", "mine", ".", "--length", "1,1"], "takes no --length, got 1,1"),
        (["import", "mine", ".", "--walls", "y"], "takes no --walls, got y"),
        (["import", "mine", ".", "--split", "0.1,0.1"], "takes no --split, got 0.1,0.1"),
        (["import", "mine", "x.npz", "--split", "0.1,0.1"], "an .npz, which names its splits, takes no --split"),
        (["import", "mine", "x.npy", "--fields", "u"], "got only one of them or neither; give both"),
        (["import", "", "x.npy", "--fields", "u", "--frame-seconds", "1"], "NAME names a folder"),
        (["import", "..", "x.npy", "--fields", "u", "--frame-seconds", "1"], "NAME names a folder"),
        (["demo", "--pretrained", "--seed", "0"], "demo --pretrained takes no --seed, got 0; drop it"),
        (["demo", "kf64-a3m"], "got 'kf64-a3m'; add --pretrained or drop the name"),
        (["bench", "lbm", "--recipe", "kf64-a3m"], "bench lbm takes no --recipe, got kf64-a3m; drop it"),
        (["bench", "lbm", "--set", "dataset.seed=1"], "bench lbm takes no --set, got dataset.seed=1"),
        (["bench", "everything"], "choose one of them"),
        (["reproduce", "kf64-a3m", "--seeds", "a,b"], "whole numbers from 0 on such as 0,1,2"),
        (["reproduce", "kf64-a3m", "--seeds=-1"], "got '-1'; correct them"),
        (["reproduce", "kf64-a3m", "--seeds", "0,"], "got '0,'; correct them"),
        (["reproduce", "kf64-a3m", "--seeds", "0,1,0"], "got '0,1,0'; name each once"),
        (["dance"], "dance"),
    ],
)
def test_bad_input_is_one_clear_line(
    words: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(monkeypatch, capsys, *words)
    assert code == 2
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert expected in lines[0]
    assert not list(tmp_path.rglob("*")), "nothing is left behind"


def test_ctrl_c_is_one_line_that_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ergoflow.pipeline.simulate.simulate", _pressed)
    code, _, err = run(monkeypatch, capsys, "simulate", "kf64")
    assert (code, len(err.splitlines())) == (130, 1)
    assert "the same command makes the rest" in err


def without_library(library: str, instead: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`ergoflow report` of the cells here, where a library is a line of Python instead."""
    (folder / f"{library}.py").write_text(instead)
    paths = os.pathsep.join([str(folder), str(Path(ergoflow.__file__).parents[1])])
    results = Path(__file__).parents[1] / "results"
    return subprocess.run(
        [sys.executable, "-m", "ergoflow", "report", "--root", str(folder), "--results", str(results)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )


def test_ctrl_c_while_libraries_are_read_in_leaves_no_traceback(tmp_path: Path) -> None:
    done = without_library("torch", "raise KeyboardInterrupt", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("library", ["torch", "cmocean"])
def test_a_missing_library_is_one_line_with_its_name_whenever_it_is_missed(library: str, tmp_path: Path) -> None:
    done = without_library(library, f"raise ModuleNotFoundError(name={library!r})", tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert f"the library {library} is missing" in done.stderr


def test_a_folder_without_rights_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "locked/data")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ergoflow.pipeline.simulate.simulate", refuse)
    code, _, err = run(monkeypatch, capsys, "simulate", "kf64")
    assert (code, err) == (
        2,
        "error: no right to read or write locked/data; change its rights or choose another --root\n",
    )


def _pressed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("verb", ["train", "predict", "score", "export"])
def test_a_run_folder_stands_for_its_recipe_and_its_seed(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(*places: object, seed: int | None = None, **_: object) -> None:
        raise ValueError(f"seed{seed}" if seed is not None else Path(str(places[0])).name)

    module = "pretrained.export_model" if verb == "export" else f"{verb}.{verb}"
    monkeypatch.setattr(f"ergoflow.pipeline.{module}", work)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "kf64-a3m" / "seed3"
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(to_dict(find_recipe("kf64-a3m"))))
    for words, seed in (
        (["runs/kf64-a3m/seed3"], 3),
        (["runs/kf64-a3m/seed3/"], 3),
        (["--recipe", str(folder)], 3),
        (["runs/kf64-a3m/seed3", "--seed", "0"], 0),
        (["runs/kf64-a3m/seed3/recipe.json"], 0),
        (["kf64-a3m"], 0),
        (["kf64-a3m", "--seed", "2"], 2),
    ):
        assert run(monkeypatch, capsys, verb, *words)[2] == f"error: seed{seed}\n", words


def test_a_path_is_printed_on_one_line_as_it_is_however_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    array = np.random.default_rng(0).standard_normal((4, 3, 8, 8))
    np.save(tmp_path / "mine.npy", array)
    root = tmp_path / "a folder [old] with a name longer than a line of a narrow terminal"
    words = ("import", "mine", str(tmp_path / "mine.npy"), "--fields", "u", "--frame-seconds", "1", "--root", str(root))
    code, out, _ = run(monkeypatch, capsys, *words)
    assert code == 0
    assert (
        f"go on with `ergoflow reproduce {shlex.quote(str(root / 'mine.json'))}`, or one by one: `ergoflow train "
        in out
    )


def test_root_that_is_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    code, _, err = run(monkeypatch, capsys, "simulate", "kf64", "--root", str(file))
    assert (code, file.read_text()) == (2, "mine")
    assert "must be a folder" in err


def test_bench_writes_numbers_with_their_provenance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "bench.json"
    words = [
        "bench",
        "solver",
        "--recipe",
        "kf64-a3m",
        "--set",
        "dataset.flow.grid=[16,16]",
        "--device",
        "cpu",
        "--output",
        str(output),
    ]
    code, _, _ = run(monkeypatch, capsys, *words)
    data = json.loads(output.read_text())
    assert code == 0
    assert {"rows", "hardware", "versions", "commit"} <= set(data)
    assert all(row["field-steps/s"] > 0 for row in data["rows"])

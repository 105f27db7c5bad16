"""Configurations and their exact twins in JSON, with errors that name the offending key.

`recipe.json` is saved with every run, and a run can be rebuilt from that file alone.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from ergoflow.config.datasets import require
from ergoflow.config.recipe import KINDS, Recipe


def to_dict(config: Any) -> Any:
    """The JSON-ready twin of a configuration; objects that come in kinds carry their `kind`."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        kind = _kind_of(type(config))
        fields = {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
        return {"kind": kind, **fields} if kind else fields
    if isinstance(config, tuple | list):
        return [to_dict(item) for item in config]
    return config


def first_difference(known: Any, asked: Any) -> tuple[str, Any, Any] | None:
    """The first setting in which two configurations differ: its dotted name and both values; None if they agree."""
    before, now = dict(_settings(to_dict(known))), dict(_settings(to_dict(asked)))
    different = (name for name in before | now if before.get(name) != now.get(name))
    return next(((name, before.get(name), now.get(name)) for name in different), None)


def from_dict(cls: Any, data: Any, path: str = "") -> Any:
    """The configuration of type `cls` that `data` describes; errors name the dotted path of the offending key."""
    if dataclasses.is_dataclass(cls):
        return _dataclass_from_dict(cls, data, path)
    origin, choices = typing.get_origin(cls), typing.get_args(cls)
    if origin is Literal:
        require(data in choices, f"{path} must be one of {', '.join(map(str, choices))}, got {data!r}")
        return data
    if origin in (typing.Union, types.UnionType):
        return _union_from_dict(choices, data, path)
    if origin is tuple:
        require(isinstance(data, list | tuple), f"{path} must be a list such as [64, 64], got {data!r}")
        inner = [choices[0]] * len(data) if choices[-1] is Ellipsis else list(choices)
        require(len(data) == len(inner), f"{path} must have {len(inner)} entries, got {len(data)}: {data!r}")
        return tuple(
            from_dict(kind, item, f"{path}[{i}]") for i, (kind, item) in enumerate(zip(inner, data, strict=True))
        )
    if cls is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    require(
        isinstance(data, cls) and (cls is bool or not isinstance(data, bool)),
        f"{path} must be {'true or false' if cls is bool else f'of type {cls.__name__}'}, got {data!r}",
    )
    return data


def load_recipe(path: Path) -> Recipe:
    """The recipe stored in a JSON file."""
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} must be a recipe in JSON, got a syntax error at line {error.lineno}: {error.msg}; mend it"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} must be a recipe in JSON, got a file that is not text; name another") from None
    recipe: Recipe = from_dict(Recipe, data)
    return recipe


def override(recipe: Recipe, assignments: typing.Sequence[str]) -> Recipe:
    """The recipe with dotted `key=value` assignments applied, e.g. `training.epochs=5`; values are typed."""
    data = to_dict(recipe)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        require(bool(equals and key), f"--set must look like training.epochs=5, got {assignment!r}")
        *parents, leaf = key.strip().split(".")
        target = data
        for depth, name in enumerate(parents):
            _require_key(name, target, ".".join(parents[: depth + 1]))
            target = target[name]
            require(
                isinstance(target, dict),
                f"{key} goes too deep: {'.'.join(parents[: depth + 1])} is a single value",
            )
        require(leaf != "kind", "the kind of a model or flow cannot be set alone; choose a recipe that has it")
        _require_key(leaf, target, key)
        if isinstance(target[leaf], dict):
            raise ValueError(f"{key} is a group of settings, got one value; set one of {', '.join(target[leaf])}")
        target[leaf] = _parse(text)
    changed: Recipe = from_dict(Recipe, data)
    return changed


def _settings(data: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Single settings under their dotted names."""
    for name, value in data.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _parse(text: str) -> Any:
    """A JSON value where the text is one, else the text itself."""
    if text.strip().lower() == "none":
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _kind_of(cls: type) -> str | None:
    """The word that stands for a configuration in JSON; None for one that does not come in kinds."""
    return next((word for word, known in KINDS.items() if known is cls), None)


def _require_key(name: str, known: typing.Iterable[str], path: str) -> None:
    names = [k for k in known if k != "kind"]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(names)}"
        raise ValueError(f"unknown key {path!r}; {hint}")


def _dataclass_from_dict(cls: Any, data: Any, path: str) -> Any:
    require(isinstance(data, dict), f"{path or 'the recipe'} must be an object with named settings, got {data!r}")
    hints = typing.get_type_hints(cls)
    prefix = f"{path}." if path else ""
    kind = _kind_of(cls)
    if kind is not None:
        found = data.get("kind", kind)
        require(found == kind, f"{prefix}kind must be {kind}, got {found!r}; correct it")
        data = {key: value for key, value in data.items() if key != "kind"}
    for key in data:
        _require_key(key, hints, f"{prefix}{key}")
    needed = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    for name in needed:
        require(name in data, f"{prefix}{name} is missing; {cls.__name__} needs {', '.join(needed)}")
    return cls(**{key: from_dict(hints[key], value, f"{prefix}{key}") for key, value in data.items()})


def _union_from_dict(choices: tuple[Any, ...], data: Any, path: str) -> Any:
    if data is None:
        require(type(None) in choices, f"{path} must not be null")
        return None
    choices = tuple(c for c in choices if c is not type(None))
    if all(dataclasses.is_dataclass(c) for c in choices) and len(choices) > 1:
        kinds = {name: cls for name, cls in KINDS.items() if cls in choices}
        kind = data.get("kind") if isinstance(data, dict) else None
        require(kind in kinds, f"{path}.kind must be one of {', '.join(kinds)}, got {kind!r}")
        return _dataclass_from_dict(kinds[str(kind)], data, path)
    require(len(choices) == 1, f"{path} has a type this reader does not know: {choices}")
    if typing.get_origin(choices[0]) is Literal:
        words = typing.get_args(choices[0])
        require(data in words, f"{path} must be one of {', '.join(map(str, words))} or none, got {data!r}")
        return data
    return from_dict(choices[0], data, path)

"""Words of the command line as values: lists, durations, budgets."""

from __future__ import annotations

import re

from ergoflow.recipes import find_dataset

# Torch and NumPy take more, but not all of their generators do.
LARGEST_SEED = 2**32 - 1
MINUTES = {"s": 1 / 60, "m": 1.0, "h": 60.0}


def word_list(text: str) -> tuple[str, ...]:
    """The words of a list such as u,v."""
    return tuple(word.strip() for word in text.split(","))


def number_list(option: str, text: str) -> tuple[float, ...]:
    """The numbers of a list such as 0.5,1, given for an option."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} must be numbers such as 0.5,1, got {text!r}") from None


def seed_list(text: str) -> list[int]:
    """The seeds of a list such as 0,1,2."""
    if not all(re.fullmatch(r"\s*\d+\s*", part) for part in text.split(",")):
        raise ValueError(f"--seeds must be whole numbers from 0 on such as 0,1,2, got {text!r}; correct them")
    seeds = [int(part) for part in text.split(",")]
    if len(set(seeds)) < len(seeds) or max(seeds) > LARGEST_SEED:
        raise ValueError(f"--seeds must be distinct and at most {LARGEST_SEED}, got {text!r}; name each once")
    return seeds


def minutes_of(option: str, text: str) -> float:
    """Minutes of a duration such as 90s, 4m or 1.5h, given for an option."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{option} must be a duration such as 90s, 4m or 1h, got {text!r}")
    return float(match[1]) * MINUTES[match[2]]


def budget_of(text: str | None) -> tuple[float | None, dict[str, float]]:
    """Minutes for all data sets (None: as the recipes say) and for some, of a list such as 4m,kf128=3m."""
    minutes, by_dataset = None, {}
    for part in () if text is None else text.split(","):
        name, equals, duration = part.strip().rpartition("=")
        if equals:
            by_dataset[find_dataset(name, []).name] = minutes_of("--budget", duration)
        elif minutes is None:
            minutes = minutes_of("--budget", duration)
        else:
            raise ValueError(f"--budget must be one duration, and others by data set (4m,kf128=3m), got {text!r}")
    return minutes, by_dataset

"""Models of the Hugging Face hub, by their id: `owner/name`, or `owner/name@revision`.

Nothing but the files that are asked for is downloaded, into the hub's own cache. Without a network the cache serves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

HUB_ID = re.compile(r"[a-z0-9][\w.-]*/[a-z0-9][\w.-]*(@\S+)?", re.ASCII | re.IGNORECASE)


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id; so has the path of a folder inside another."""
    return HUB_ID.fullmatch(name) is not None


def fetch_model(hub_id: str, needed: Sequence[str], *, optional: Sequence[str] = ()) -> Path:
    """The folder in the hub's cache that holds the files `needed` of a repository, and those of `optional` it has."""
    folder = _download(hub_id, [*needed, *optional])
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{hub_id} was expected to hold what `ergoflow export` writes, but it lacks {', '.join(missing)}; "
            "choose another model, or upload that folder whole"
        )
    return folder


def _download(hub_id: str, names: list[str]) -> Path:
    """The hub's snapshot of a repository, with those of the named files that it has; what fails becomes one line."""
    try:
        from httpx2 import HTTPError
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ModuleNotFoundError as error:
        raise ValueError(
            f"a run folder or a shipped model was expected, got {hub_id!r}, which is neither; "
            'if it is a model of the hub, run `pip install "ergoflow[hub]"`'
        ) from error
    expected = f"a run folder, a shipped model or a model of the hub was expected, got {hub_id!r}, which is no folder"
    repository, _, revision = hub_id.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=names))
    except GatedRepoError as error:
        raise ValueError(
            f"{hub_id} was expected to be open, but the hub gives it only to those whom its owner admits; "
            "ask for access on its page, then run `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ValueError(
            f"{expected} and no repository that the hub shows you; correct it, or run `hf auth login` if it is private"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(
            f"a revision of {repository} was expected, got {revision!r}, which the hub does not know; "
            "name a branch, a tag or a whole commit hash"
        ) from error
    except (LocalEntryNotFoundError, HTTPError, json.JSONDecodeError) as error:
        # The hub's package wraps what stopped it in an advice of several lines.
        reason = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
        raise ValueError(
            f"{expected} and not in the hub's cache, and the hub does not answer as it should "
            f"({' '.join(str(reason).split())}); check network and token, or name a folder"
        ) from error

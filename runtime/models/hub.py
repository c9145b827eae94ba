"""Fetches models from the Hugging Face hub into the hub's own cache, and converts its errors to ModelUnavailable."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from cuelight.errors import ModelUnavailable
from cuelight.models.folder import checked_folder
from cuelight.models.progress import Progress


def is_hub_id(text: str) -> bool:
    """Return whether `text` has the form `org/name`."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text, re.ASCII) is not None


def hub_folder(name: str, progress: Progress, refresh: bool) -> Path:
    """Return the folder of a hub model; fetch it with `refresh`, or if the local copy is absent or incomplete.

    Raises `ModelUnavailable`.
    """
    if not refresh:
        try:
            return checked_folder(_snapshot(name, progress, local=True))
        except (OSError, ValueError, ModelUnavailable):  # absent, incomplete, or an invalid id, which the hub rejects
            pass
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        folder = _snapshot(name, progress, local=False)
    except GatedRepoError as error:
        raise ModelUnavailable(
            f"the hub model {name} is gated: request access on its page, then run `hf auth login` and try again."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelUnavailable(
            f"the hub has no model {name}, or it is private: check the name, or run `hf auth login`. "
            f"There is no local folder {name} either."
        ) from error
    except Exception as error:  # unreachable, offline, disk full: the types depend on the hub's HTTP library
        raise ModelUnavailable(
            f"the hub model {name} is not in the local cache and cannot be fetched ({_first_line(error)}). Run "
            f"`cuelight pull {name}` where the hub can be reached, or give a local folder or a .gguf file instead."
        ) from error
    return checked_folder(folder)


def _snapshot(name: str, progress: Progress, local: bool) -> Path:
    from huggingface_hub import snapshot_download
    from tqdm import tqdm

    class HubBar(tqdm):  # type: ignore[type-arg, misc, unused-ignore]  # tqdm's types, where installed, are generic
        monitor_interval = 0

        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **(options | {"disable": None if progress.shown else True}))

    # The top level only: folders of a repository have other formats of the same weights.
    wanted: Sequence[str] = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
    unwanted: Sequence[str] = ("*/*", "consolidated*")
    return Path(
        snapshot_download(
            name,
            allow_patterns=list(wanted),
            ignore_patterns=list(unwanted),
            local_files_only=local,
            tqdm_class=HubBar,
        )
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__

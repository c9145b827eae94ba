"""Fetches hub models into the hub's own cache. Knows the hub's errors, so that nobody else has to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from cuelight.errors import ModelUnavailable
from cuelight.models.folder import checked_folder
from cuelight.models.progress import Progress


def is_hub_id(text: str) -> bool:
    """Whether `text` has the form `org/name`."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text, re.ASCII) is not None


def hub_folder(name: str, progress: Progress, refresh: bool) -> Path:
    """The folder of a hub model, from the local cache unless `refresh` or incomplete. Raises `ModelUnavailable`."""
    if not refresh:
        try:
            return checked_folder(_snapshot(name, progress, local=True))
        except (OSError, ValueError, ModelUnavailable):  # not here, only in part, or no valid id: the hub will say
            pass
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        folder = _snapshot(name, progress, local=False)
    except GatedRepoError as error:
        raise ModelUnavailable(
            f"the hub model {name} is gated: ask for access on its page, then type `hf auth login` and try again."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelUnavailable(
            f"the hub has no model {name}, or it is private: check the name, or type `hf auth login`. "
            f"There is no local folder {name} either."
        ) from error
    except Exception as error:  # whatever the hub's HTTP library of the day raises: unreachable, offline, disk full
        raise ModelUnavailable(
            f"the hub model {name} is not in the local cache and cannot be fetched ({_first_line(error)}). Type "
            f"`cuelight pull {name}` where the hub can be reached, or name a local folder or a .gguf file instead."
        ) from error
    return checked_folder(folder)


def _snapshot(name: str, progress: Progress, local: bool) -> Path:
    from huggingface_hub import snapshot_download
    from tqdm import tqdm

    class HubBar(tqdm):  # type: ignore[type-arg, misc, unused-ignore]  # tqdm's types, where installed, are generic
        monitor_interval = 0

        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **(options | {"disable": None if progress.shown else True}))

    # The top level only: folders of a repository hold other formats of the same weights.
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

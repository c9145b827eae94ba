"""The model and options of an engine, as its journal's header records them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from cuelight.config import EngineConfig
from cuelight.kernel import JournalError
from cuelight.models.folder import NO_FINGERPRINT, Fingerprint, ModelFacts


@dataclass(frozen=True)
class Origin:
    """The model and options that an engine's actors were built from; an engine made from parts has no folder."""

    name: str
    folder: Path | None
    config: EngineConfig
    facts: ModelFacts
    fingerprint: Fingerprint = NO_FINGERPRINT


class _About(msgspec.Struct):
    name: str
    folder: str | None
    config: dict[str, object]
    facts: ModelFacts


def about(origin: Origin) -> dict[str, object]:
    """Return the header of the engine's journal, as a replay needs it."""
    import importlib.metadata

    plain = replace(origin.config, journal=None, resume=False)
    config = {name: value for name, value in asdict(plain).items() if value is not None}
    return {
        "cuelight": importlib.metadata.version("cuelight"),
        "name": origin.name,
        "folder": None if origin.folder is None else str(origin.folder),
        "config": msgspec.to_builtins(config, enc_hook=_plain),
        "facts": asdict(origin.facts),
    }


def read_origin(about: dict[str, object], path: str) -> Origin:
    """Return the origin in the header `about` of the journal at `path`. Raises JournalError if it has none."""
    try:
        known = msgspec.convert(about, _About)
    except msgspec.ValidationError as error:
        raise JournalError(f"{path} is not the journal of an engine: {error}") from error
    folder = None if known.folder is None else Path(known.folder)
    return Origin(known.name, folder, EngineConfig.of(known.config), known.facts)


def _plain(value: object) -> float | str:
    """Return a float or a text for msgspec; options may be NumPy's floats and strings, too."""
    return float(value) if isinstance(value, float) else str(value)

"""Fixtures that several test modules share."""

from __future__ import annotations

from pathlib import Path

import pytest

from cuelight.store import DEFAULT_MODEL, model_path


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The default model, fetched and converted on first use. Mark tests that use it with `model`."""
    return model_path(DEFAULT_MODEL)

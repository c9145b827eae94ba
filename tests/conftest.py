"""Fixtures that several test modules share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cuelight.store import DEFAULT_MODEL, model_path


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The default model, fetched and converted on first use. Mark tests that use it with `model`."""
    return model_path(DEFAULT_MODEL)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Several threads of torch wait for each other at every product, which takes minutes where cores are shared."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

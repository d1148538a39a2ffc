"""Settings of every test: one thread (the models are tiny) and a fixed seed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hf_peagle import integration


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _hook_stays_installed() -> Iterator[None]:
    yield
    integration.install()

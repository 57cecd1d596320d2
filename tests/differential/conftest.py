"""Both servers, once for each module; what needs Triton skips without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.differential.pair import Both, serving_both, shared_objects
from tests.differential.triton_process import missing


@pytest.fixture(scope="session")
def installed() -> None:
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def both(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """All models, loaded by name, so that they may be loaded and unloaded."""
    with shared_objects(), serving_both(tmp_path_factory.mktemp("both")) as serving:
        yield serving

"""Both servers, once for each module; tests that need Triton are skipped without it."""

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
    """Both servers with all models, started so that clients may load and unload them."""
    with shared_objects(), serving_both(tmp_path_factory.mktemp("both")) as serving:
        yield serving

"""Logging is the process's: whoever configures it in a test leaves it as it was."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from server.log import debugging


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    logger = logging.getLogger("paceline")
    handlers, level, propagate, was_debugging = logger.handlers, logger.level, logger.propagate, debugging.on
    yield
    logger.handlers, logger.propagate, debugging.on = handlers, propagate, was_debugging
    logger.setLevel(level)

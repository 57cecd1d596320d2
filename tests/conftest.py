"""What has to be so before any test imports gRPC, and what tests of all folders share."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator

import pytest

from server.telemetry.log import debugging
from server.tuning import excluded_from_gc

try:
    from hypothesis import Phase, settings
except ImportError:
    pass  # no test of those that need a GPU asks for it, and an environment that is given may lack it
else:
    # The same examples each time, however long the machine takes for one: what fails, fails again.
    settings.register_profile("repeatable", derandomize=True, deadline=None)
    # And for those who are trying something: what fails is told at once, and not first made as short as can be.
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("unshrunk", settings.get_profile("repeatable"), phases=phases)
    settings.load_profile("repeatable")

# Before a test imports ONNX Runtime: backends/__init__.py.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Tests start processes while servers and clients run in their own. gRPC's fork handlers, which the harness's children
# go through before they become another program, kill one in five of them then. Nothing here goes on after a fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_FRONTENDS = "PACELINE_FRONTENDS"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Ten thousand tests are half a million objects, which Python would look through for garbage again and again."""
    with excluded_from_gc():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Texts that no UTF-8 can say are tested with, get into the log, and from there into reports, which have to travel
    from process to process."""
    report = yield
    report.sections = [(title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections]
    return report


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Logging is the process's: what a test configured ends with it, also what is still to be told of its storms."""
    loggers = [logging.getLogger(name) for name in ("paceline", "asyncio")]
    before = [(one.handlers, one.level, one.propagate) for one in loggers]
    was_debugging = debugging.on
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        for handler in logger.handlers:
            if handler not in handlers:
                handler.close()
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
    debugging.on = was_debugging


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit for executions holds for those before a model serves as it is, and isn't a minute at least."""
    monkeypatch.setattr("server.models.supervisor._MIN_NS", 0)


@pytest.fixture(params=[1, 2], ids=["alone", "fronts"])
def frontends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A test that uses this runs twice: its servers speak gRPC themselves, and by processes of their own. With the
    variable set from outside, all tests run that way once."""
    if os.environ.get(_FRONTENDS) not in (None, str(request.param)):
        pytest.skip(f"{_FRONTENDS} says otherwise")
    monkeypatch.setenv(_FRONTENDS, str(request.param))
    return int(request.param)

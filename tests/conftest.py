"""Settings that have to be made before any test imports gRPC, and fixtures that tests of all folders share."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator

import pytest

from paceline.server.telemetry.log import debugging
from paceline.server.tuning import excluded_from_gc
from tests.children import started_as_usual
from tests.nursery import fork_what_is_started

try:
    from hypothesis import Phase, settings
except ImportError:
    pass  # the tests that need a GPU don't use it, and a given environment may lack it
else:
    # The same examples each time, however long the machine takes for one: failures repeat.
    settings.register_profile("repeatable", derandomize=True, deadline=None)
    # And for experiments: failures are reported at once, without shrinking them first.
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("unshrunk", settings.get_profile("repeatable"), phases=phases)
    settings.load_profile("repeatable")

# Before a test imports ONNX Runtime: backends/__init__.py.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Tests start processes while servers and clients run in the tests' own. gRPC's fork handlers, which the harness's
# children go through before they become another program, then kill one in five of them. Nothing here needs them: no
# child keeps running without becoming another program.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

fork_what_is_started()

_FRONTENDS = "PACELINE_FRONTENDS"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Ten thousand tests are half a million objects, which Python would scan for garbage again and again."""
    with excluded_from_gc():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tests use texts that UTF-8 can't encode. These get into the log, and from there into reports, which have to
    travel from process to process."""
    report = yield
    report.sections = [(title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections]
    return report


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Logging is global to the process: what a test configured ends with it, including pending reports of repeated
    messages."""
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
def processes_as_usual() -> Iterator[None]:
    """What the product starts is started as it says, instead of being forked."""
    with started_as_usual():
        yield


@pytest.fixture
def without_minimum_execution_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit for executions also holds unchanged before a model serves, where it is otherwise a minute at least."""
    monkeypatch.setattr("paceline.server.models.warmup._MIN_LIMIT_NS", 0)


@pytest.fixture(params=[1, 2], ids=["alone", "fronts"])
def frontends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A test that uses this runs twice: its servers speak gRPC themselves, or in separate processes. If the variable is
    set from outside, all tests run only in that mode."""
    if os.environ.get(_FRONTENDS) not in (None, str(request.param)):
        pytest.skip(f"{_FRONTENDS} says otherwise")
    monkeypatch.setenv(_FRONTENDS, str(request.param))
    return int(request.param)

"""The one table from exceptions to statuses: it is complete and has the promised statuses."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import pkgutil

import grpc
import pytest

from paceline import backends, protos, scheduler, server
from paceline.backends.errors import (
    BackendError,
    DeviceError,
    DeviceLost,
    ExecutionError,
    InstanceError,
    LoadError,
    OutOfMemory,
    StalePlan,
    UpstreamFailed,
    UpstreamRefused,
)
from paceline.backends.length_trial import _StateDiffers
from paceline.backends.made_up import GivenUp
from paceline.backends.row_trial import _TimeIsUp
from paceline.protos.datatypes import UnknownDatatypeError
from paceline.protos.generate import GenerateError
from paceline.protos.tensors import TensorError
from paceline.protos.wire import TooManyElements, TooManyFields
from paceline.scheduler.errors import (
    BatcherClosed,
    DeadlineUnreachable,
    ExecutionFailed,
    NoInstance,
    QueueFull,
    QueueTimeout,
    RequestTooLarge,
    SchedulerError,
)
from paceline.scheduler.policy import PolicyError
from paceline.server.errors import (
    STATUS_OF,
    ConfigError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    NotSupported,
    RegionExists,
    RegionNotFound,
    ServerError,
    StartError,
    TooManyRegions,
    as_value,
    error_text,
    status_of,
)

Code = grpc.StatusCode

NEVER_REACH_A_CALLER = {
    StartError,  # ends the process before anyone can call
    GenerateError,  # from the generator of `protos`, a tool for developers
    PolicyError,  # a mistake in code: configurations are checked before they become policies
    _TimeIsUp,  # ends a trial, at load
    GivenUp,  # the same
    _StateDiffers,  # the same
    TooManyElements,  # the caller gets a MessageTooLarge
    TooManyFields,  # the same
}


def exception_classes() -> set[type[BaseException]]:
    """Every exception class defined by a module at the top of one of the packages that a request passes through."""
    found: set[type[BaseException]] = set()
    for package in (scheduler, backends, protos, server):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if module.name == "paceline.server.telemetry.spans" and importlib.util.find_spec("opentelemetry") is None:
                continue  # belongs to an extra that isn't installed
            if module.name == "paceline.server.__main__":
                continue
            members = vars(importlib.import_module(module.name)).values()
            found |= {
                each
                for each in members
                if inspect.isclass(each) and issubclass(each, BaseException) and each.__module__ == module.name
            }
    return found


def test_table_has_an_entry_for_every_exception_class_that_can_reach_a_caller() -> None:
    classes = exception_classes()
    assert {InvalidRequest, QueueFull, LoadError, TensorError} <= classes
    assert classes - NEVER_REACH_A_CALLER - set(STATUS_OF) == set()


def test_table_leaves_out_exceptions_that_never_reach_a_caller() -> None:
    assert not NEVER_REACH_A_CALLER & set(STATUS_OF)
    assert exception_classes() >= NEVER_REACH_A_CALLER


def test_table_names_only_classes_that_exist() -> None:
    assert set(STATUS_OF) <= exception_classes() | {asyncio.CancelledError, MemoryError}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelNotFound("x"), Code.NOT_FOUND),
        (ModelNotReady("x"), Code.UNAVAILABLE),
        (BatcherClosed(), Code.UNAVAILABLE),
        (InvalidRequest("x"), Code.INVALID_ARGUMENT),
        (TensorError("x"), Code.INVALID_ARGUMENT),
        (UnknownDatatypeError("x"), Code.INVALID_ARGUMENT),
        (RequestTooLarge(9, 8), Code.INVALID_ARGUMENT),
        (ConfigError("x"), Code.INVALID_ARGUMENT),
        (QueueFull(4), Code.RESOURCE_EXHAUSTED),
        (QueueTimeout(1), Code.DEADLINE_EXCEEDED),
        (DeadlineUnreachable(1, 2), Code.DEADLINE_EXCEEDED),
        (asyncio.CancelledError(), Code.CANCELLED),
        (ExecutionFailed("x"), Code.INTERNAL),
        (ExecutionError("x"), Code.INTERNAL),
        (InstanceError("x"), Code.INTERNAL),
        (OutOfMemory("x"), Code.RESOURCE_EXHAUSTED),
        (MemoryError(), Code.RESOURCE_EXHAUSTED),
        (DeviceLost("x"), Code.INTERNAL),
        (StalePlan("x"), Code.INTERNAL),
        (NoInstance(), Code.UNAVAILABLE),
        (LoadError("x"), Code.INTERNAL),
        (DeviceError("x"), Code.INTERNAL),
        (RegionNotFound("x"), Code.NOT_FOUND),
        (RegionExists("x"), Code.ALREADY_EXISTS),
        (TooManyRegions("x"), Code.RESOURCE_EXHAUSTED),
        (NotSupported("x"), Code.UNIMPLEMENTED),
        (SchedulerError("x"), Code.INTERNAL),
        (BackendError("x"), Code.INTERNAL),
        (ServerError("x"), Code.INTERNAL),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_status_of_each_error_is_the_promised_one(error: BaseException, code: Code) -> None:
    assert status_of(error) is code


def test_status_of_a_subclass_without_entry_is_that_of_its_nearest_base() -> None:
    class Busier(QueueFull):
        pass

    class Novel(SchedulerError):
        pass

    assert status_of(Busier(1)) is Code.RESOURCE_EXHAUSTED
    assert status_of(Novel()) is Code.INTERNAL


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), KeyboardInterrupt()])
def test_status_of_foreign_exceptions_is_none(error: BaseException) -> None:
    assert status_of(error) is None


@pytest.mark.parametrize(
    ("error", "phrase"),
    [
        (QueueFull(4), "Exceeds maximum queue size"),
        (QueueTimeout(1_000), "Request timeout expired"),
        (DeadlineUnreachable(1, 2), "Deadline Exceeded"),
    ],
)
def test_errors_contain_the_phrases_that_triton_clients_match_on(error: Exception, phrase: str) -> None:
    assert phrase in str(error)


@pytest.mark.parametrize("cause", [OutOfMemory("x"), MemoryError()])
def test_status_of_an_execution_out_of_memory_is_resource_exhausted(cause: Exception) -> None:
    failed = ExecutionFailed("x")
    failed.__cause__ = cause
    assert status_of(failed) is Code.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("kind", [UpstreamFailed, UpstreamRefused])
def test_status_of_an_upstreams_error_is_the_upstreams(kind: type[UpstreamFailed | UpstreamRefused]) -> None:
    assert status_of(kind("OUT_OF_RANGE", "text")) is Code.OUT_OF_RANGE
    failed = ExecutionFailed("text")
    failed.__cause__ = kind("UNAUTHENTICATED", "text")
    assert status_of(failed) is Code.UNAUTHENTICATED
    assert status_of(kind("NEWER_THAN_US", "text")) in (Code.UNAVAILABLE, Code.INTERNAL)


def test_text_of_an_error_that_cannot_be_formatted_is_its_type() -> None:
    class Wordless(Exception):
        def __str__(self) -> str:
            raise KeyError("words")

    assert error_text(Wordless()) == "Wordless"


def caught(kind: type[Exception]) -> Exception:
    try:
        try:
            raise ValueError("of a frame that holds memory")
        except ValueError:
            raise kind("wrong") from None
    except kind as error:
        return error


def test_error_kept_as_value_holds_no_frames() -> None:
    expected = as_value(caught(InvalidRequest))
    assert str(expected) == "wrong"
    assert (expected.__traceback__, expected.__context__) == (None, None)
    assert as_value(caught(KeyError)).__traceback__ is not None  # a bug: its traceback is logged

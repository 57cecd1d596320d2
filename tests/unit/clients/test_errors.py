"""The error tree and its one table."""

from __future__ import annotations

import pickle

import grpc
import pytest

import paceline
from paceline import clients
from paceline.clients import errors
from paceline.server import engine
from paceline.server.errors import StartError

NAMED = {
    "CANCELLED": errors.Cancelled,
    "INVALID_ARGUMENT": errors.InvalidArgument,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "NOT_FOUND": errors.NotFound,
    "RESOURCE_EXHAUSTED": errors.ResourceExhausted,
    "UNIMPLEMENTED": errors.Unimplemented,
    "INTERNAL": errors.Internal,
    "UNAVAILABLE": errors.Unavailable,
    "UNAUTHENTICATED": errors.Unauthenticated,
    "PERMISSION_DENIED": errors.PermissionDenied,
}


@pytest.mark.parametrize("status", list(grpc.StatusCode))
def test_inference_error_each_status_is_its_class_or_the_base(status: grpc.StatusCode) -> None:
    error = errors.inference_error(status, "text", (("key", "value"),))
    assert type(error) is NAMED.get(status.name, errors.InferenceError)
    assert (error.status, error.message, error.trailing_metadata) == (status, "text", (("key", "value"),))
    assert str(error) == f"{status.name}: text"


def test_request_to_start_a_sequence_is_a_lost_sequence() -> None:
    text = "inference request for sequence 5 to model 'm' must specify the START flag on the first request"
    assert type(errors.inference_error(grpc.StatusCode.INVALID_ARGUMENT, text)) is errors.SequenceLost
    assert type(errors.inference_error(grpc.StatusCode.INTERNAL, text)) is errors.Internal


def test_inference_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(errors.inference_error(grpc.StatusCode.NOT_FOUND, "text", (("k", b"\0"),))))
    assert type(error) is errors.NotFound
    assert (error.status, error.message, error.trailing_metadata) == (
        grpc.StatusCode.NOT_FOUND,
        "text",
        (("k", b"\0"),),
    )


def test_tree_every_class_is_a_client_error_and_exported() -> None:
    classes = {
        name: each
        for name, each in vars(errors).items()
        if getattr(each, "__module__", "") == errors.__name__ and isinstance(each, type)
    }
    assert all(issubclass(each, errors.ClientError) for each in classes.values())
    assert set(NAMED.values()) <= set(classes.values())
    assert {name for name in classes if name not in clients.__all__} == set()


def test_all_names_in_the_package_exist() -> None:
    assert all(hasattr(clients, name) for name in clients.__all__)
    assert clients.__all__ == sorted(clients.__all__)


def test_package_hands_out_the_names_of_the_client_and_the_engine() -> None:
    """The list stands twice, since type checkers read it and `import paceline` mustn't import what has them."""
    assert set(paceline.__all__) == {*clients.__all__, "Engine", "BlockingEngine", "StartError"}
    assert all(getattr(paceline, name) is getattr(clients, name) for name in clients.__all__)
    assert paceline.Engine is engine.Engine
    assert paceline.StartError is StartError

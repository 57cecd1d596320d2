"""Groups of RPCs, and the headers that their callers have to send."""

from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2

from paceline.protos import inference_pb2 as pb
from paceline.server.rpc.credentials import GROUP_OF, GROUPS, Restriction, parse_restrictions


def test_every_rpc_is_in_exactly_one_group() -> None:
    services = (
        pb.DESCRIPTOR.services_by_name["GRPCInferenceService"],
        health_pb2.DESCRIPTOR.services_by_name["Health"],
    )
    paths = [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]
    # Older versions of grpcio-health-checking don't have that one.
    expected = sorted({*paths, "/grpc.health.v1.Health/List"})
    assert sorted(path for group in GROUPS.values() for path in group) == expected
    assert GROUP_OF.get("/inference.GRPCInferenceService/ModelStreamInfer") == "inference"
    assert GROUP_OF.get("/inference.GRPCInferenceService/Unheard") is None


def test_parse_several_groups_and_several_values() -> None:
    found = parse_restrictions(["health,metadata:k=v", "model-repository:admin-key=a=b:c"])
    assert found == {
        "health": Restriction("triton-grpc-protocol-k", "v"),
        "metadata": Restriction("triton-grpc-protocol-k", "v"),
        "model-repository": Restriction("triton-grpc-protocol-admin-key", "a=b:c"),
    }
    assert parse_restrictions(["health:k= !~"])["health"].value == " !~"
    assert "a=b:c" not in repr(found)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("health", "expected GROUP"),
        ("health:k", "expected GROUP"),
        ("health:k=", "expected GROUP"),
        ("health:=SECRET", "expected a key"),
        ("health:Key=SECRET", "got 'Key'"),
        ("health:k-bin=SECRET", "got 'k-bin'"),
        ("health:k=SECRET-é", "printable ASCII characters for key 'k'"),
        ("health:k=SECRET\n", "printable ASCII characters for key 'k'"),
        ("health:k=SECRET\x7f", "printable ASCII characters for key 'k'"),
        ("Health:k=SECRET", "got 'Health'"),
        ("health,:k=SECRET", "got ''"),
        (":k=SECRET", "got ''"),
        ("health,health:k=SECRET", "'health' once"),
    ],
)
def test_parse_error_does_not_contain_the_value(given: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected) as refusal:
        parse_restrictions([given])
    assert "SECRET" not in str(refusal.value)


def test_parse_of_a_group_restricted_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'trace' once"):
        parse_restrictions(["trace:a=1", "logging,trace:b=2"])

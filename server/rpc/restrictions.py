"""Groups of RPCs that may be restricted to callers that send a certain header, as in Triton.

Lives here: which RPC belongs to which group, and reading `--grpc-restricted-protocol`. Must not: look at calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["GROUPS", "HEADER_PREFIX", "Restriction", "group_of", "parse_restrictions"]

HEADER_PREFIX = "triton-grpc-protocol-"

_SERVICE = "/inference.GRPCInferenceService/"
_HEALTH = "/grpc.health.v1.Health/"

GROUPS: Mapping[str, frozenset[str]] = {
    "health": frozenset(
        (
            f"{_SERVICE}ServerLive",
            f"{_SERVICE}ServerReady",
            f"{_SERVICE}ModelReady",
            f"{_HEALTH}Check",
            f"{_HEALTH}List",
            f"{_HEALTH}Watch",
        )
    ),
    "metadata": frozenset((f"{_SERVICE}ServerMetadata", f"{_SERVICE}ModelMetadata")),
    "inference": frozenset((f"{_SERVICE}ModelInfer", f"{_SERVICE}ModelStreamInfer")),
    "shared-memory": frozenset(
        f"{_SERVICE}{kind}SharedMemory{what}"
        for kind in ("System", "Cuda")
        for what in ("Status", "Register", "Unregister")
    ),
    "model-config": frozenset((f"{_SERVICE}ModelConfig",)),
    "model-repository": frozenset(
        f"{_SERVICE}{rpc}" for rpc in ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload")
    ),
    "statistics": frozenset((f"{_SERVICE}ModelStatistics",)),
    "trace": frozenset((f"{_SERVICE}TraceSetting",)),
    "logging": frozenset((f"{_SERVICE}LogSettings",)),
}
"""The paths of each group's RPCs, as gRPC has them, by the group's name. Reflection, which Triton lacks, is in none."""

_GROUP_OF = {path: name for name, paths in GROUPS.items() for path in paths}
_KEY = re.compile(r"[a-z0-9_.-]+")
# What gRPC's clients can send in a header that isn't binary: any other value would lock everybody out.
_VALUE = re.compile(r"[ -~]+")


@dataclass(frozen=True, slots=True)
class Restriction:
    """What callers of a group of RPCs have to send: the header `triton-grpc-protocol-KEY` with `value`."""

    header: str
    value: str = field(repr=False)


def group_of(path: str) -> str | None:
    """The group of an RPC, by its path; None if it is in none."""
    return _GROUP_OF.get(path)


def parse_restrictions(given: Sequence[str]) -> dict[str, Restriction]:
    """Restrictions by group, read from values `GROUP,GROUP:KEY=VALUE`.

    Raises ValueError; its text contains no VALUE, since those are secrets.
    """
    found: dict[str, Restriction] = {}
    for one in given:
        groups, colon, rest = one.partition(":")
        key, equals, value = rest.partition("=")
        if not colon or not equals or not value:
            raise ValueError("expected GROUP,GROUP,...:KEY=VALUE")
        if not _KEY.fullmatch(key) or key.endswith("-bin"):
            raise ValueError(f"expected a key of lower case letters, digits, '_', '.' and '-', got '{key}'")
        if not _VALUE.fullmatch(value):
            raise ValueError(f"expected a value of printable ASCII characters for key '{key}'")
        for group in groups.split(","):
            if group not in GROUPS:
                raise ValueError(f"expected groups among {', '.join(GROUPS)}, got '{group}'")
            if group in found:
                raise ValueError(f"expected group '{group}' once, got it several times")
            found[group] = Restriction(HEADER_PREFIX + key, value)
    return found

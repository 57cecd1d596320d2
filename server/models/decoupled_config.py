"""What a model's configuration may not have that gets requests and not batches: decoupled, written for Triton, or one
that generates.

Lives here: settings that mean something only where each request of a batch has one answer, which is a share of what the
model has made for all. Must not: settings of other models.
"""

from __future__ import annotations

import sys
from typing import Final

from paceline.backends.spec import ModelSpec
from paceline.protos import model_config_pb2 as pb
from paceline.scheduler.policy import BatchPolicy
from paceline.server.errors import ConfigError
from paceline.server.models.batch_policy import own_settings

__all__ = ["MANY", "check_generating", "check_requests"]

MANY: Final = sys.maxsize
"""How many requests may be open where each is answered once: as many as its queue takes."""

_ISOLATE = "paceline.isolate_failures"


def check_requests(config: pb.ModelConfig, spec: ModelSpec, policy: BatchPolicy, *, for_triton: bool) -> None:
    """Raise ConfigError for what can't be had, naming the setting."""
    own = own_settings(config)
    decoupled = config.model_transaction_policy.decoupled
    isolates = own.isolate_failures and _ISOLATE in config.parameters
    states = spec.sequence.states if spec.sequence is not None else ()
    settings = (
        ("dynamic_batching.preserve_ordering", "false", decoupled and policy.preserve_ordering and "true"),
        ("sequence_batching", "none", not for_triton and config.HasField("sequence_batching") and "it"),
        ("sequence_batching.state", "none", [one.input.name for one in states]),
        ("batch_input", "none", [name for one in spec.batch_inputs for name in one.targets]),
        ("batch_output", "none", [name for one in spec.batch_outputs for name in one.targets]),
        ("paceline.batch_sizes", "none", list(policy.batch_sizes)),
        ("paceline.pad", "none", [length.name for length in spec.lengths]),
        ("paceline.split_oversized", "false", own.split_oversized and "true"),
        (_ISOLATE, "false", decoupled and isolates and "true"),
    )
    why = "is decoupled (model_transaction_policy)" if decoupled else "is written for Triton's Python backend"
    for name, expected, got in settings:
        if got:
            raise ConfigError(
                f"{name}: expected {expected}, as the model {why}: its requests are handed over one by one, and "
                f"answered whenever it likes; got {got}"
            )
    if not own.max_open_requests:
        raise ConfigError("paceline.max_open_requests: expected 1 or more, got 0")


def check_generating(config: pb.ModelConfig, policy: BatchPolicy) -> None:
    """The same for a model whose requests are prompts."""
    settings = (
        ("dynamic_batching.preserve_ordering", policy.preserve_ordering),
        ("response_cache.enable", config.response_cache.enable),
    )
    for name, is_asked_for in settings:
        if is_asked_for:
            raise ConfigError(
                f"{name}: expected false, as the model generates (paceline.generate), and its answers come token by "
                "token; got true"
            )

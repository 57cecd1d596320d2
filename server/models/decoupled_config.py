"""What a decoupled model's configuration may not have.

Lives here: settings that mean something only where each request of a batch has one answer, which is a share of what the
model has made for all. Must not: settings of other models.
"""

from __future__ import annotations

from paceline.backends.spec import ModelSpec
from paceline.protos import model_config_pb2 as pb
from paceline.scheduler.policy import BatchPolicy
from paceline.server.errors import ConfigError
from paceline.server.models.batch_policy import own_settings

__all__ = ["check_decoupled"]

_ISOLATE = "paceline.isolate_failures"


def check_decoupled(config: pb.ModelConfig, spec: ModelSpec, policy: BatchPolicy) -> None:
    """Raise ConfigError for what can't be had, naming the setting."""
    own = own_settings(config)
    isolates = own.isolate_failures and _ISOLATE in config.parameters
    settings = (
        ("dynamic_batching.preserve_ordering", "false", policy.preserve_ordering and "true"),
        ("sequence_batching", "none", config.HasField("sequence_batching") and "it"),
        ("batch_input", "none", [name for one in spec.batch_inputs for name in one.targets]),
        ("batch_output", "none", [name for one in spec.batch_outputs for name in one.targets]),
        ("paceline.batch_sizes", "none", list(policy.batch_sizes)),
        ("paceline.split_oversized", "false", own.split_oversized and "true"),
        (_ISOLATE, "false", isolates and "true"),
    )
    for name, expected, got in settings:
        if got:
            raise ConfigError(
                f"{name}: expected {expected}, as the model is decoupled (model_transaction_policy): its requests are "
                f"handed over one by one, and answered whenever it likes; got {got}"
            )
    if not own.max_open_requests:
        raise ConfigError("paceline.max_open_requests: expected 1 or more, got 0")

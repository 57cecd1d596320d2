"""The chosen settings as a model's `config.pbtxt`, which says what was changed and why.

Lives here: that text. Must not: choose, or write files.
"""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import wrap
from typing import NamedTuple

from google.protobuf import text_format

from paceline.protos import model_config_pb2 as pb
from paceline.scheduler.policy import BatchPolicy
from paceline.server.models.batch_policy import own_settings
from paceline.server.models.defaults import ALLOW_SPINNING, INTRA
from paceline.server.models.offline import configured_for
from paceline.server.tune.choosing import Setting

__all__ = ["Change", "changes_of", "config_text", "plain", "plain_time"]

_SIZES = "paceline.batch_sizes"
_WIDTH = 100


def plain(value: float, digits: int = 4) -> str:
    """So many digits, or all before the point: 0.125, 150.5, 16,140."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.{digits}g}"


def plain_time(ns: float) -> str:
    """Three digits, of milliseconds, or of seconds if it is one or more."""
    return f"{plain(ns / 1e6, 3)} ms" if ns < 999.5e6 else f"{plain(ns / 1e9, 3)} s"


class Change(NamedTuple):
    """A field of the configuration, its value as the model is served now and as it was chosen, and what
    that does."""

    field: str
    before: str
    after: str
    why: str


def changes_of(config: pb.ModelConfig, now: Setting, chosen: Setting) -> list[Change]:
    """What differs, of a model with its own `config`."""
    mine, policy = now.policy, chosen.policy
    layout, offline = chosen.layout, chosen.layout.offline
    refuses = policy.max_batch_rows < mine.max_batch_rows and not own_settings(config).split_oversized
    found = [
        Change(
            "max_batch_size",
            str(mine.max_batch_rows),
            str(policy.max_batch_rows),
            f"such a batch executes for {plain_time(layout.curve.mean_ns(policy.max_batch_rows))}"
            + "; requests with more rows are refused" * refuses,
        ),
        Change(
            "dynamic_batching.preferred_batch_size",
            str(list(mine.preferred_batch_rows)),
            str(list(policy.preferred_batch_rows)),
            "batches leave when an instance is free, whatever their size",
        ),
        Change(
            "dynamic_batching.max_queue_delay_microseconds",
            str(mine.max_queue_delay_ns // 1_000),
            str(policy.max_queue_delay_ns // 1_000),
            "a batch that isn't full waits so long for more requests"
            if policy.max_queue_delay_ns
            else "batches leave as soon as an instance is free",
        ),
    ]
    if offline.instances:
        why = "so many batches execute at the same time"
        found.append(Change("instance_group.count", str(now.layout.count), str(offline.instances), why))
    if offline.intra_op_threads:
        own = config.parameters[INTRA].string_value if INTRA in config.parameters else "0"
        threads = "ONNX Runtime's choice" if own == "0" else own
        found.append(Change(f"parameters.{INTRA}", threads, str(offline.intra_op_threads), "each has its own CPUs"))
    if not layout.allow_spinning:
        why = "threads that spin while they wait for work take CPU time from the server and from each other"
        found.append(Change(f"parameters.{ALLOW_SPINNING}", "1", "0", why))
    why = "batches are filled up to these, so that the GPU meets few shapes: better when tried"
    found.append(Change(f"parameters.{_SIZES}", _sizes(mine) or "any", _sizes(policy) or "any", why))
    return [one for one in found if one.before != one.after]


def _sizes(policy: BatchPolicy) -> str:
    return ",".join(map(str, policy.batch_sizes))


def config_text(config: pb.ModelConfig, chosen: Setting, changes: Iterable[Change], heading: Iterable[str]) -> str:
    """`config` with `changes`, below comments that say them, after the lines of `heading`."""
    changed, fields = configured_for(chosen.layout.offline, config), {one.field for one in changes}
    if "max_batch_size" in fields or (not config.max_batch_size and chosen.policy.max_batch_rows > 1):
        changed.max_batch_size = chosen.policy.max_batch_rows
        for sample in changed.model_warmup:
            sample.batch_size = min(sample.batch_size, chosen.policy.max_batch_rows)
    if "dynamic_batching.max_queue_delay_microseconds" in fields:
        changed.dynamic_batching.max_queue_delay_microseconds = chosen.policy.max_queue_delay_ns // 1_000
    if f"parameters.{ALLOW_SPINNING}" in fields:
        changed.parameters[ALLOW_SPINNING].string_value = "0"
    if f"parameters.{_SIZES}" in fields:
        changed.parameters[_SIZES].string_value = _sizes(chosen.policy)
    # Also the largest batch, which changes nothing as long as it is that, but can't be more.
    if changed.HasField("dynamic_batching") and not chosen.policy.preferred_batch_rows:
        del changed.dynamic_batching.preferred_batch_size[:]
    if chosen.policy.max_batch_requests != 1 and chosen.policy.max_batch_rows > 1:
        changed.dynamic_batching.SetInParent()
    lines = [*heading, *(f"{one.field}: {one.after}, was {one.before}: {one.why}" for one in changes)]
    comments = [f"# {part}" for line in lines for part in wrap(line, _WIDTH - 2)]
    return "\n".join([*comments, text_format.MessageToString(changed)])

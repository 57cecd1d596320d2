"""Sequences under random steps, cancellations, deadlines, idleness, failing executions, and instances that are lost:
each step is answered once, in order, from the state that the steps before it have left, or not executed at all. What
must hold is recomputed from lists by `World`; the state of a sequence is the tuple of the steps that made it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.scheduler.policy import NEVER, BatchPolicy, SequencePolicy
from tests.lengths import LONG
from tests.property.sequence_world import IDLE_NS, LIMIT_NS, MS, World

POLICIES = st.builds(
    BatchPolicy,
    max_batch_rows=st.sampled_from([1, 2, 4]),
    max_queue_delay_ns=st.sampled_from([0, 0, 5 * MS]),
    isolate_failures=st.booleans(),
    execution_limit_ns=st.sampled_from([0, LIMIT_NS]),
    deadline_aware=st.just(False),
    sequences=st.builds(
        SequencePolicy,
        idle_ns=st.just(IDLE_NS),
        places=st.sampled_from([0, 0, 1, 2]),
        max_sequences=st.sampled_from([1, 2, 100]),
        backlog=st.sampled_from([0, 2, 100, 100]),
    ),
)
IDS = st.sampled_from([*[1] * 4, 2, 2, 3, "1", 0])
PATIENCE_NS = st.sampled_from([NEVER, NEVER, NEVER, 8 * MS, 4 * IDLE_NS])
RARELY = st.sampled_from([False, False, False, True])
ENDS = st.sampled_from(["well", "well", "well", "fail", "fail", "one", "lose", "nobody"])
TIMES_NS = st.sampled_from([MS, 5 * MS, 10 * MS, LIMIT_NS, IDLE_NS - 1, IDLE_NS])
ACTIONS = st.one_of(
    st.tuples(st.just("send"), IDS, st.booleans(), RARELY, PATIENCE_NS),
    st.tuples(st.just("send"), IDS, st.just(False), RARELY, PATIENCE_NS),
    st.tuples(st.just("send_to_all"), st.booleans()),
    st.tuples(st.just("send_several"), IDS, st.booleans(), PATIENCE_NS),
    st.tuples(st.just("finish"), st.integers(0, 2), ENDS),
    st.tuples(st.just("finish"), st.integers(0, 2), ENDS),
    st.tuples(st.just("cancel"), st.integers(0, 5)),
    st.tuples(st.just("advance"), TIMES_NS),
    st.tuples(st.just("freeze"), TIMES_NS),
    st.tuples(st.just("add")),
)


@settings(max_examples=600 if LONG else 200)
@given(
    POLICIES,
    st.integers(1, 2),
    st.sampled_from([0, 0, 2]),
    st.lists(ACTIONS, min_size=4, max_size=40),
    st.sampled_from(["idle", "drain", "close"]),
)
def test_each_step_sees_what_those_before_it_left(
    policy: BatchPolicy, instances: int, shared: int, script: list[tuple[Any, ...]], ending: str
) -> None:
    asyncio.run(World(policy, instances, shared).play(script, ending))

"""Triton and this server give the answers that each call of the lists expects."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.differential.calls import CALLS, HARMFUL
from tests.differential.comparing import Call, answer_of, differences, lasting_answer_of
from tests.differential.pair import Both, serving_both
from tests.differential.repository import MODELS


# In the order of the list: some calls change what later ones see.
@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.rpc}: {call.what}")
def test_call_is_answered_alike_or_as_documented(call: Call, both: Both) -> None:
    found = differences(call, lasting_answer_of(both.triton.channel, call), answer_of(both.here.channel, call))
    assert not found, "\n".join([*found, *both.ended()])


@pytest.mark.parametrize("call", HARMFUL, ids=lambda call: call.what)
def test_call_that_ends_triton_or_its_process_does_not_end_this_server(
    call: Call, tmp_path: Path, installed: None
) -> None:
    name = call.request.model_name  # type: ignore[attr-defined]
    with serving_both(tmp_path, {name: MODELS[name]}) as two:
        found = differences(call, answer_of(two.triton.channel, call), answer_of(two.here.channel, call))
    assert not found, "\n".join(found)

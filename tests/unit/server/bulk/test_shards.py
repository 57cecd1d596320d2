"""Which shard a process does: by its flag, by what Kubernetes says, or the only one."""

from __future__ import annotations

import pytest

from paceline.server.bulk.settings import parse_shard


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        (None, {}, (0, 1)),
        (None, {"JOB_COMPLETIONS": "8"}, (0, 1)),
        (None, {"JOB_COMPLETION_INDEX": "0", "JOB_COMPLETIONS": "8"}, (0, 8)),
        (None, {"JOB_COMPLETION_INDEX": "7", "JOB_COMPLETIONS": "8"}, (7, 8)),
        ("2/4", {}, (2, 4)),
        (" 0/1 ", {}, (0, 1)),
        ("2/4", {"JOB_COMPLETION_INDEX": "7", "JOB_COMPLETIONS": "8"}, (2, 4)),
        ("2/4", {"JOB_COMPLETION_INDEX": "7"}, (2, 4)),
    ],
)
def test_flag_precedes_what_kubernetes_says(
    text: str | None, environment: dict[str, str], expected: tuple[int, int]
) -> None:
    assert parse_shard(text, environment) == expected


@pytest.mark.parametrize("text", ["", "2", "2/", "/8", "a/8", "-1/8", "1.0/8", "2/8/9", "1\u0662/99", "0/9999999999"])
def test_text_that_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected K/N, such as 2/8, got '") as refused:
        parse_shard(text, {})
    assert f"'{text}'" in str(refused.value)


@pytest.mark.parametrize("text", ["8/8", "9/8", "0/0"])
def test_number_beyond_last_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"expected K/N with K from 0 to N - 1, got '{text}'$"):
        parse_shard(text, {})


@pytest.mark.parametrize("environment", [{}, {"JOB_COMPLETIONS": ""}])
def test_index_without_completions_asks_for_them(environment: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="JOB_COMPLETION_INDEX is set and JOB_COMPLETIONS isn't: set it to the Job's"):
        parse_shard(None, {"JOB_COMPLETION_INDEX": "3", **environment})


def test_wrong_environment_is_named_in_refusal() -> None:
    with pytest.raises(ValueError, match="got '8/8' from JOB_COMPLETION_INDEX and JOB_COMPLETIONS"):
        parse_shard(None, {"JOB_COMPLETION_INDEX": "8", "JOB_COMPLETIONS": "8"})

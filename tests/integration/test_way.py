"""How far a reader travels who follows one request: bounds that only go down."""

from __future__ import annotations

from bench.way import middle, one_by_one, together

_MAX_FILES, _MAX_MOVES, _MAX_MOVES_TOGETHER = 23, 70, 13  # a few more than usual: threads take turns in real time


def test_lone_request_takes_no_longer_way() -> None:
    way = middle(one_by_one())
    assert way.files <= _MAX_FILES
    assert way.moves <= _MAX_MOVES


def test_requests_that_arrive_together_share_the_way() -> None:
    assert middle(together(32)).moves <= _MAX_MOVES_TOGETHER

"""What gates count, in one process or several. integration/test_access and test_limits test whom they let through."""

from __future__ import annotations

from server.rpc.gate import Usage


def test_usage_of_several_processes_is_their_sum() -> None:
    one, other = Usage(1, 2, (1, 0, 0, 3)), Usage(4, 8, (0, 5, 0, 1))
    both = one.plus(other)
    assert both == other.plus(one) == Usage(5, 10, (1, 5, 0, 4))
    assert both.refused_by_reason == {"unauthenticated": 1, "restricted": 5, "rpcs": 0, "streams": 4}
    assert both.plus(Usage()) == both

"""Whether callers that were just answered return at once, and how long to wait for them.

Lives here: one observation per shape key, and the rule based on it (docs/decisions/0001-release-when-idle.md). Must
not: decide when the rule applies; that is `batch_queue`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

_WEIGHT = 0.1
_PARTS = (64, 32, 16, 8, 4)
"""Windows in which callers may return: each is the cost of a batch without its rows, divided by one of these."""
_MIN_SHARE = 0.5
_MIN_MORE = 0.5
_MAX_KEYS = 1024


class _Key:
    __slots__ = ("answered_ns", "answered_rows", "arrivals", "base_ns", "shares")

    def __init__(self) -> None:
        self.shares = [0.0] * len(_PARTS)
        self.arrivals = [0] * len(_PARTS)
        self.answered_ns = self.answered_rows = self.base_ns = 0


class ReturningCallers:
    """Shares of a batch's rows that arrive soon after its answers. Only the hashes of shape keys are kept, as in
    `LatencyModel`."""

    def __init__(self) -> None:
        self._keys: OrderedDict[int, _Key] = OrderedDict()

    def arrived(self, key: Hashable, rows: int, now_ns: int) -> None:
        """Note an arrival. One from before the last answers doesn't count: its caller got none of those."""
        seen = self._keys.get(hash(key))
        if seen is None or not 0 <= 4 * (now_ns - seen.answered_ns) <= seen.base_ns:
            return
        for number, part in enumerate(_PARTS):
            if part * (now_ns - seen.answered_ns) <= seen.base_ns:
                seen.arrivals[number] += rows

    def answered(self, key: Hashable, rows: int, base_ns: int, now_ns: int) -> None:
        """Note answers; `base_ns` is what a batch costs without its rows."""
        seen = self._keys.get(hash(key))
        if seen is None:
            seen = self._keys[hash(key)] = _Key()
            if len(self._keys) > _MAX_KEYS:
                self._keys.popitem(last=False)
        elif seen.answered_rows:
            for number, came in enumerate(seen.arrivals):
                share = min(1.0, came / seen.answered_rows)
                seen.shares[number] += _WEIGHT * (share - seen.shares[number])
        seen.arrivals = [0] * len(_PARTS)
        seen.answered_ns, seen.answered_rows, seen.base_ns = now_ns, rows, base_ns

    def hold_until_ns(self, key: Hashable, waiting_rows: int, now_ns: int) -> int:
        """Until when an idle instance should wait for callers to return; if that isn't after `now_ns`, not at all."""
        seen = self._keys.get(hash(key))
        if seen is None or 4 * (now_ns - seen.answered_ns) >= seen.base_ns:
            return 0
        best, until_ns = 0.0, 0
        for part, share, came in zip(_PARTS, seen.shares, seen.arrivals, strict=True):
            left_ns = seen.base_ns // part - (now_ns - seen.answered_ns)
            more = share * seen.answered_rows - came
            gain = more * seen.base_ns - waiting_rows * left_ns
            if share >= _MIN_SHARE and left_ns > 0 and more >= _MIN_MORE and gain > best:
                best, until_ns = gain, now_ns + left_ns
        return until_ns

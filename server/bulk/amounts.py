"""Numbers as people read them.

Lives here: amounts, times and sizes in words. Must not: know what is counted.
"""

from __future__ import annotations

__all__ = ["amount", "duration", "several", "size"]


def amount(number: float) -> str:
    """For people: a decimal where it says something."""
    return f"{number:.1f}" if number < 100 else f"{number:,.0f}"


def duration(seconds: float) -> str:
    """For people: two units at most."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def several(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def size(size_bytes: int) -> str:
    number, unit = float(size_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:,.0f} {unit}" if unit == "bytes" or number >= 100 else f"{number:.1f} {unit}"

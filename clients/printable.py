"""Makes text from a server safe to print: it must not move the cursor, change colours or begin lines.

Lives here: which characters may be printed. Must not: print.
"""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """`text` with a question mark for each character that isn't printable."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)

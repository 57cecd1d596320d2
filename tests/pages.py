"""Pages as browsers read them, as far as tests ask."""

from __future__ import annotations

from html.parser import HTMLParser

__all__ = ["Page"]


class Page(HTMLParser):
    """Which tags are open, all attributes that name something elsewhere, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.elsewhere: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.elsewhere += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "xlink:href", "data")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

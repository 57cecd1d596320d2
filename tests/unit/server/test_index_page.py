"""The page of the metrics port, as HTML."""

from __future__ import annotations

from html.parser import HTMLParser

from paceline.server.health import index_page
from paceline.server.models.model_record import IndexLine, ModelState


class Seen(HTMLParser):
    """Which tags and texts a browser would see."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_names_are_text_and_never_markup() -> None:
    name = '<script>alert("1")</script>&amp;'
    seen = Seen(index_page("<b> 1", [IndexLine(name, "2", ModelState.READY), IndexLine("other")], {}))
    assert not seen.tags & {"script", "b"}
    at = seen.texts.index(name)
    assert [text for text in seen.texts[at:] if text.strip()][:5] == [name, "2", "READY", "other", "not loaded"]
    assert "<b> 1" in seen.texts

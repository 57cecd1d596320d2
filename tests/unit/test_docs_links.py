"""Every link of every page leads somewhere: on disk, and on the site that `make docs` builds."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from tests.docs.blocks import pages
from tests.harness import REPO

_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```$|^(?: {4}[^\n]*\n?)+|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_SCHEME = re.compile(r"[a-z]+:")


@cache
def anchors(page: Path) -> frozenset[str]:
    """The names of headings, as GitHub and the site make them. Of equal headings none: the two differ there."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    named = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", one) for one in re.findall(r"^#+ (.+)$", prose, re.MULTILINE)]
    slugs = [re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in named]
    return frozenset(slug for slug in slugs if slugs.count(slug) == 1)


def links(page: Path) -> list[str]:
    return [found["target"] for found in _LINK.finditer(_CODE.sub("", page.read_text(encoding="utf-8")))]


def on_the_site() -> list[str]:
    """The patterns of what `make docs` takes, as git understands them: a folder stands for all that is in it."""
    (told,) = re.findall(r"^PAGES := (.+)$", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return [pattern for word in told.split() for pattern in (word.strip("'"), f"{word}/*")]


def test_links_are_found_at_all() -> None:
    assert sum(len(links(page)) for page in pages()) > 100
    assert any("#" in link for link in links(REPO / "README.md"))


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(REPO).as_posix())
def test_links_lead_to_existing_files_and_headings(page: Path) -> None:
    for link in links(page):
        if _SCHEME.match(link):
            continue
        target, _, anchor = link.partition("#")
        found = (page.parent / target).resolve() if target else page
        assert found.is_file(), f"{link}: no file (a site shows no folders)"
        shown = any(fnmatch(found.relative_to(REPO).as_posix(), pattern) for pattern in on_the_site())
        assert shown, f"{link}: not on the site"
        if anchor:
            assert anchor in anchors(found), f"{link}: no such heading, or several"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(REPO).as_posix())
def test_pages_need_nothing_from_elsewhere(page: Path) -> None:
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    assert re.findall(r"!\[[^\]]*\]\(https?:[^)]*\)|<(?:script|link|img|iframe)\b[^>]*https?:", text) == []


def test_site_shows_each_page_of_docs_once() -> None:
    site = tomllib.loads((REPO / "zensical.toml").read_text(encoding="utf-8"))["project"]
    shown: list[str] = []
    waiting = list(site["nav"])
    while waiting:
        (part,) = waiting.pop().values()
        if isinstance(part, str):
            shown.append(part)
        else:
            waiting += part
    assert [page for page in shown if not (REPO / page).is_file()] == []
    assert sorted(page for page in shown if page.startswith("docs/")) == sorted(
        page.relative_to(REPO).as_posix() for page in (REPO / "docs").rglob("*.md")
    )
    assert site["theme"]["font"] is False


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(REPO).as_posix())
def test_named_files_of_the_repository_exist(page: Path) -> None:
    folders = "backends|bench(?!/results)|clients|deploy|docs|protos|scheduler|server|tests"
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(rf"`((?:{folders})/[\w./-]+\.(?:py|md|yaml|json|c|h|sh|proto))`", text))
    if page.name != "CHANGELOG.md":  # which tells of files that have gone since
        assert [name for name in sorted(named) if not (REPO / name).is_file()] == []

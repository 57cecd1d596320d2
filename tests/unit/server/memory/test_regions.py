"""The registry of regions: names, kinds, the limit, and regions removed while requests hold them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import pytest

from paceline.server.errors import InvalidRequest, RegionExists, RegionNotFound, TooManyRegions
from paceline.server.memory.regions import Regions


@dataclass(eq=False)
class Stub:
    name: str
    kind: str = "system"
    byte_size: int = 1

    def check(self) -> None: ...

    def read_into(self, target: Any, offset: int) -> None: ...

    def write(self, data: Any, offset: int) -> None: ...


def names(regions: Regions, kind: str = "system", name: str = "") -> list[str]:
    return [one.name for one in regions.of_kind(kind, name)]


def test_find_returns_only_regions_that_were_added() -> None:
    regions, region = Regions(4), Stub("a")
    regions.add(region)
    assert regions.find("a") is region
    with pytest.raises(RegionNotFound, match=r"^Unable to find shared memory region: 'b'; registered are \['a'\]$"):
        regions.find("b")


def test_find_error_among_many_regions_names_some() -> None:
    regions = Regions(10)
    for name in "abcdefg":
        regions.add(Stub(name))
    with pytest.raises(RegionNotFound, match=r"registered are \['a', 'b', 'c', 'd', 'e'\] and 2 more$"):
        regions.find("x")


def test_add_a_name_twice_is_refused_whatever_the_kind() -> None:
    regions, first = Regions(4), Stub("a")
    regions.add(first)
    for kind in ("system", "cuda"):
        with pytest.raises(RegionExists, match=r"^shared memory region 'a' already in manager"):
            regions.add(Stub("a", kind))
    assert regions.find("a") is first


def test_add_without_a_name_is_refused_since_no_name_means_all() -> None:
    with pytest.raises(InvalidRequest, match="expected a name"):
        Regions(4).add(Stub(""))


def test_add_a_name_of_more_than_1024_bytes_is_refused() -> None:
    regions = Regions(4)
    regions.add(Stub("é" * 512))
    with pytest.raises(InvalidRequest, match=r"'é{64}…': .* expected a name of at most 1024 bytes, got 1026"):
        regions.add(Stub("é" * 513))


def test_add_beyond_the_limit_is_refused_until_one_is_removed() -> None:
    regions = Regions(2)
    regions.add(Stub("a"))
    regions.add(Stub("b", "cuda"))
    with pytest.raises(TooManyRegions, match="there are 2 regions already, as many as --max-client-shm-regions allows"):
        regions.add(Stub("c"))
    regions.remove("cuda", "")
    regions.add(Stub("c"))
    assert names(regions) == ["a", "c"]


def test_remove_removes_one_or_all_of_a_kind() -> None:
    regions = Regions(9)
    for name, kind in (("a", "system"), ("b", "cuda"), ("c", "system"), ("d", "system")):
        regions.add(Stub(name, kind))
    regions.remove("system", "c")
    assert (names(regions), names(regions, "cuda")) == (["a", "d"], ["b"])
    regions.remove("system", "")
    assert (names(regions), names(regions, "cuda")) == ([], ["b"])
    regions.remove("system", "nosuch")
    regions.remove("system", "")
    with pytest.raises(RegionNotFound, match="expected the name of a system shared memory region, got 'b', which is a"):
        regions.remove("system", "b")
    assert names(regions, "cuda", "b") == ["b"]


def test_of_kind_by_the_name_of_another_kind_is_not_found() -> None:
    regions = Regions(9)
    regions.add(Stub("a"))
    with pytest.raises(RegionNotFound, match="'a', which is a system one"):
        regions.of_kind("cuda", "a")
    with pytest.raises(RegionNotFound, match=r"^Unable to find cuda shared memory region: 'b'"):
        regions.of_kind("cuda", "b")


@pytest.mark.parametrize("name", ["a", ""])
def test_removed_region_is_found_until_its_holder_releases_it(name: str) -> None:
    regions, held = Regions(1), Stub("a")
    regions.add(held)
    regions.remove("system", name)
    assert regions.find("a") is held
    assert names(regions) == names(regions, name="a") == ["a"]
    regions.remove("system", "a")
    regions.remove("system", "")
    assert regions.find("a") is held
    del held
    assert names(regions) == []
    with pytest.raises(RegionNotFound):
        regions.find("a")


def test_region_added_again_is_found_while_the_old_one_is_held() -> None:
    regions, held, fresh = Regions(1), Stub("a"), Stub("a")
    regions.add(held)
    regions.remove("system", "a")
    regions.add(fresh)
    assert regions.find("a") is fresh
    assert regions.of_kind("system") == [fresh]
    del held
    assert regions.find("a") is fresh


def test_clear_removes_all() -> None:
    regions = Regions(2)
    regions.add(Stub("a"))
    regions.add(Stub("b", "cuda"))
    regions.clear()
    assert names(regions) == names(regions, "cuda") == []


class Finder:
    """Finds a region by its name, and counts how often it was asked to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked = 0

    def __call__(self, regions: Regions) -> Any:
        self.asked += 1
        return regions.get(self.name)


def test_known_is_looked_up_once() -> None:
    regions, region, find = Regions(4), Stub("a"), Finder("a")
    regions.add(region)
    assert [regions.known("it", find) for _ in range(3)] == [region] * 3
    assert find.asked == 1
    assert regions.known("something else", Finder("b")) is None


def test_known_looks_missing_regions_up_again() -> None:
    regions, find = Regions(4), Finder("a")
    assert [regions.known("it", find) for _ in range(2)] == [None, None]
    assert find.asked == 2


@pytest.mark.parametrize("change", ["add", "remove", "remove all", "clear"])
def test_known_is_forgotten_with_every_change(change: str) -> None:
    regions, find = Regions(4), Finder("a")
    regions.add(Stub("a"))
    gone = weakref.ref(regions.find("a"))
    regions.known("it", find)
    if change == "add":
        regions.add(Stub("b"))
        assert regions.known("it", find) is gone()
    elif change == "clear":
        regions.clear()
    else:
        regions.remove("system", "" if change == "remove all" else "a")
    assert (gone() is None) == (change != "add")
    assert (regions.known("it", find) is None) == (change != "add")
    assert find.asked == 2


def test_known_does_not_keep_a_removed_region_alive() -> None:
    regions, find = Regions(4), Finder("a")
    held = Stub("a")
    regions.add(held)
    regions.remove("system", "a")
    assert regions.known("it", find) is held
    gone = weakref.ref(held)
    del held
    assert gone() is None
    assert regions.known("it", find) is None


def test_known_results_are_not_kept_for_ever() -> None:
    regions = Regions(4)
    regions.add(Stub("a"))
    finders = [Finder("a") for _ in range(2_000)]
    gone = weakref.ref(finders[0])
    regions.known(finders[0], finders[0])
    for find in finders[1:]:
        regions.known(find, find)
    del finders, find
    assert gone() is None

from __future__ import annotations

import json

import numpy as np
import pytest

from paceline.clients.inputs import GivenTensor, InputError
from paceline.clients.load import mixture
from paceline.clients.load.mixture import draw, mixed, parse_mixed_shape, recorded
from paceline.clients.load.recording import Recording, read_recording
from paceline.clients.messages import ModelMetadata, TensorMetadata


def model(**inputs: tuple[int, ...]) -> ModelMetadata:
    tensors = tuple(TensorMetadata(name, "INT64", shape) for name, shape in inputs.items())
    return ModelMetadata("m", (), "", tensors, (), {})


MODEL = model(ids=(-1, -1), mask=(-1, -1))


def recording(*shapes: dict[str, tuple[int, ...]]) -> Recording:
    """A request a second."""
    return read_recording([json.dumps({"at_s": at_s, "shapes": one}) for at_s, one in enumerate(shapes)])


def shapes(*texts: str, count: int, seed: int = 0) -> list[dict[str, tuple[int, ...]]]:
    generator = np.random.default_rng(seed)
    parsed = dict(map(parse_mixed_shape, texts))
    return [draw(parsed, generator) for _ in range(count)]


def test_ranges_that_are_written_alike_have_one_size() -> None:
    drawn = shapes("ids=1,16..512", "mask=1,16..512", "other=1..100", count=1000)
    assert all(one["ids"] == one["mask"] for one in drawn)
    sizes = [one["ids"][1] for one in drawn]
    assert min(sizes) >= 16
    assert max(sizes) <= 512
    assert len(set(sizes)) > 300
    assert len({one["other"] for one in drawn}) > 50


def test_choices_are_drawn_by_weight_and_at_the_same_place() -> None:
    drawn = shapes("ids=1,16*3|1,512", "mask=1,16*3|1,512", count=4000)
    assert all(one["ids"] == one["mask"] for one in drawn)
    assert sum(one["ids"] == (1, 16) for one in drawn) == pytest.approx(3000, abs=150)


def test_scalars_and_plain_shapes_need_no_luck() -> None:
    assert shapes("a=", "b=2,3", count=1) == [{"a": (), "b": (2, 3)}]


@pytest.mark.parametrize("text", ["ids", "=1", "ids=a", "ids=5..3", "ids=-1", "ids=1*0", "ids=1*nan", "ids=1*x"])
def test_shape_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected NAME=1,2,3"):
        parse_mixed_shape(text)


def test_mixed_requests_depend_on_the_seed_alone() -> None:
    parsed = dict(map(parse_mixed_shape, ["ids=1,1..9", "mask=1,1..9"]))

    def made(seed: int) -> list[list[int]]:
        found = mixed(MODEL, [{}], shapes=parsed, rows=None, distinct=20, seed=seed)
        return [one.arrays["ids"].ravel().tolist() for one in found]

    assert made(1) == made(1) != made(2)
    assert len({tuple(one) for one in made(1)}) > 10


def test_given_inputs_are_sent_in_turn_and_missing_ones_made_up() -> None:
    given = [{"ids": GivenTensor(np.full((1, size), size))} for size in (2, 3)]
    parsed = dict([parse_mixed_shape("mask=1,4")])
    made = list(mixed(MODEL, given, shapes=parsed, rows=None, distinct=4, seed=0))
    assert [one.arrays["ids"].shape for one in made] == [(1, 2), (1, 3), (1, 2), (1, 3)]
    assert {one.arrays["mask"].shape for one in made} == {(1, 4)}


def test_mixture_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "MOST_BYTES", 1000)
    parsed = dict(map(parse_mixed_shape, ["ids=1,25", "mask=1,25"]))  # 400 bytes
    assert len(list(mixed(MODEL, [{}], shapes=parsed, rows=None, distinct=9, seed=0))) == 2
    with pytest.raises(InputError, match="all 3 recorded shapes"):
        recorded(MODEL, {}, recording(*[{"ids": (1, size), "mask": (1, size)} for size in (24, 25, 26)]), None, 0)


def test_recorded_shapes_have_a_request_each() -> None:
    made = recorded(MODEL, {}, recording({"ids": (1, 5), "mask": (1, 5)}, {"ids": (2, 3), "mask": (2, 3)}), None, 0)
    assert [one.arrays["ids"].shape for one in made] == [(1, 5), (2, 3)]


def test_recorded_shape_of_no_input_is_refused() -> None:
    good = {"ids": (1, 4), "mask": (1, 4)}
    with pytest.raises(InputError, match=r"^--arrivals, line 3: shape of zz: model 'm' has no such input"):
        recorded(MODEL, {}, recording(good, good, {"zz": (1, 4)}, {"zz": (1, 4)}), None, 0)


def test_shapes_left_open_are_refused() -> None:
    with pytest.raises(InputError, match="has more free dimensions: give --shape"):
        list(mixed(MODEL, [{}], shapes={}, rows=None, distinct=1, seed=0))

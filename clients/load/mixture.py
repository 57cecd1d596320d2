"""What requests contain: the user's tensors, or made-up ones whose shapes follow a distribution.

Lives here: shapes drawn at random, and inputs that have them. Must not: send. Everything is determined by the seed. A
mixture is drawn once, before the load: requests then go round in it, so that making them costs nothing meanwhile.

A shape is written `1,128`; one of a range `1,16..512`; one of several, with weights, `1,16*3|1,512`. Inputs whose
shapes are written alike agree: in a request, a range has one size, and a choice falls on the same place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from paceline.clients.inputs import GivenTensor, InputError, RandomInputs, TypedInputs, prepare
from paceline.clients.load.recording import Recording, Shapes
from paceline.clients.messages import ModelMetadata

MOST_BYTES: Final = 256 * 2**20
"""How much a mixture may hold; beyond that, it has fewer requests."""

_LARGEST: Final = 2**40


@dataclass(frozen=True, slots=True)
class MixedShape:
    """Shapes with their weights; each size is a range, the least and the most."""

    weights: tuple[float, ...]
    choices: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def varies(self) -> bool:
        return len(self.choices) > 1 or any(low < high for low, high in self.choices[0])


def parse_mixed_shape(text: str) -> tuple[str, MixedShape]:
    """`NAME=SHAPE` as name and shape. Raises InputError."""
    name, separator, written = text.partition("=")
    try:
        if not separator or not name:
            raise ValueError
        choices = [_choice(choice) for choice in written.split("|")]
    except ValueError:
        raise InputError(
            f"--shape {text!r}: expected NAME=1,2,3, sizes like 16..512, or choices like 1,16*3|1,512"
        ) from None
    return name, MixedShape(tuple(weight for weight, _ in choices), tuple(sizes for _, sizes in choices))


def _choice(text: str) -> tuple[float, tuple[tuple[int, int], ...]]:
    sizes, star, weight = text.partition("*")
    parsed = tuple(_range(size) for size in sizes.split(",")) if sizes.strip() else ()
    number = float(weight) if star else 1.0
    if not 0 < number < float("inf"):
        raise ValueError
    return number, parsed


def _range(text: str) -> tuple[int, int]:
    low, dots, high = text.partition("..")
    bounds = int(low), int(high if dots else low)
    if not 0 <= bounds[0] <= bounds[1] <= _LARGEST:
        raise ValueError
    return bounds


def draw(shapes: Mapping[str, MixedShape], generator: np.random.Generator) -> dict[str, tuple[int, ...]]:
    """The shapes of a request."""
    place, sizes = generator.random(), {}

    def size(bounds: tuple[int, int]) -> int:
        if bounds not in sizes:
            sizes[bounds] = int(generator.integers(bounds[0], bounds[1] + 1))
        return sizes[bounds]

    drawn = {}
    for name, mixed_shape in shapes.items():
        below = np.cumsum(mixed_shape.weights) / sum(mixed_shape.weights)
        chosen = mixed_shape.choices[min(int(np.searchsorted(below, place, "right")), len(below) - 1)]
        drawn[name] = tuple(map(size, chosen))
    return drawn


def mixed(
    model: ModelMetadata,
    given: Sequence[Mapping[str, GivenTensor]],
    *,
    shapes: Mapping[str, MixedShape],
    rows: int | None,
    distinct: int,
    seed: int,
) -> Iterator[TypedInputs]:
    """The inputs of `distinct` requests, made as they are taken: `given` ones in turn, and the others made up; fewer if
    they had more than `MOST_BYTES`. Raises InputError."""

    def drawn() -> Iterator[tuple[str, Shapes]]:
        generator = np.random.default_rng(seed)
        while True:
            yield "--shape", draw(shapes, generator)

    return _made(model, given, drawn(), rows, distinct, seed)


def recorded(
    model: ModelMetadata, given: Mapping[str, GivenTensor], recording: Recording, rows: int | None, seed: int
) -> list[TypedInputs]:
    """The inputs of a request of each of its shapes. Raises InputError, also if that is more than `MOST_BYTES`."""
    most = len(recording.shapes)
    where = (f"--arrivals, line {line}: shape of" for line in recording.lines)
    made = list(_made(model, [given], zip(where, recording.shapes, strict=True), rows, most, seed))
    if len(made) < most:
        raise InputError(f"requests of all {most} recorded shapes have more than {MOST_BYTES >> 20} MiB")
    return made


def _made(
    model: ModelMetadata,
    given: Sequence[Mapping[str, GivenTensor]],
    shapes: Iterator[tuple[str, Shapes]],
    rows: int | None,
    most: int,
    seed: int,
) -> Iterator[TypedInputs]:
    """`shapes` have in front what says them, for errors."""
    room_bytes = MOST_BYTES
    for number in range(most):
        own = given[number % len(given)]
        needs_more = any(tensor.name not in own for tensor in model.inputs)
        option, chosen = next(shapes)
        random = RandomInputs(rows, chosen, seed + number, option) if needs_more or chosen else None
        one = prepare(model, own, random)
        room_bytes -= sum(array.nbytes for array in one.arrays.values())
        if number and room_bytes < 0:
            return
        yield one

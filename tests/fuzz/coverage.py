"""One target under atheris: `python -m tests.fuzz.coverage TARGET KEPT CORPUS [libFuzzer's flags]`."""

from __future__ import annotations

import random
import sys

import atheris

# The code whose coverage guides the run: our own, and the text formats' parsers, which are Python as well.
with atheris.instrument_imports(
    include=["server", "protos", "backends", "google.protobuf.text_format", "google.protobuf.json_format"],
    enable_loader_override=False,
):
    from tests.fuzz.judging import awake_s, judged, quiet
    from tests.fuzz.mutation import mutated
    from tests.fuzz.targets import target


_LIBFUZZERS_OWN = 0.4
"""The share of changes that libFuzzer makes: it knows which values the code compares with."""


def main() -> None:
    name = sys.argv[1]
    one = target(name)

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < _LIBFUZZERS_OWN:
            return bytes(atheris.Mutate(data, max_size))
        return mutated(name, chance, [data])[:max_size]

    def judge(data: bytes) -> None:
        judged(one, bytes(data), awake_s)

    atheris.Setup([sys.argv[0], *sys.argv[2:]], judge, custom_mutator=change)
    with quiet():
        atheris.Fuzz()


if __name__ == "__main__":
    main()

"""Both servers' answers to all calls, as text: `python -m tests.differential [WORD …]` for calls whose name has a
WORD."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.differential.calls import CALLS
from tests.differential.comparing import answer_of, differences
from tests.differential.pair import serving_both, shared_objects
from tests.differential.triton_process import missing


def main(words: list[str]) -> None:
    if reason := missing():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder, shared_objects(), serving_both(Path(folder)) as both:
        for call in CALLS:
            if not words or any(word in call.what for word in words):
                triton, here = answer_of(both.triton.channel, call), answer_of(both.here.channel, call)
                mark = "!" if differences(call, triton, here) else " "
                print(f"{mark} {call.rpc}: {call.what}\n      Triton: {triton}\n      here:   {here}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""The benchmark of handing requests over still works with the code that it drives."""

from __future__ import annotations

import pytest

from bench import handover


def test_handover_measures_every_size_of_tensor_and_burst(capsys: pytest.CaptureFixture[str]) -> None:
    handover.main(["--seconds", "0.01"])
    _, _, *rows = capsys.readouterr().out.splitlines()
    sizes = [tuple(int(cell) for cell in row.split("|")[1:3]) for row in rows]
    assert sizes == [(size, burst) for size in (64, 600_000) for burst in (1, 8, 32)]

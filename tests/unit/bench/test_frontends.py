from __future__ import annotations

from bench.frontends import Sample, table


def test_table_adds_up_cpu_time_of_engine_and_fronts() -> None:
    rounds = {
        ("tiny", 1): [Sample(1000, 300, 0), Sample(2000, 200, 0)],
        ("tiny", 2): [Sample(1500, 50, 250), Sample(2000, 70, 200)],
    }
    _, _, alone, fronts = table(rounds).splitlines()
    assert alone == "| tiny | 1 | 1500 (1000 to 2000) | 1.00 (1.00 to 1.00) | 250 (200 to 300) | 250 (200 to 300) |"
    assert fronts == "| tiny | 2 | 1750 (1500 to 2000) | 1.25 (1.00 to 1.50) | 285 (270 to 300) | 60 (50 to 70) |"

"""Where the status page's numbers come from, and how many are kept."""

from __future__ import annotations

from paceline.backends.generation_totals import GenerationTotals
from paceline.clients.snapshots import READ, parse, read
from paceline.server.telemetry.generation_metrics import generation_families
from paceline.server.telemetry.metrics import Metrics, VersionMetrics
from paceline.server.telemetry.model_statistics import VersionStatistics
from paceline.server.telemetry.status import StatusPage
from tests.unit.server.counting import Gauges, SequenceCounts, report, version


def test_numbers_are_those_that_scrapers_get() -> None:
    metrics = Metrics()
    metrics.add_collector(generation_families(metrics))
    metrics.set_health(True, 2)
    scorer = version("scorer", batcher=Gauges(4, slots=2, sequences=SequenceCounts(3, 1)))
    scorer.statistics.on_batch(report(3, [100, 2_000], infer_us=500))
    scorer.statistics.on_success(3_000_000, 90_000)
    scorer.statistics.on_failure(ValueError("no"), 5)
    totals = GenerationTotals()
    writer = VersionMetrics("writer", "1", VersionStatistics(generations=totals), Gauges(), open_requests=[1, 2],
        generations=totals)  # fmt: skip
    for one in (scorer, writer):
        metrics.add(one)
    scraped, own = parse(metrics.text().decode(), 1.0), read(metrics.some(READ), 1.0)
    assert own.models == scraped.models
    assert (own.ready, own.failed_models, own.began_s) == (1, 2, scraped.began_s)
    shown = own.models["scorer", "3"]
    assert (shown.slots, shown.sequences, shown.failures["OTHER"]) == (2, {"live": 3, "waiting": 1}, 1)
    assert (own.models["writer", "1"].running, own.models["writer", "1"].waiting) == (0, 2)


def test_page_has_the_last_sixty_intervals() -> None:
    metrics, shown = Metrics(), version()
    metrics.add(shown)
    page = StatusPage(metrics, "paceline")
    assert "no numbers yet" in page.text()
    for _ in range(70):
        page.look()
        shown.statistics.on_success(1_000)
    text = page.text()
    (points,) = [line for line in text.split("<figure>") if line.startswith("<figcaption>Requests/s ")]
    assert points.partition("points=")[2].partition("/>")[0].count(",") == 60

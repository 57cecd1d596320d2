"""How long an idle instance is kept waiting for company."""

from __future__ import annotations

from scheduler.company import Company


def after_batches_of(requests: int, *, count: int = 100) -> Company:
    company = Company()
    for _ in range(count):
        company.on_start(requests, 0)
        company.on_end(requests)
    return company


def test_company_of_nobody_is_not_waited_for() -> None:
    assert Company().patience(0, 0) == 0
    assert after_batches_of(1).patience(0, 0) == 0


def test_company_is_waited_for_the_longer_the_larger_batches_have_been() -> None:
    waited = [after_batches_of(requests).patience(1, 0) for requests in (1, 2, 3, 8, 64)]
    assert waited == sorted(waited)
    assert 0 == waited[0] < waited[1] < waited[2] < waited[3] <= 60


def test_company_that_is_all_there_is_not_waited_for() -> None:
    company = after_batches_of(8)
    assert company.patience(7, 0)
    assert not company.patience(8, 0)


def test_company_executing_and_waiting_counts_as_there() -> None:
    company = after_batches_of(4)
    company.on_start(4, waiting=4)
    company.on_end(4)
    assert company.patience(5, 0)
    assert not company.patience(8, 0)


def test_company_that_has_gone_is_forgotten() -> None:
    company = after_batches_of(64)
    for _ in range(300):
        company.on_start(1, 0)
        company.on_end(1)
    assert company.patience(0, 0) == 0


def test_company_that_keeps_coming_is_not_waited_for_without_end() -> None:
    company = after_batches_of(64)
    iterations = next(count for count in range(10_000) if not company.patience(1, count))
    assert 0 < iterations <= 400

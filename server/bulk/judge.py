"""When rows at fault end a job.

Lives here: this decision, and its words. Must not: find or record such rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.server.bulk.settings import BulkSettings
from paceline.server.bulk.tally import Tally
from paceline.server.bulk.values import BadRow, BulkError, Source, Unit

__all__ = ["Judge"]


class Judge:
    """By what `settings` allow, and what `tally` has counted so far."""

    def __init__(self, settings: BulkSettings, tally: Tally, source: Source) -> None:
        self._settings, self._tally, self._source = settings, tally, source

    def __call__(self, unit: Unit, bad: Sequence[BadRow]) -> None:
        """Raises BulkError if the job ends because of rows at fault, of which `bad` are new."""
        if not bad:
            return
        settings, tally = self._settings, self._tally
        file, row = self._source.place(unit.file, bad[0].number)
        if settings.fails_on_bad:
            raise BulkError(f"{file}, row {row}: {bad[0].reason}")
        count, read = tally.rows_bad_before + tally.rows_bad, tally.rows_before + tally.rows_read
        if settings.max_bad.is_exceeded(count, read):
            raise BulkError(
                f"more rows are at fault than the {settings.max_bad} of --max-bad; one of them, "
                f"{file}, row {row}: {bad[0].reason}"
            )

"""All calls, in the order in which they are made."""

from __future__ import annotations

from tests.differential import calls_infer, calls_loads, calls_models, calls_settings

__all__ = ["CALLS", "HARMFUL"]

CALLS = [*calls_infer.CALLS, *calls_settings.CALLS, *calls_models.CALLS, *calls_loads.CALLS]
HARMFUL = calls_infer.HARMFUL

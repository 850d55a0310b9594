"""What a request gets that is turned away: 429, and when it had better come again."""

from __future__ import annotations

import math

from http_api.errors import RequestError
from router.admission.drain_rate import LONGEST_RETRY
from router.prediction.slo import SLO, Prediction


def slo_not_met(slo: SLO, late: float, prediction: Prediction | None) -> RequestError:
    """It would be so many seconds late everywhere. `prediction`: what is expected where it would be so the least."""
    seconds = min(max(math.ceil(late), 1), LONGEST_RETRY)
    expected = ""
    if prediction is not None:
        expected = f"; {prediction.ttft.expected:.2f} s and {1000 * prediction.tpot.expected:.0f} ms are expected now"
    return RequestError(
        f"No worker would keep what was promised, {slo.in_words}{expected}. Try again in {seconds} s.",
        status=429,
        type="rate_limit_error",
        code="promise_not_kept",
        retry_after=seconds,
    )


def too_many(code: str, waiting: int, seconds: int) -> RequestError:
    """All workers are busy, and so many requests wait already. It may come again after so many seconds."""
    return RequestError(
        f"All workers are busy, and {waiting} requests wait. Try again in {seconds} s.",
        status=429,
        type="rate_limit_error",
        code=code,
        retry_after=seconds,
    )

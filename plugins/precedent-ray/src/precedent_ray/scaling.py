"""How many replicas are wanted: by the requests that run, and by how long one waits for memory."""

from __future__ import annotations

import math
from typing import Any

QUEUE_SECONDS = "queue_seconds"
"""What each replica reports: how long its first waiting request has waited."""


class Scaling:
    """An autoscaling policy; Ray applies the bounds and the delays to what it returns."""

    def __init__(self, target_ongoing_requests: float, target_queue_seconds: float) -> None:
        self._requests, self._seconds = target_ongoing_requests, target_queue_seconds

    def __call__(self, now: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas wanted, by Ray's `AutoscalingContext`.

        Enough for the requests, and one more while some replica's queue is too long.

        A queue that is long at few requests means long answers, whose keys and values fill the memory.
        """
        wanted = max(1, math.ceil(now.total_num_requests / self._requests))
        waits = (now.aggregated_metrics or {}).get(QUEUE_SECONDS) or {}
        if any(seconds > self._seconds for seconds in waits.values()):
            wanted = max(wanted, now.current_num_replicas + 1)
        return wanted, {}

"""Prompts are prepared on a few threads: whose takes too long is told so, and who waited for a thread is not blamed."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing

import pytest

from precedent_server.errors import ApiError
from precedent_server.serving import PREPARING_THREADS, Serving
from precedent_server.settings import ServerLimits


async def test_who_is_too_slow_and_who_only_waited() -> None:
    enough = threading.Event()
    with closing(Serving({}, ServerLimits(prepare_seconds=0.2))) as serving:
        jobs = [serving.prepared(enough.wait) for _ in range(PREPARING_THREADS + 1)]
        errors = await asyncio.gather(*jobs, return_exceptions=True)
        enough.set()
    assert [error.status for error in errors if isinstance(error, ApiError)] == [400] * PREPARING_THREADS + [503]


async def test_a_result_that_nobody_waits_for_is_disposed_of() -> None:
    enough, disposed = threading.Event(), asyncio.Event()
    with closing(Serving({}, ServerLimits(prepare_seconds=0.05))) as serving:
        with pytest.raises(ApiError, match="longer than"):
            await serving.prepared(lambda: enough.wait() and 7, lambda result: disposed.set())
        enough.set()
        await disposed.wait()

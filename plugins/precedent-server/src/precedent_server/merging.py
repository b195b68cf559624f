"""Several streams as one, in the order in which their items come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

Item = TypeVar("Item")


async def merged(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncIterator[Item]:
    """The items of all streams; the first error ends all, and leaving early closes all."""
    if len(streams) == 1:  # no queue between a stream and its only reader
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    items: asyncio.Queue[Item | None] = asyncio.Queue()
    reading = asyncio.create_task(_read_all(streams, items))
    try:
        while (found := await items.get()) is not None:
            yield found
        await reading
    finally:
        reading.cancel()


async def _read_all(streams: Sequence[AsyncGenerator[Any, None]], items: asyncio.Queue[Any]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(_read(stream, items))
    except BaseExceptionGroup as error:
        raise error.exceptions[0] from None
    finally:
        items.put_nowait(None)


async def _read(stream: AsyncGenerator[Any, None], items: asyncio.Queue[Any]) -> None:
    async with aclosing(stream) as each:
        async for item in each:
            items.put_nowait(item)

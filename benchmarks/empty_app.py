"""An application that streams two lines, as little as a server can do: what is measured on it is not ours."""

from __future__ import annotations

from collections.abc import AsyncIterator

from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route


async def two_lines(_: Request) -> StreamingResponse:
    """Two events."""

    async def lines() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


empty = Starlette(routes=[Route("/", two_lines)])


@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0.5})
@serve.ingress(empty)
class Empty:
    """Serves `empty`."""


app = Empty.bind()

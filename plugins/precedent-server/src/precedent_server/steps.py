"""A step under the microscope, for administrators of a server started with `--inspect`.

Rejected candidates are words of other requests, of other tenants too: a key of one tenant alone must not read them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from precedent.decoding.microscope import SeenStep
from precedent.pages.colours import Palette
from precedent.pages.tree_picture import SeenTree, tree_svg
from precedent_server.errors import ApiError
from precedent_server.keys import Caller
from precedent_server.serving import Served, Serving

KEPT_STEPS = 32


async def last_steps(serving: Serving, caller: Caller, request: Request) -> Response:
    """The last steps of a model, newest first, each with its tree as a picture and as a list."""
    served = serving.model(request.query_params.get("model", next(iter(serving.models))))
    if served.microscope is None:
        raise ApiError("no steps are kept: start the server with --inspect", status=404)
    shown = await serving.prepared(partial(_shown, served, served.microscope.steps()))
    return JSONResponse({"steps": shown}, headers={"Cache-Control": "no-store"})


def _shown(served: Served, steps: list[SeenStep]) -> list[dict[str, Any]]:
    palette = Palette()
    return [_step(step, served, palette) for step in steps]


def _step(step: SeenStep, served: Served, palette: Palette) -> dict[str, Any]:
    seen = SeenTree(step.tree, step.path, step.before, step.estimates)

    def text(token_ids: Any) -> str:
        return str(served.engine.tokenizer.decode(list(token_ids)))

    return {
        "number": step.number,
        "before": text(step.before),
        "next": text([step.next_token]),
        "num_accepted": len(step.path),
        "expected_tokens": round(step.expected_tokens, 3),
        "picture": tree_svg(seen, text, palette),
        "nodes": [_node(seen, node, text([token])) for node, token in enumerate(step.tree.token_ids)],
    }


def _node(seen: SeenTree, node: int, text: str) -> dict[str, Any]:
    """One candidate; a sample of the draft model has no estimates: it was drawn, not chosen."""
    chance = seen.path_probability(node)
    return {
        "text": text,
        "parent": seen.tree.parents[node],
        "sources": list(seen.tree.sources[node]),
        "estimate": round(seen.estimates[node], 4) if node < len(seen.estimates) else None,
        "path_probability": None if chance is None else round(chance, 4),
        "accepted": node in seen.path,
    }

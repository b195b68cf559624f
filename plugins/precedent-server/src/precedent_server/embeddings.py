"""`POST /v1/embeddings`: vectors of the cache's embedder."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from typing import Any

from openai.types import CreateEmbeddingResponse, Embedding
from openai.types.embedding_create_params import EmbeddingCreateParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from precedent.cache import SpeculationCache
from precedent.cache.embedder import embed_all
from precedent.errors import PrecedentError
from precedent.runtime.plain_values import check_plain
from precedent_server.bodies import Keys, checked, parsed
from precedent_server.errors import ApiError, api_error
from precedent_server.keys import Caller
from precedent_server.serving import Serving
from precedent_server.settings import MOST_BODY_BYTES
from precedent_server.transport import read_body, unless_gone

KEYS = Keys(
    EmbeddingCreateParams,
    required=("model", "input"),
    supported=("input", "model", "encoding_format", "dimensions"),
    own={"input": str | list[str]},
)

MOST_TEXTS = 256

MOST_CHARACTERS = 32_768
"""Of one text; embedders read no more of it than some hundred tokens."""


class AnyEmbedding(Embedding):
    """A vector, or base64 of its 32-bit floats."""

    embedding: list[float] | str  # type: ignore[assignment]


class Embeddings(CreateEmbeddingResponse):
    """An answer, in either `encoding_format`."""

    data: list[AnyEmbedding]  # type: ignore[assignment]


async def embeddings(serving: Serving, caller: Caller, request: Request) -> Response:
    """The vectors of some texts."""
    serving.rates.take_request(caller)
    most = serving.limits.max_body_bytes or MOST_BODY_BYTES
    said = await read_body(request, serving, lambda raw: checked(parsed(raw), KEYS), most)
    with serving.taken(caller.name):
        embedded = serving.prepared(partial(_embedded, serving.cache_of(said["model"]), said))
        answer = await unless_gone(request, serving.limits, embedded)
        serving.take_prompt(caller, answer["usage"]["prompt_tokens"])
        return JSONResponse(answer)


def _embedded(cache: SpeculationCache | None, said: dict[str, Any]) -> dict[str, Any]:
    texts = [said["input"]] if isinstance(said["input"], str) else said["input"]
    vectors, packed = vectors_of(cache, texts, said.get("dimensions")), said.get("encoding_format") == "base64"
    written = [base64.b64encode(one.tobytes()).decode() if packed else one.tolist() for one in vectors]
    tokens = sum(len(text.split()) for text in texts)
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(written)],
        "model": said["model"],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def vectors_of(cache: SpeculationCache | None, texts: Sequence[str], dimensions: int | None = None) -> list[Any]:
    """The vectors of some texts by the embedder of a cache. Raises ApiError that names the key."""
    if not 1 <= len(texts) <= MOST_TEXTS or not all(texts):
        raise ApiError(f"input must be 1 to {MOST_TEXTS} texts, none of them empty", param="input")
    if max(map(len, texts)) > MOST_CHARACTERS:
        raise ApiError(f"a text of input has more than {MOST_CHARACTERS} characters: split it", param="input")
    if cache is None:
        raise ApiError(
            "the model is served without a cache, and so without an embedder: start the server with --cache FOLDER",
            status=404, param="model", code="unsupported_value",
        )  # fmt: skip
    embedder = cache.embedder
    if dimensions not in (None, embedder.dimension):
        raise ApiError(f"the embedder's vectors have {embedder.dimension} dimensions", param="dimensions")
    try:
        check_plain("input", texts)
        return list(embed_all(embedder, texts))
    except PrecedentError as error:
        raise api_error(error, KEYS.known) from error

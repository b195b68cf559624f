"""Settings of requests that give none: OpenAI's, or those that the checkpoint recommends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers.model_stores import OllamaStore
from transformers import GenerationConfig

from precedent.engine.options import EngineOptions
from precedent_server.app import server_app
from precedent_server.serving import opened
from precedent_server.settings import ServerLimits
from precedent_testing.tiny_gguf import write_gguf
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

ROUTES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "Where?"}]}, "max_tokens"),
    "/v1/completions": ({"prompt": "Where?"}, "max_tokens"),
    "/v1/responses": ({"input": "Where?"}, "max_output_tokens"),
}


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, httpx.AsyncClient]]:
    """Clients by `--sampling`; the model recommends the likeliest token, which makes its answers recognisable."""
    model, folder = tiny_causal_lm(dtype=torch.float32, max_position_embeddings=256), tmp_path_factory.mktemp("model")
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.8, top_k=1, repetition_penalty=1.5)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    with ExitStack() as held:
        found = dict[str, httpx.AsyncClient]()
        for sampling in ("model", "precedent"):
            serving = held.enter_context(
                opened({"tiny": str(folder)}, EngineOptions(device="cpu"), ServerLimits(), sampling=sampling)  # type: ignore[arg-type]
            )
            transport = httpx.ASGITransport(server_app(serving))
            found[sampling] = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")
        yield found


async def text_of(client: httpx.AsyncClient, route: str, **given: Any) -> str:
    body, limit = ROUTES[route]
    answer = await client.post(route, json={"model": "tiny", limit: 16, **body, **given})
    assert answer.status_code == 200, answer.text
    said = answer.json()
    if "output" in said:
        return str(said["output"][0]["content"][0]["text"])
    (choice,) = said["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


async def test_requests_that_give_no_settings_sample_as_the_operator_chose(clients: dict[str, Any]) -> None:
    own = {"temperature": 0, "top_k": -1, "repetition_penalty": 1}
    for route in ROUTES:
        client = clients["model"]
        recommended = [await text_of(client, route) for _ in range(2)]
        plain = await text_of(client, route, temperature=0)
        greedy = await text_of(clients["precedent"], route, temperature=0)
        usual = {await text_of(clients["precedent"], route) for _ in range(4)}
        assert recommended == [plain] * 2, "the likeliest token, under the recommended penalty"
        assert plain != greedy, "the penalty holds for requests that give a temperature alone"
        assert len(usual) > 1, "OpenAI's temperature 1; two of them may end at once"
        if route != "/v1/responses":
            assert await text_of(client, route, **own) == greedy, "what a request gives goes first"
            unfiltered = {await text_of(client, route, top_k=-1) for _ in range(4)}
            assert len(unfiltered) > 1, "-1 switches the recommended top_k off"


@pytest.mark.parametrize("route", ROUTES)
async def test_an_answer_longer_than_the_context_is_refused_and_one_that_fills_it_ends_with_length(
    clients: dict[str, Any], route: str
) -> None:
    (body, limit), client = ROUTES[route], clients["precedent"]
    longest = (await client.get("/v1/models")).json()["data"][0]["max_model_len"]
    for number in (longest + 1, 10**9, 10**30):
        refused = await client.post(route, json={"model": "tiny", **body, limit: number})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, limit)
        assert "context" in error["message"] or number > 2**63
    ends = byte_tokenizer().all_special_ids
    never_ends = {} if route == "/v1/responses" else {"logit_bias": {str(token): -100 for token in ends}}
    answer = await client.post(route, json={"model": "tiny", **body, limit: longest, **never_ends})
    usual = await client.post(route, json={"model": "tiny", **body})
    assert (answer.status_code, usual.status_code) == (200, 200), (answer.text, usual.text)
    if never_ends:
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert answer.json()["usage"]["total_tokens"] == longest


def test_under_ollamas_names_what_the_store_keeps_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request's own limit goes first, the operator's choice as well."""
    model = tiny_causal_lm(dtype=torch.float32, vocab_size=260, max_position_embeddings=256)
    file = write_gguf(tmp_path / "tiny.gguf", model, byte_tokenizer((("t", "h"),)))
    store = OllamaStore(tmp_path / "ollama")
    store.add("registry.ollama.ai/library/tiny/latest", file, params={"top_k": 5, "num_predict": 7, "stop": "zz"})
    monkeypatch.setenv("OLLAMA_MODELS", str(store.folder))
    for sampling, settings in (
        (None, {"temperature": 0.8, "top_k": 5, "max_tokens": 7, "stop": ("zz",)}),
        ("precedent", {"temperature": 1.0, "max_tokens": 100}),
    ):
        with opened({"tiny": "tiny:latest"}, EngineOptions(device="cpu"), ServerLimits(), sampling=sampling) as serving:  # type: ignore[arg-type]
            served = serving.models["tiny"]
            assert served.settings_of({}, 100) == settings
            assert served.settings_of({"max_tokens": 3}, 100) == settings | {"max_tokens": 3}

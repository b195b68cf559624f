"""`/tokenize` and `/detokenize`, and the prompts of `/v1/completions` scored with `echo`: what evaluations ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from precedent_server.keys import KeyFile, add_key
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TEXTS = "/v1/completions"
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
HELLO = [{"role": "user", "content": "Hello <|im_end|>?"}]


@pytest.mark.parametrize(
    "asked",
    [{"prompt": "Grüße, <|im_end|>"}, {"prompt": "x", "add_special_tokens": False, "return_token_strs": True}],
    ids=["text", "strings"],
)
async def test_a_text_and_its_tokens(client: Any, asked: dict[str, Any]) -> None:
    engine = client.serving.models["scripted"].engine
    told = (await client.post("/tokenize", json=asked)).json()
    assert told["tokens"] == engine.tokenizer.encode(asked["prompt"])
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), engine.context_length)
    strings = engine.tokenizer.convert_ids_to_tokens(told["tokens"]) if "return_token_strs" in asked else None
    assert told["token_strs"] == strings
    text = (await client.post("/detokenize", json={"model": "scripted", "tokens": told["tokens"]})).json()
    assert text == {"prompt": asked["prompt"]}


async def test_a_conversation_has_the_tokens_with_which_it_is_asked(client: Any) -> None:
    chat = {"model": "scripted", "messages": HELLO, "tools": [TOOL]}
    told = (await client.post("/tokenize", json=chat)).json()
    answer = (await client.post("/v1/chat/completions", json={**chat, "max_tokens": 1})).json()
    assert told["count"] == answer["usage"]["prompt_tokens"]
    ended = (await client.post("/tokenize", json={**chat, "add_generation_prompt": False})).json()
    opening = told["tokens"][ended["count"] :]
    assert told["tokens"][: ended["count"]] == ended["tokens"]
    assert (await client.post("/detokenize", json={"tokens": opening})).json()["prompt"] == "<|im_start|>assistant\n"


def plain_logprobs(token_ids: list[int]) -> torch.Tensor:
    """Those of every next token, by one forward of the model alone, `[tokens, vocab_size]`."""
    return tiny_causal_lm("llama", seed=21)(torch.tensor([token_ids])).logits[0].detach().log_softmax(-1)


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("kind", ["text", "texts", "ids", "lists of ids"])
async def test_an_echoed_prompt_has_the_log_probabilities_of_a_plain_forward(
    tiny: Any, max_tokens: int, kind: str
) -> None:
    texts = ["look up order 17, then order 18" * 10, "Zoë"]
    ids = [byte_tokenizer().encode(text) for text in texts]
    prompt = {"text": texts[0], "texts": texts, "ids": ids[0], "lists of ids": ids}[kind]
    body = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0}
    answer = await tiny.post(TEXTS, json=body)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    prompts = ids[: 2 if kind in ("texts", "lists of ids") else 1]
    assert len(told["choices"]) == len(prompts)
    for choice, token_ids, text in zip(told["choices"], prompts, texts, strict=False):
        logprobs, length = choice["logprobs"], len(token_ids)
        assert choice["text"].startswith(text)
        assert (len(logprobs["tokens"]), choice["finish_reason"]) == (length + max_tokens, "length")
        assert logprobs["text_offset"][0] == 0
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        expected = plain_logprobs(token_ids)[:-1]
        own = expected.gather(1, torch.tensor(token_ids[1:]).unsqueeze(1)).squeeze(1).tolist()
        assert logprobs["token_logprobs"][1:length] == pytest.approx(own, abs=1e-6)
        best = expected.topk(2).values.tolist()
        assert [max(top.values()) for top in logprobs["top_logprobs"][1:length]] == pytest.approx(
            [values[0] for values in best], abs=1e-6
        )
    assert told["usage"]["completion_tokens"] == max_tokens * len(prompts)


async def test_an_echo_without_log_probabilities(tiny: Any) -> None:
    body = {"model": "tiny", "prompt": byte_tokenizer().encode("order"), "echo": True, "max_tokens": 0}
    (choice,) = (await tiny.post(TEXTS, json=body)).json()["choices"]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == ("order", None, "length")
    streamed = (await tiny.post(TEXTS, json={**body, "max_tokens": 2, "stream": True})).text
    assert streamed.startswith("data: ")
    assert '"text":"order"' in streamed.partition("\n")[0]


async def test_a_scored_prompt_is_no_answer_to_propose_again(serve: Any) -> None:
    client = serve(lambda prompt: "An answer that would be stored.", may_stray=True)
    cache = client.serving.models["scripted"].engine.cache
    body = {"model": "scripted", "prompt": "Where?", "echo": True, "logprobs": 0}
    assert (await client.post(TEXTS, json=body)).status_code == 200
    assert cache.stats().records == 0


async def test_the_special_tokens_and_the_chat_template(client: Any) -> None:
    told = (await client.get("/tokenizer_info", params={"model": "scripted"})).json()
    tokenizer = client.serving.models["scripted"].engine.tokenizer
    assert (told["eos_token"], told["chat_template"]) == (tokenizer.eos_token, tokenizer.chat_template)


async def test_keys_guard_the_routes(serve: Any, path: Path) -> None:
    add_key(path, "desk", "shop")
    client = serve(["x"], keys=KeyFile(path))
    for route, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        assert (await client.post(route, json=body)).status_code == 401

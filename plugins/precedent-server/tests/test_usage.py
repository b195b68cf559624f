"""What `/metrics` says of keys: counts that agree with answers, a bounded number of names, nothing of other keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from precedent_server.keys import Caller, KeyFile, add_key, revoke_key
from precedent_server.prometheus import for_key, usage_text
from precedent_server.usage import OTHER, KeyUsage

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "model": "scripted",
    "messages": [{"role": "user", "content": "one two three"}],
    "temperature": 0,
}


def of_keys(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if line.startswith("precedent:key_")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def test_counts_of_a_key_are_those_of_its_answers(serve: Any, path: Path) -> None:
    tenant = 'a "shop"\\'
    desk, boss = add_key(path, "desk", tenant), add_key(path, "boss", "house", "admin")
    headers = {"Authorization": f"Bearer {desk}"}
    client = serve(lambda prompt: "a b c d e f g h", keys=KeyFile(path))
    found = [(await client.post(CHAT, json=ASKED, headers=headers)).json() for _ in range(2)]
    await client.post(CHAT, json=ASKED | {"n": 0}, headers=headers)
    async with client.stream("POST", CHAT, json=ASKED | {"stream": True}, headers=headers) as streamed:
        await streamed.aread()
    await client.get("/no/such/route", headers=headers)
    text = (await client.get("/metrics", headers={"Authorization": f"Bearer {boss}"})).text
    labels, counts = 'key="desk",tenant="a \\"shop\\"\\\\"', of_keys(text)
    usage, drafted = found[1]["usage"], found[1]["speculation"]  # the stream is the same answer once more
    assert counts[f'precedent:key_requests_total{{{labels},status="2xx"}}'] == 3
    assert counts[f'precedent:key_requests_total{{{labels},status="4xx"}}'] == 1
    written = counts[f"precedent:key_generation_tokens_total{{{labels}}}"]
    assert written == 3 * usage["completion_tokens"]
    assert counts[f"precedent:key_prompt_tokens_total{{{labels}}}"] == 3 * usage["prompt_tokens"]
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in found]
    assert counts[f"precedent:key_cached_prompt_tokens_total{{{labels}}}"] >= sum(cached)
    for name, of_engine in (("draft", "draft"), ("accepted", "accepted")):
        (total,) = re.findall(rf"vllm:spec_decode_num_{of_engine}_tokens_total\{{.*\}} (\d+)", text)
        assert counts[f"precedent:key_{name}_tokens_total{{{labels}}}"] == int(total)
    assert drafted["num_accepted_tokens"] > 0, "something was drafted, or the counts above are all zero"


async def test_a_key_sees_itself_alone_and_an_administrator_all(serve: Any, path: Path) -> None:
    roles = {"desk": "use", "rival": "read-cache", "boss": "admin"}
    keys = {name: {"Authorization": f"Bearer {add_key(path, name, name, role)}"} for name, role in roles.items()}
    client = serve(lambda prompt: "x", keys=KeyFile(path))
    for headers in keys.values():
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
    for name, seen in (("desk", {"desk"}), ("rival", {"rival"}), ("boss", set(roles))):
        text = (await client.get("/metrics", headers=keys[name])).text
        assert set(re.findall('[{,]key="(.*?)"', text)) == seen
        assert "vllm:request_success_total" in text
    revoke_key(path, "rival")
    text = (await client.get("/metrics", headers=keys["boss"])).text
    assert 'key="rival"' not in text


def test_names_are_bounded_and_the_rest_is_counted_together() -> None:
    owners = {(f"key-{number}", "shop") for number in range(10)} | {(OTHER, "shop")}
    usage = KeyUsage(lambda: owners, most=3)

    def ask(*names: str) -> dict[str, int]:
        for name in names:
            usage.of(Caller(name, "shop", "use"))["prompt_tokens"] += 1
        return {key: counts["prompt_tokens"] for (key, _), counts in usage.counts()}

    assert ask(OTHER) == {OTHER: 1}
    assert ask("key-0", "key-1", "key-2", "key-3", "key-4", "key-0") == {"key-0": 2, "key-1": 1, "key-2": 1, OTHER: 3}
    owners.remove(("key-1", "shop"))
    assert ask("key-4") == {"key-0": 2, "key-2": 1, "key-4": 1, OTHER: 3}, "a key that left makes room for another"
    assert ask("key-5") == {"key-0": 2, "key-2": 1, "key-4": 1, OTHER: 4}


def test_names_that_imitate_labels_hide_nothing_and_show_nothing() -> None:
    """A tenant's name may be any printable text, also in the metrics of all replicas."""
    owners = {("desk", 'x",key="rival'), ("rival", '{key="desk"}')}
    usage = KeyUsage(lambda: owners)
    for name, tenant in owners:
        usage.of(Caller(name, tenant, "use"))["2xx"] += 1
    text = usage_text(usage.counts())
    for told in (text, re.sub("(?m)^([^#{]+)[{]", r'\1{replica="a",', text)):
        for name, other in (("desk", "rival"), ("rival", "desk")):
            seen = [line for line in for_key(told, name).splitlines() if not line.startswith("#")]
            assert len(seen) == 6
            assert not [line for line in seen if f'{{key="{other}",' in line or f',key="{other}",tenant=' in line]

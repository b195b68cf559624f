"""The last steps, for administrators of a server that keeps them."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

ANSWER = "Order 1042 was sent on Monday."
HOSTILE = "<script>alert(1)</script> & more"


async def ask(client: Any, text: str = "Where?") -> None:
    messages = [{"role": "user", "content": text}]
    body = {"model": "scripted", "messages": messages, "temperature": 0, "max_tokens": 100}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


async def test_a_server_keeps_no_steps_by_itself(client: Any) -> None:
    answer = await client.get("/dashboard/steps")
    assert (answer.status_code, "--inspect" in answer.json()["error"]["message"]) == (404, True)


@pytest.mark.parametrize("text", [ANSWER, HOSTILE])
async def test_steps_retell_the_answer(serve: Any, text: str) -> None:
    client = serve(lambda prompt: text, kept_steps=100)
    await ask(client)
    await ask(client)
    steps = (await client.get("/dashboard/steps", params={"model": "scripted"})).json()["steps"]
    assert [step["number"] for step in steps] == list(range(len(steps), 0, -1))
    newest = steps[0]
    accepted = [node for node in newest["nodes"] if node["accepted"]]
    assert len(accepted) == newest["num_accepted"] > 3
    assert "".join(node["text"] for node in accepted) in text + "<|im_end|>"
    assert {node["sources"][0] for node in accepted} == {"recall"}
    for node in newest["nodes"]:
        above = 1.0 if node["parent"] < 0 else newest["nodes"][node["parent"]]["path_probability"]
        assert node["path_probability"] == pytest.approx(above * node["estimate"], abs=2e-4)
    drawn = "".join(ElementTree.fromstring(newest["picture"]).itertext())
    assert "".join(node["text"] for node in accepted)[:20].replace(" ", "·") in drawn


async def test_only_the_last_steps_are_kept(serve: Any) -> None:
    client = serve(lambda prompt: ANSWER, kept_steps=2)
    for _ in range(3):
        await ask(client)
    assert len((await client.get("/dashboard/steps")).json()["steps"]) == 2

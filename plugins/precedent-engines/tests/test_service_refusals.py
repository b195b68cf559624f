"""What a drafting service refuses by name, and that a refused request loses nothing."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.services import END, Serve, added, store

from precedent.drafters import DrawSession, Request
from precedent.errors import (
    CacheError,
    ConfigError,
    ContextOverflowError,
    PrecedentError,
    PromptError,
    UnsupportedError,
)
from precedent.tree import TreeBuilder

ORDER = [40, 41, 42, 43, 44, 45, END]
ASKED: dict[str, Any] = {"tenant": "north", "query": "an order", "end_token_ids": [END]}
LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    ("error", "says", "arguments"),
    [
        (PromptError, "the prompt is empty", {"prompt_ids": []}),
        (PromptError, "the prompt's ids must be token ids, not 'words'", {"prompt_ids": "words"}),
        (PromptError, "must be token ids", {"prompt_ids": [1, 2.5]}),
        (PromptError, "the prompt's ids hold -4", {"prompt_ids": [1, -4]}),
        (PromptError, "the prompt's ids hold 2147483648", {"prompt_ids": [2**31]}),
        (ContextOverflowError, "the prompt is too long: 64 tokens, the context holds 64", {"prompt_ids": [1] * 64}),
        (ContextOverflowError, "the prediction has 63 tokens.*room for 62", {"prediction": [1] * 63}),
        (ContextOverflowError, "the prediction has 1000000 characters", {"prediction": LONG}),
        (PromptError, "the prediction's ids must be token ids", {"prediction": [None]}),
        (PromptError, "the end tokens must be token ids", {"end_token_ids": [None]}),
        (CacheError, "the tenant's name is empty", {"tenant": ""}),
        (CacheError, "the tenant's name has 1000000 characters", {"tenant": LONG}),
        (CacheError, "not printable", {"tenant": "a\x00"}),
        (ConfigError, "request_id=7 must be a text", {"request_id": 7}),
        (ConfigError, "query=None must be a text", {"query": None}),
        (ConfigError, "has no text of its own", {"templates": ["{a}"]}),
    ],
)
def test_bad_requests_are_refused_by_name_and_lose_nothing(
    serve: Serve, error: type[PrecedentError], says: str, arguments: dict[str, Any]
) -> None:
    service = serve(context_length=64)
    store(service, ORDER)
    running = service.begin("first", [1, 2], **ASKED)
    with pytest.raises(error, match=says):
        service.begin(**{"request_id": "a", "prompt_ids": [1, 2], **ASKED, **arguments})
    assert running.chain(16) == ORDER
    assert service.begin("a", [1, 2], **ASKED).chain(16) == ORDER


@pytest.mark.parametrize("wrong", [[1, "2"], [-1], [2**31], None, 5, [[1]], object()])
def test_what_is_no_token_id_is_not_taken_over(serve: Serve, wrong: Any) -> None:
    service = serve()
    store(service, ORDER)
    session = service.begin("a", [1, 2], **ASKED)
    with pytest.raises(PromptError, match="the committed tokens"):
        session.committed(wrong)
    assert session.chain(16) == ORDER


@pytest.mark.parametrize("most", [-1, 1.5, True, None, "3"])
def test_a_number_of_tokens_is_a_whole_one(serve: Serve, most: Any) -> None:
    session = serve().begin("a", [1, 2])
    for draft in (session.chain, session.tree):
        with pytest.raises(ConfigError, match="must be a whole number of 0 or more"):
            draft(most)


@pytest.mark.parametrize(
    ("says", "settings"),
    [
        ("no drafter is called 'recal'", {"drafters": ("recal",)}),
        ("'draft-model' needs a target model", {"drafters": ("prompt", "draft-model")}),
        ("'grammar' needs a target model", {"drafters": ("grammar",)}),
        ("is one text", {"drafters": "recall"}),
        ("must give milliseconds by width", {"cost": {}}),
        ("must give milliseconds by width", {"cost": {0: 1.0}}),
        ("must give milliseconds by width", {"cost": {1: -1.0}}),
        ("must give milliseconds by width", {"cost": 5}),
        ("context_length=0", {"context_length": 0}),
        ("leave it out", {"embedder": "some-model"}),
    ],
)
def test_wrong_settings_are_refused(serve: Serve, says: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=says):
        serve(**settings)


class Sampling(DrawSession):
    """A drafter whose sessions would sample."""

    name, behind = "sampling", 0

    def begin(self, request: Request) -> Sampling:
        return self

    def draw(self, builder: TreeBuilder, number: int, rng: Any) -> None:
        raise AssertionError

    def committed(self, token_ids: Any) -> None:
        raise AssertionError

    def end(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_drafter_that_samples_is_refused_by_name(serve: Serve) -> None:
    with pytest.raises(UnsupportedError, match="'sampling' samples from a model"):
        added(serve(), Sampling()).begin("a", [1], tenant="t")

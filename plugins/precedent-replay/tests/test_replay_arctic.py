"""The baseline `arctic`: with a stand-in for its package, and against the package itself where it is installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest

from precedent.drafters.matching.token_index import TokenIndex
from precedent.errors import UnsupportedError
from precedent_replay import arctic
from precedent_replay.baselines import suffix_tree
from precedent_replay.pool import Answer, Pool
from precedent_replay.run import Settings, replay
from precedent_replay.turns import Turn
from precedent_testing.tiny_models import byte_tokenizer


def names(path: Path, **settings: Any) -> list[str]:
    """Who took part in a replay of one short run."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello hello"}]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    return list(replay([path], [], byte_tokenizer(), None, Settings(**settings)).reports)


def turn(prompt: Sequence[int], answer: Sequence[int] = ()) -> Turn:
    """A turn of bare ids."""
    return Turn(0, "t", "g", tuple(prompt), tuple(answer), "", False, "")


def pool_of(*answers: Sequence[int]) -> Pool:
    """A pool of bare ids."""
    pool = Pool(None)
    for number, answer in enumerate(answers):
        pool.add(Answer(number, "g", tuple(answer), "", ""))
    return pool


class FakeCache:
    """Answers every context with what followed its last token in some cached text, and notes what it holds."""

    made: ClassVar[list[FakeCache]] = []

    def __init__(self, max_tree_depth: int, max_cached_requests: int) -> None:
        assert (max_tree_depth, max_cached_requests) == (64, -1)
        self.texts: dict[object, list[int]] = {}
        self.active: set[object] = set()
        self.asked: dict[str, object] = {}
        FakeCache.made.append(self)

    def start_request(self, key: object, prompt: Sequence[int]) -> None:
        assert key not in self.active
        self.active.add(key)
        self.texts[key] = []

    def add_active_response(self, key: object, token_ids: np.ndarray) -> None:
        assert key in self.active
        assert token_ids.dtype == np.int32
        self.texts[key] += token_ids.tolist()

    def stop_request(self, key: object) -> None:
        self.active.remove(key)

    def evict_cached_response(self, key: object) -> None:
        del self.texts[key]

    def speculate(self, key: object, context: np.ndarray, **asked: object) -> Any:
        self.asked = {**asked, "context": context.tolist()}
        found = next((text for text in self.texts.values() if context[-1] in text[:-1]), [])
        at = found.index(context[-1]) + 1 if found else 0
        rest = found[at:] if found else []
        draft = ModuleType("draft")
        draft.token_ids, draft.parents = rest, list(range(-1, len(rest) - 1))  # type: ignore[attr-defined]
        return draft


@pytest.fixture
def fake_arctic(monkeypatch: pytest.MonkeyPatch) -> type[FakeCache]:
    """The package, as far as the adapter uses it."""
    package, module = ModuleType("arctic_inference"), ModuleType("arctic_inference.suffix_decoding")
    module.SuffixDecodingCache = FakeCache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "arctic_inference", package)
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", module)
    FakeCache.made.clear()
    return FakeCache


def test_the_arctic_baseline_sees_the_pool_and_keeps_nothing_by_itself(fake_arctic: type[FakeCache]) -> None:
    pool = pool_of([1, 2, 3], [5, 6, 7])
    contender = arctic.Arctic(pool, 4.0, 16)
    contender.begin(turn([9, 1]))
    assert contender.propose().token_ids == (2, 3)
    (cache,) = fake_arctic.made
    wanted = {"max_spec_tokens": 16, "max_spec_factor": 4.0, "min_token_prob": 0.1, "use_tree_spec": True}
    assert cache.asked == {**wanted, "context": [9, 1]}
    contender.committed((0,), [2, 5])
    assert contender.propose().token_ids == (6, 7)
    contender.end()
    assert sorted(cache.texts.values()) == [[1, 2, 3], [5, 6, 7]]

    pool.hide([2])
    pool.add(Answer(7, "g", (5, 8), "", ""))
    contender.begin(turn([5]))
    assert contender.propose().token_ids == (8,)
    contender.end()
    assert sorted(cache.texts.values()) == [[1, 2, 3], [5, 8]]
    assert not cache.active


def test_the_arctic_baseline_takes_part_where_it_is_installed(
    tmp_path: Path, fake_arctic: type[FakeCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log.jsonl"
    assert "arctic-4" in names(log, alphas=(1.0, 4.0))
    assert "arctic" not in names(log, baselines=("suffix-tree",))
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)  # importing it fails
    assert "arctic" not in names(log)
    with pytest.raises(UnsupportedError, match="pip install arctic-inference"):
        names(log, baselines=("arctic",))


def test_the_authors_suffix_decoding_scores_as_ours_does() -> None:
    """Only where their package is installed."""
    suffix_decoding = pytest.importorskip("arctic_inference.suffix_decoding")
    assert suffix_decoding.SuffixDecodingCache
    rng = np.random.default_rng(5)
    answers = [[*rng.integers(0, 6, 30).tolist(), 99] for _ in range(40)]  # their tree counts unfinished ends too
    pool, theirs = pool_of(*answers), suffix_decoding.SuffixDecodingCache(max_tree_depth=64, max_cached_requests=-1)
    for number, answer in enumerate(answers):
        theirs.start_request(number, [])
        theirs.add_active_response(number, answer)
        theirs.stop_request(number)
    for request in range(40, 80):
        prompt = rng.integers(0, 6, 40).tolist()
        live = TokenIndex()
        live.append(0, prompt)
        theirs.start_request(request, prompt)
        score = theirs.speculate(request, prompt, 16, 4.0, min_token_prob=0.1, use_tree_spec=True).score
        recent = np.array(prompt[::-1], dtype=np.int32)
        ours = max(suffix_tree(live, recent, 4.0, 16, ended=1)[2], suffix_tree(pool.index, recent, 4.0, 16)[2])
        assert score == pytest.approx(ours, abs=1e-4)

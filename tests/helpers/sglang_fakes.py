"""SGLang 0.5.23, obeyed to the letter: its HTTP interface for external corpora, its scheduler and n-gram worker.

What the real server leaves undefined fails here: a removal during a load. Unknown fields are refused, as are ids that
its listing could not carry. Tokens are words.

`NGRAMWorker` has the attributes that `_prepare_draft_tokens` reads and leaves behind, and returns arrays of its shapes
and types. `Scheduler` verifies what comes out by the mask alone, with a scripted target, and keeps SGLang's rules about
when tokens reach `output_ids`: at once, or one step late with overlapped scheduling unless another batch comes between.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import torch

from helpers.services import END

ADDED = {"corpus_id", "file_path", "documents"}


class FakeSGLangServer:
    """A server with a bound for all corpora; `loading` is called in the middle of each load, on its thread."""

    def __init__(self, max_tokens: int = 1000, key: str | None = None, **info: Any) -> None:
        self.max_tokens, self.key = max_tokens, key
        self.corpora: dict[str, list[str]] = {}
        self.requests: list[tuple[str, Any]] = []
        self.loading: Callable[[], None] = lambda: None
        self.busy = False
        self.told = {
            "version": "0.5.23",
            "speculative_algorithm": "NGRAM",
            "speculative_ngram_external_sam_budget": 4,
            "speculative_ngram_external_corpus_max_tokens": max_tokens,
            **info,
        }

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self)

    def asked(self, path: str) -> int:
        """How often a path was asked for."""
        return sum(path == one for one, _ in self.requests)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content) if request.content else None
        self.requests.append((path, body))
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return httpx.Response(401, json={"error": "Unauthorized"})
        routes = {
            ("GET", "/server_info"): lambda _: httpx.Response(200, json=self.told),
            ("GET", "/list_external_corpora"): self._list,
            ("POST", "/add_external_corpus"): self._add,
            ("POST", "/remove_external_corpus"): self._remove,
        }
        answer = routes.get((request.method, path))
        return httpx.Response(404, json={"detail": "Not Found"}) if answer is None else answer(body)

    def _list(self, _: Any) -> httpx.Response:
        counts = {name: _tokens(documents) for name, documents in self.corpora.items()}
        return httpx.Response(200, json={"success": True, "corpus_token_counts": counts, "message": ""})

    def _add(self, body: Any) -> httpx.Response:
        if not isinstance(body, dict) or body.keys() - ADDED:
            return _refused(f"Unexpected keyword argument {sorted(body.keys() - ADDED)}")
        name, documents = body.get("corpus_id"), body.get("documents")
        if not isinstance(documents, list) or not all(isinstance(one, str) for one in documents):
            return _refused("Either file_path or documents must be provided.")
        assert isinstance(name, str)
        assert name.isprintable(), "listing separates ids by tabs and newlines"
        if self.busy:
            return _refused("Another corpus load is already in progress.")
        taken = [one for end, one in enumerate(documents, 1) if _tokens(documents[:end]) <= self.max_tokens]
        self.busy = True
        try:
            self.loading()
            return self._loaded(name, taken, cut=len(taken) < len(documents))
        finally:
            self.busy = False

    def _loaded(self, name: str, documents: list[str], cut: bool) -> httpx.Response:
        if name in self.corpora:
            return _refused(f"External corpus '{name}' already exists. Remove it before adding a new corpus.")
        tokens, left = _tokens(documents), self.max_tokens - sum(map(_tokens, self.corpora.values()))
        if not tokens:
            return _refused("External corpus is empty — no tokens were loaded.")
        if tokens > left:
            return _refused(
                f"External ngram corpus exceeds the remaining token budget ({left}) after loading 0 tokens."
            )
        self.corpora[name] = documents
        message = f"Loaded corpus '{name}' with {tokens} tokens."
        message += f" (truncated: exceeded {self.max_tokens} token limit)" if cut else ""
        return httpx.Response(
            200, json={"success": True, "corpus_id": name, "message": message, "loaded_token_count": tokens}
        )

    def _remove(self, body: Any) -> httpx.Response:
        assert not self.busy, "removing during a load is undefined in SGLang"
        assert body.keys() == {"corpus_id"}
        if not body["corpus_id"]:
            return _refused("corpus_id is required.")
        self.corpora.pop(body["corpus_id"], None)
        return httpx.Response(200, json={"success": True, "message": f"Removed corpus '{body['corpus_id']}'."})


def on(fake: FakeSGLangServer) -> list[list[str]]:
    """The documents of each corpus of ours."""
    return [documents for name, documents in fake.corpora.items() if name.startswith("precedent:")]


def _tokens(documents: list[str]) -> int:
    """Words, and a separator between documents."""
    return sum(len(one.split()) for one in documents) + max(0, len(documents) - 1)


def _refused(message: str) -> httpx.Response:
    return httpx.Response(400, json={"success": False, "corpus_id": "", "message": message, "loaded_token_count": 0})


WIDTH = 8


class Corpus:
    """SGLang's own trie: `follows` gives the continuations of a token, as paths that share no beginning."""

    def __init__(self, width: int) -> None:
        self.width, self.follows = width, dict[int, list[list[int]]]()

    def synchronize(self) -> None:
        """Wait for insertions."""

    def batch_get(
        self, req_ids: Sequence[str], batch_tokens: Sequence[Sequence[int]], total_lens: Sequence[int]
    ) -> Any:
        """int64 tokens `[requests * width]` and int64 masks `[requests * width * width]`, level by level, padded."""
        assert len(req_ids) == len(batch_tokens) == len(total_lens)
        rows = [self._tree(tokens[-1]) for tokens in batch_tokens]
        return np.concatenate([row[0] for row in rows]), np.concatenate([row[1].reshape(-1) for row in rows])

    def _tree(self, last: int) -> Any:
        tokens, parents = [last], [-1]
        paths = [(0, path) for path in self.follows.get(last, ())]
        while paths and len(tokens) < self.width:
            parent, (token, *rest) = paths.pop(0)
            tokens.append(token)
            parents.append(parent)
            paths += [(len(tokens) - 1, rest)] if rest else []
        parents += [0] * (self.width - len(tokens))
        tokens += [0] * (self.width - len(tokens))
        mask = np.eye(self.width, dtype=np.int64)
        for node, parent in enumerate(parents[1:], start=1):
            mask[node, : parent + 1] = mask[parent, : parent + 1]
        return np.array(tokens, dtype=np.int64), mask


class NGRAMWorker:
    """The part of SGLang's class around drafting."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        self.server_args, self.model_runner = server_args, target_worker.model_runner
        self.enable_overlap = not server_args.disable_overlap_schedule
        self.draft_token_num: int = server_args.speculative_num_draft_tokens
        self.max_trie_depth = 18
        self.ngram_corpus = Corpus(self.draft_token_num)

    def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        splices = self.enable_overlap and not batch.grammar_needs_sync()
        self.prev_token_ids = batch.spec_info.accept_tokens.tolist() if splices else []
        self.prev_accept_lens = batch.spec_info.accept_lens.tolist() if splices else [0] * len(batch.reqs)
        self.ngram_corpus.synchronize()
        tails, lengths = [], []
        for row, req in enumerate(batch.reqs):
            start = row * self.draft_token_num
            late = self.prev_token_ids[start : start + self.prev_accept_lens[row]]
            whole = [*req.origin_input_ids_unpadded, *req.output_ids, *late]
            tails.append(whole[-self.max_trie_depth :])
            lengths.append(len(whole))
        return self.ngram_corpus.batch_get([req.rid for req in batch.reqs], tails, lengths)


def worker_of(hook: Any, overlap: bool = False, width: int = WIDTH, **args: Any) -> NGRAMWorker:
    """A worker made and used through a hook, as SGLang's registry has it: `hook(original, *arguments)`."""

    class Hooked(NGRAMWorker):
        def __init__(self, *given: Any, **named: Any) -> None:
            hook.start(NGRAMWorker.__init__, self, *given, **named)

        def _prepare_draft_tokens(self, batch: Any) -> Any:
            return hook.prepare(NGRAMWorker._prepare_draft_tokens, self, batch)

    server_args = SimpleNamespace(
        disable_overlap_schedule=not overlap, speculative_num_draft_tokens=width,
        tp_size=1, pp_size=1, tokenizer_path=None, model_path="",
    )  # fmt: skip
    vars(server_args).update(args)
    runner = SimpleNamespace(model_config=SimpleNamespace(context_len=256))
    return Hooked(server_args, 0, 1, SimpleNamespace(model_runner=runner))


class Scheduler:
    """Runs requests with scripted answers through a worker, one step at a time."""

    def __init__(self, worker: NGRAMWorker) -> None:
        self.worker = worker
        self.running: dict[str, Any] = {}
        self.proposed: dict[str, list[list[int]]] = {}
        """Of the last step, all paths from the last committed token to a leaf, by request."""

    def add(self, rid: str, prompt: Sequence[int], answer: Sequence[int], **params: Any) -> Any:
        """Prefill a request: its first token is sampled."""
        ids = array("q", prompt)
        req = SimpleNamespace(
            rid=rid, origin_input_ids=ids, origin_input_ids_unpadded=ids, output_ids=array("q"),
            sampling_params=SimpleNamespace(ignore_eos=False, stop_token_ids=None, **params),
            eos_token_ids={END}, tokenizer=None,
        )  # fmt: skip
        self.settle()
        self.running[rid] = SimpleNamespace(req=req, answer=list(answer), done=1, late=[answer[0]])
        if not self.worker.enable_overlap:
            self.settle()
        return req

    def settle(self) -> None:
        """Process results: every committed token is in `output_ids` afterwards."""
        for one in self.running.values():
            one.req.output_ids.extend(one.answer[len(one.req.output_ids) : one.done])

    def step(self, grammar: bool = False) -> dict[str, int]:
        """One decode step of all requests; how many candidates were accepted, by request. What has ended leaves."""
        ones = list(self.running.values())
        if grammar:
            self.settle()
        batch = self._batch(ones, grammar)
        tokens, mask = self.worker._prepare_draft_tokens(batch)
        width = self.worker.draft_token_num
        assert (tokens.dtype, mask.dtype) == (np.int64, np.int64)
        assert (tokens.shape, mask.shape) == ((len(ones) * width,), (len(ones) * width * width,))
        self.settle()  # with overlap, the last step's results are processed while this one runs
        accepted = {
            one.req.rid: self._verified(one, tokens[row * width :][:width], mask.reshape(-1, width, width)[row])
            for row, one in enumerate(ones)
        }
        if not self.worker.enable_overlap or grammar:
            self.settle()
        self.running = {rid: one for rid, one in self.running.items() if one.done < len(one.answer)}
        return accepted

    def _batch(self, ones: Sequence[Any], grammar: bool) -> Any:
        width = self.worker.draft_token_num
        staged = torch.zeros(len(ones), width, dtype=torch.int32)
        for row, one in enumerate(ones):
            staged[row, : len(one.late)] = torch.tensor(one.late, dtype=torch.int32)
        return SimpleNamespace(
            reqs=[one.req for one in ones],
            seq_lens_cpu=torch.tensor([len(one.req.origin_input_ids) + one.done - 1 for one in ones]),
            spec_info=SimpleNamespace(
                accept_tokens=staged.flatten(),
                accept_lens=torch.tensor([len(one.late) for one in ones], dtype=torch.int32),
            ),
            grammar_needs_sync=lambda: grammar,
        )

    def _verified(self, one: Any, tokens: np.ndarray, mask: np.ndarray) -> int:
        """Walk down while the scripted token is a child; the tree is read from the mask alone, as SGLang does it."""
        parents = parents_of(mask)
        assert tokens[0] == one.answer[one.done - 1], "node 0 is the last committed token"
        self.proposed[one.req.rid] = leaf_paths(tokens, parents)
        node, late = 0, list[int]()
        while one.done < len(one.answer):
            wanted = one.answer[one.done]
            late.append(wanted)
            one.done += 1
            below = [each for each in range(1, len(tokens)) if parents[each] == node and tokens[each] == wanted]
            if not below:
                break
            node = below[0]
        one.late = late
        return len(late) - 1


def parents_of(mask: np.ndarray) -> list[int]:
    """The parents that a mask `[width, width]` says; fails if it is no tree whose parents come first."""
    assert not (mask & ~1).any()
    parents = [-1]
    assert mask[0].tolist() == [1] + [0] * (len(mask) - 1)
    for node in range(1, len(mask)):
        above = mask[node].nonzero()[0]
        assert above[-1] == node
        parent = int(above[-2])
        assert mask[node, :node].tolist() == mask[parent, :node].tolist(), "a node sees what its parent sees"
        parents.append(parent)
    return parents


def leaf_paths(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """The tokens below the root on the way to each leaf."""
    found = []
    for leaf in sorted(set(range(1, len(tokens))) - set(parents)):
        path, node = [], leaf
        while node > 0:
            path.append(int(tokens[node]))
            node = parents[node]
        found.append(path[::-1])
    return found

"""The order desk's own target and draft model: a LangChain agent serves requests, decoded in several ways.

Nothing is replayed here: the model chooses every token and every call. Each way is an engine of its own over the same
weights, in steps of fixed size (graphs on CUDA). In the small shape both models are tiny and random.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gpu_bench.setting import Setting, TimeIsUp
from precedent.cache import SpeculationCache
from precedent.config import SpeculationConfig
from precedent.engine.engine import Engine
from precedent.langchain import ChatPrecedent
from precedent.target import TargetModel
from precedent.target.cuda.static_runner import StaticSettings
from precedent.target.load.loading import load_draft, load_target
from precedent.testing.embedders import HashEmbedder
from precedent.testing.tiny_models import byte_tokenizer, tiny_causal_lm
from precedent_demo.demo_runs import MEMORY, TENANT, Run, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from precedent_demo import Request

Row = dict[str, Any]
Models = tuple["PreTrainedModel", "PreTrainedModel", "PreTrainedTokenizerBase"]
"""Target, draft model, and the tokenizer of both."""

DRAFT = ("draft-model",)


@dataclass(frozen=True, slots=True)
class Way:
    """Who drafts, and whether the draft model draws while the target scores."""

    name: str
    drafters: tuple[str, ...] = ()
    pearl: bool = False


WARMING = Way("warming", MEMORY)
WAYS = (
    Way("plain"),
    Way("draft-only", DRAFT),
    Way("draft-only, pearl", DRAFT, pearl=True),
    Way("cache-only", MEMORY),
    Way("both", (*MEMORY, *DRAFT)),
)


def demo_pair(setting: Setting) -> Iterator[Row]:
    """Tokens per second of each way on the same requests; each fails alone. Nothing without the order desk."""
    try:
        from precedent_demo import make_requests
    except ImportError:
        yield {"failed": "the order desk is not installed: pip install ./plugins/precedent-demo"}
        return
    warming, measured = (1, 1) if setting.small else (12, 6)
    pair, requests, runs = Pair(setting), make_requests("B")[:measured], dict[str, Run]()
    pair.warm(make_requests("A")[:warming])
    for way in WAYS:
        try:
            runs[way.name] = pair.measure(way, requests)
            yield _row(runs[way.name], runs.get("plain"))
        except TimeIsUp:
            raise
        except Exception as error:
            yield {"way": way.name, "failed": f"{type(error).__name__}: {error}".splitlines()[0][:120]}


def _row(run: Run, plain: Run | None) -> Row:
    """Figures of one way; texts that rounding led elsewhere than plain decoding's are counted, not left out."""
    found = run.as_dict()
    row = {name: found[name] for name in ("requests", "tokens", "tokens_per_step", "tokens_per_second", "solved")}
    row |= {f"{part}_ms": found["milliseconds_per_step"][part] for part in ("forward", "drafting", "verification")}
    if plain is not None:
        row["speedup"] = found["tokens_per_second"] / plain.as_dict()["tokens_per_second"]
        pairs = zip(run.requests, plain.requests, strict=True)
        row["requests_word_for_word_as_plain"] = sum(_texts(mine) == _texts(theirs) for mine, theirs in pairs)
    return {"way": run.name, **row}


def _texts(turns: Sequence[Turn]) -> list[tuple[int, ...]]:
    return [turn.result.token_ids for turn in turns]


class Pair:
    """Both models, the desk, and the cache that the requests of another set have filled."""

    def __init__(self, setting: Setting) -> None:
        from precedent_demo import MAX_TOKENS_PER_TURN, make_database

        self._setting, self._desk = setting, make_database(seed=0)
        self._max_tokens = 4 if setting.small else MAX_TOKENS_PER_TURN
        self._model, self._draft, self._tokenizer = (_tiny if setting.small else _real)(setting)
        self._static = StaticSettings(8192 if setting.small else 65_536, capture=setting.on_cuda)
        self._cache = SpeculationCache.open(None, embedder=HashEmbedder() if setting.small else None)
        self._cache.warm_up()

    def warm(self, requests: Sequence[Request]) -> None:
        """Fill the cache with the completions of these requests."""
        with self._engine(WARMING, [], write_back=True) as engine:
            for request in requests:
                self._solved(engine, request)

    def measure(self, way: Way, requests: Sequence[Request]) -> Run:
        """Serve these requests, the first of them once before, so that graphs are captured; nothing is stored."""
        run, turns = Run(way.name), list[Turn]()
        with self._engine(way, turns) as engine:
            self._solved(engine, requests[0])
            for request in requests:
                turns.clear()
                run.solved += self._solved(engine, request)
                run.requests.append(list(turns))
        return run

    def _solved(self, engine: Engine, request: Request) -> bool:
        from precedent_demo import run_request

        self._setting.check_time()
        chat_model = ChatPrecedent.from_engine(engine, max_tokens=self._max_tokens, tenant=TENANT)
        return run_request(chat_model, request, self._desk).solved_by_model

    @contextmanager
    def _engine(self, way: Way, turns: list[Turn], *, write_back: bool = False) -> Iterator[Engine]:
        drafters = way.drafters
        engine = Engine(
            TargetModel(self._model, static=self._static),
            self._tokenizer,
            name="the order desk's",
            draft_model=self._draft if DRAFT[0] in drafters else None,
            cache=self._cache if "recall" in drafters else None,
            speculation=SpeculationConfig(enabled=bool(drafters), drafters=drafters, write_back=write_back),
            on_result=lambda prompt_ids, result: turns.append(Turn(prompt_ids, result)),
            pearl=way.pearl,
        )
        with closing(engine):  # its arena goes before the next one's is made
            yield engine


def _real(setting: Setting) -> Models:
    """The adapted target and what was distilled from it, in bfloat16 as they are stored."""
    from precedent_demo import adapted_target, draft_folder

    model, tokenizer = load_target(adapted_target(), device=str(setting.device))
    return model, load_draft(draft_folder(), model, tokenizer), tokenizer


def _tiny(setting: Setting) -> Models:
    """Two random models and a tokenizer of bytes."""
    shape = {"dtype": torch.float32, "max_position_embeddings": 8192}
    model, draft = (tiny_causal_lm(seed=seed, **shape).to(setting.device) for seed in (0, 1))
    return model, draft, byte_tokenizer()

"""Forwards of fixed size over an arena equal ordinary ones: rows, KV rows, several requests, prompts in pieces, trees.

Everything but the capture of a graph and its replay is the same code on a CPU; those two are marked `gpu`.
"""

from __future__ import annotations

import gc
import importlib.util
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.errors import ConfigError, UnsupportedError
from precedent.planning.costs import CostCurve
from precedent.target import Slot, TargetModel
from precedent.target.attention import attention
from precedent.target.cuda.graphs import GraphStore, Replay, Run
from precedent.target.cuda.host_waits import HostWaits
from precedent.target.cuda.static_forward import StaticForward
from precedent.target.cuda.static_runner import StaticSettings
from precedent.target.cuda.static_shape import LEAST_KEYS, MOST_WIDTH, StaticShape, shape_for
from precedent.target.kv.arena import KEPT_FREE, KVArena
from precedent.target.kv.cache import KVCache
from precedent.target.kv.rows import chain_rows
from precedent.target.load.first_layers import first_layers
from precedent.target.load.trained_draft import HEAD_TOKENS, draft_beside, initial_weights
from precedent.testing.tiny_models import byte_tokenizer, tiny_causal_lm
from precedent.tree import EMPTY_TREE, ROOT, CandidateTree, TreeBuilder

WITHOUT_GRAPHS = StaticSettings(arena_tokens=8192, capture=False)


def static_target(model_type: str = "llama", **settings: object) -> TargetModel:
    return TargetModel(tiny_causal_lm(model_type, **settings), static=WITHOUT_GRAPHS)


def plain_target(model_type: str = "llama", **settings: object) -> TargetModel:
    return TargetModel(tiny_causal_lm(model_type, **settings))


def random_tree(seed: int, num_nodes: int) -> CandidateTree:
    choose, builder, nodes = random.Random(seed), TreeBuilder(), [ROOT]
    for _ in range(num_nodes):
        nodes.append(builder.add_fixed(choose.choice(nodes), choose.randrange(250), "test"))
    return builder.build()


def random_ids(seed: int, count: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(250) for _ in range(count)]


def keys_and_values(slot: Slot) -> Tensor:
    """Everything committed, [layers, 2, heads, length, head_dim]."""
    return torch.stack([torch.cat(layer.rows(0, slot.kv.length)) for layer in slot.kv.layers])


def alike(
    static: TargetModel,
    plain: TargetModel,
    prompts: Sequence[int],
    rounds: int,
    widths: Sequence[int],
    tolerance: float = 1e-9,
) -> None:
    """Play the same requests on both: prompts, then rounds of trees that are scored together and partly committed."""
    ours, theirs = ([target.new_slot() for _ in prompts] for target in (static, plain))
    for number, (length, *pair) in enumerate(zip(prompts, ours, theirs, strict=True)):
        for target, slot in zip((static, plain), pair, strict=True):
            target.prefill(slot, random_ids(number, length))
    for round_number in range(rounds):
        trees = [random_tree(100 * round_number + i, width) for i, width in enumerate(widths)]
        found = static.score(list(zip(ours, trees, strict=True)))
        expected = plain.score(list(zip(theirs, trees, strict=True)))
        paths = [tree.path_to(random.Random(round_number).randrange(len(tree))) if tree else () for tree in trees]
        static.commit_all(list(zip(ours, trees, paths, [round_number] * len(trees), strict=True)))
        for twin, tree, path in zip(theirs, trees, paths, strict=True):
            plain.commit(twin, tree, path, round_number)
        for one, other, slot, twin in zip(found, expected, ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
            torch.testing.assert_close(keys_and_values(slot), keys_and_values(twin), rtol=0, atol=tolerance)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "olmo2", "phi3"])
def test_several_requests_and_trees_equal_ordinary_forwards(model_type: str) -> None:
    """Three requests in places for four; all logits, keys and values, over commits of scattered paths."""
    static = static_target(model_type)
    before = static.static.forwards
    alike(static, plain_target(model_type), prompts=(40, 3, 17), rounds=4, widths=(9, 0, 5))
    assert static.static.forwards >= before + 4 + 3, "rounds and prompts went through forwards of fixed size"


def test_one_request_without_and_with_a_tree() -> None:
    alike(static_target(), plain_target(), prompts=(30,), rounds=3, widths=(0,))
    alike(static_target(), plain_target(), prompts=(30,), rounds=3, widths=(63,))


def test_lengths_of_several_buckets_and_buffers_that_grow_into_other_regions() -> None:
    """One request crosses from one bucket of keys into the next while another is in its first rows."""
    settings = {"max_position_embeddings": 4096, "num_hidden_layers": 2}
    alike(static_target(**settings), plain_target(**settings), prompts=(LEAST_KEYS - 8, 5), rounds=4, widths=(6, 3))


def test_prompts_in_pieces_of_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also pieces wider than any size, which go another way, into the same arena."""
    static, plain, prompt = static_target(), plain_target(), random_ids(5, MOST_WIDTH + 60)
    ours, theirs = static.new_slot(), plain.new_slot()
    before = static.static.forwards
    for target, slot in ((static, ours), (plain, theirs)):
        target.begin_prefill(slot, prompt)
        for piece in (7, MOST_WIDTH + 1, 64):
            target.continue_prefill(slot, prompt, piece)
    assert static.static.forwards == before + 2
    torch.testing.assert_close(keys_and_values(ours), keys_and_values(theirs), rtol=0, atol=1e-9)
    torch.testing.assert_close(static.plain_step(ours), plain.plain_step(theirs), rtol=0, atol=1e-9)


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_attention_that_torch_has_serves(attention: str) -> None:
    settings = StaticSettings(arena_tokens=8192, capture=False, attention=attention)
    static = TargetModel(tiny_causal_lm(), static=settings)
    alike(static, plain_target(), prompts=(21, 8), rounds=2, widths=(7, 2))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.slow
def test_the_kernels_serve_a_whole_model() -> None:
    """In Triton's interpreter, in float32; on a GPU by themselves in the tests marked so."""
    settings = {"dtype": torch.float32, "num_hidden_layers": 1}
    kernels = StaticSettings(arena_tokens=1024, capture=False, attention="triton")
    static = TargetModel(tiny_causal_lm(**settings), static=kernels)
    alike(static, plain_target(**settings), prompts=(21, 8), rounds=2, widths=(7, 2), tolerance=1e-3)


def test_forks_and_rewinds_in_an_arena() -> None:
    static, plain, prompt = static_target(), plain_target(), random_ids(10, 50)
    origin = static.new_slot()
    static.prefill(origin, prompt)
    branch, expected = static.fork(origin, 30), plain.new_slot()
    static.prefill(branch, [*prompt[:30], 1, 2, 3])
    plain.prefill(expected, [*prompt[:30], 1, 2, 3])
    torch.testing.assert_close(static.plain_step(branch), plain.plain_step(expected), rtol=0, atol=1e-9)
    static.rewind(origin, 20)
    static.prefill(origin, [*prompt[:20], 9])
    plain.prefill(expected, [*prompt[:20], 9])
    torch.testing.assert_close(static.plain_step(origin), plain.plain_step(expected), rtol=0, atol=1e-9)


def test_who_finds_no_room_in_the_arena_is_computed_otherwise_and_alike() -> None:
    """A full arena costs speed, never an answer; what was lent comes back."""
    model = tiny_causal_lm(max_position_embeddings=4096)
    static = TargetModel(model, static=StaticSettings(arena_tokens=1024, capture=False))
    slots = [static.new_slot() for _ in range(3)]
    for number, slot in enumerate(slots):
        static.prefill(slot, random_ids(number, 300))
    before = static.static.forwards
    logits = static.score([(slot, EMPTY_TREE) for slot in slots])
    assert static.static.forwards == before
    expected = plain_target(max_position_embeddings=4096)
    for number, row in enumerate(logits):
        twin = expected.new_slot()
        expected.prefill(twin, random_ids(number, 300))
        torch.testing.assert_close(row, expected.plain_step(twin), rtol=0, atol=1e-9)
    del slots[:2], slot
    gc.collect()
    late = static.new_slot()
    static.prefill(late, random_ids(7, 300))
    assert late.kv.starts_in(static.static.arena) is not None


def test_logits_stay_when_the_next_forward_runs() -> None:
    static = static_target()
    slot = static.new_slot()
    static.prefill(slot, random_ids(1, 20))
    first = static.plain_step(slot)
    kept = first.clone()
    static.score([(slot, random_tree(1, 3))])
    assert torch.equal(first, kept)


def test_an_engine_on_forwards_of_fixed_size_answers_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests at once, drafts from the prompt, greedy in float64."""
    prompts, answers = [b"abcabcabcabcab" * 3, b"xyzxyxyzxyxyzx" * 2], []
    for target in (plain_target(), static_target()):
        engine = Engine(target, byte_tokenizer(), name="tiny")
        speculation = SpeculationConfig(drafters=("prompt",))
        sampling = SamplingParams(temperature=0.0, max_tokens=24)
        running = [engine.submit(list(prompt), sampling, speculation=speculation) for prompt in prompts]
        answers.append([generation.result().token_ids for generation in running])
        engine.close()
    assert answers[0] == answers[1]


def drafted(target: TargetModel, draft: Any, sampling: SamplingParams) -> tuple[Engine, tuple[int, ...], int]:
    """The engine of a draft model, what it answered, and how many forwards of fixed size the draft took for it."""
    engine = Engine(target, byte_tokenizer(), name="tiny", draft_model=draft)
    engine.planner.cost = FlatCost()
    speculation = SpeculationConfig(drafters=("draft-model",))
    static = engine._parts.draft_model.static
    before = static.forwards if static else 0
    result = engine.submit(random_ids(4, 60), sampling, speculation=speculation).result()
    return engine, result.token_ids, static.forwards - before if static else 0


class FlatCost(CostCurve):
    """Every width costs the same."""

    def observe(self, width: int, milliseconds: float) -> None:
        """Learn nothing."""


@pytest.mark.parametrize("sampling", [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=1.0)])
def test_a_draft_model_runs_in_fixed_sizes_as_its_target_does(sampling: SamplingParams) -> None:
    """A trained one, with a head of few tokens; greedy texts are those of ordinary forwards."""
    static, plain = static_target(), plain_target()
    drafts = [
        draft_beside(one.model, (0, 1), {**initial_weights(one.model, (0, 1)), HEAD_TOKENS: torch.arange(0, 250, 2)})
        for one in (static, plain)
    ]
    engine, text, forwards = drafted(static, drafts[0], sampling)
    draft = engine._parts.draft_model
    assert draft.static.arena.shape == draft.kv_shape != static.kv_shape
    assert forwards > 4
    engine.close()
    other, expected, _ = drafted(plain, drafts[1], sampling)
    assert other._parts.draft_model.static is None
    other.close()
    assert not sampling.greedy or text == expected


def test_a_draft_model_that_cannot_run_in_fixed_sizes_goes_without_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    windowed = tiny_causal_lm("mistral", sliding_window=16)
    engine, text, _ = drafted(static_target(), windowed, SamplingParams(max_tokens=9))
    assert engine._parts.draft_model.static is None
    assert "the draft model runs without graphs: mistral" in caplog.text
    engine.close()
    early = first_layers(model := tiny_causal_lm(), 1)
    engine, again, _ = drafted(TargetModel(model, static=WITHOUT_GRAPHS), early, SamplingParams(max_tokens=9))
    assert engine._parts.draft_model.static is None, "an early exit reads its target's arena"
    engine.close()
    assert text == again


def test_a_draft_models_arena_holds_no_more_tokens_than_its_targets() -> None:
    static = static_target()
    draft = TargetModel(tiny_causal_lm(num_hidden_layers=1))
    draft.run_in_sizes(static.static.settings_beside)
    tokens = static.static.arena.nbytes // static.kv_shape.row_bytes
    assert draft.static.arena.nbytes == tokens * draft.kv_shape.row_bytes


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("gemma3_text", {"head_dim": 12, "sliding_window": 32}, "sliding_attention layers do not see the whole prefix"),
        ("llama", {"attn_implementation": "eager"}, "does not go through transformers' attention interface"),
        ("gemma2", {"head_dim": 12, "layer_types": ["full_attention"] * 3}, "a window or a mask of its own"),
        ("mixtral", {"num_local_experts": 4, "sliding_window": None}, "makes the host wait"),
    ],
)
def test_models_that_cannot_are_refused_by_name(model_type: str, settings: dict[str, object], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{model_type} cannot run as CUDA graphs: .*{reason}"):
        static_target(model_type, **settings)


def test_capped_scores_and_sinks_are_refused_in_forwards_of_fixed_size() -> None:
    forward, rows = object.__new__(StaticForward), torch.zeros(1, 1, 1, 8)
    for term in ({"softcap": 30.0}, {"s_aux": torch.zeros(1)}):
        with pytest.raises(UnsupportedError, match="Linear caps its scores or has sinks"):
            attention(torch.nn.Linear(1, 1), rows, rows, rows, forward, **term)


def test_graphs_are_refused_where_there_is_no_cuda() -> None:
    with pytest.raises(UnsupportedError, match="CUDA graphs need CUDA devices, and it is on cpu"):
        TargetModel(tiny_causal_lm(), static=StaticSettings(arena_tokens=2048))
    with pytest.raises(ConfigError, match="made without static"):
        TargetModel.of(plain_target(), bitwise=False, cuda_graphs=True)


def test_a_forward_of_fixed_size_never_waits_for_the_device() -> None:
    """Nor does sending its numbers; reading a number back, which is the control, would be seen."""
    static = static_target()
    slots = [static.new_slot() for _ in range(2)]
    for number, slot in enumerate(slots):
        static.prefill(slot, random_ids(number, 20 + number))
    batch = [(slot, random_tree(number, 5)) for number, slot in enumerate(slots)]
    with HostWaits() as waits:
        logits = static.score(batch)
    assert waits.names == []
    with HostWaits() as waits, torch.inference_mode():
        logits[0].argmax(-1).tolist(), bool(logits[0][0, 0] > 0), logits[0][logits[0] > 0]
    assert set(waits.names) == {"resolve_neg", "is_nonzero", "index"}


def test_there_are_few_sizes_and_the_smallest_that_fits_is_taken() -> None:
    kv = KVCache(TargetModel(tiny_causal_lm(num_hidden_layers=1)).kv_shape)

    def rows(count: int) -> object:
        return chain_rows(kv, [0] * count)

    assert shape_for([rows(1)]) == StaticShape(1, 1, 1, LEAST_KEYS)
    assert shape_for([rows(9)]) == StaticShape(16, 1, 16, LEAST_KEYS)
    assert shape_for([rows(65), rows(1), rows(1)]) == StaticShape(72, 4, 72, LEAST_KEYS)
    assert shape_for([rows(65)] * 32) == StaticShape(2304, 32, 72, LEAST_KEYS)
    assert shape_for([rows(MOST_WIDTH + 1)]) is None
    assert shape_for([rows(MOST_WIDTH), *[rows(1)] * 9]) is None, "its masks would be too many to send"


def test_regions_of_an_arena_are_lent_once_and_joined_again() -> None:
    arena = KVArena(TargetModel(tiny_causal_lm(num_hidden_layers=1)).kv_shape, 1024).lent[0]
    first, second, third = (arena.take(256) for _ in range(3))
    starts = [region.start for region in (first, second, third)]
    assert starts == [KEPT_FREE, KEPT_FREE + 256, KEPT_FREE + 512]
    assert arena.take(512) is None
    del first, third
    last = arena.take(512)
    assert last.start == KEPT_FREE + 512, "what was behind the third was free as well"
    assert arena.take(300) is None, "the first region is too small by itself"
    del second
    assert arena.take(512).start == KEPT_FREE, "the first two together"


class Pretended:
    """Captures by remembering, and replays by running; fails for sizes of an odd number of rows."""

    def __init__(self, nbytes: int = 10) -> None:
        self.nbytes_each, self.captured, self.replayed, self.forgotten = nbytes, [], [], 0

    def capture(self, run: Run, shape: StaticShape) -> Replay:
        if shape.rows % 2:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        self.captured.append(shape)
        return PretendedReplay(self, run, shape)

    def forget(self) -> None:
        self.forgotten += 1


class PretendedReplay:
    def __init__(self, capturer: Pretended, run: Run, shape: StaticShape) -> None:
        self._capturer, self._run, self._shape, self.nbytes = capturer, run, shape, capturer.nbytes_each

    def __call__(self) -> Tensor:
        self._capturer.replayed.append(self._shape.rows)
        return self._run(self._shape)


class Tape(TorchDispatchMode):
    """What a graph is, on a CPU: the operations of a run with the very tensors they read and wrote, and no Python."""

    nbytes = 0

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, Any]] = []
        self.logits = torch.empty(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, result))
        return result

    def __call__(self) -> Tensor:
        for func, args, kwargs, written in self._operations:
            for old, new in zip(tree_leaves(written), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        return self.logits


class Taping:
    """Captures tapes."""

    def __init__(self) -> None:
        self.captured: list[StaticShape] = []

    def capture(self, run: Run, shape: StaticShape) -> Replay:
        self.captured.append(shape)
        with Tape() as tape:
            tape.logits = run(shape)
        return tape

    def forget(self) -> None:
        """Nothing is held beside the tapes."""


def store(capturer: Pretended, **bounds: int) -> GraphStore:
    bounds = {"max_graphs": 2, "max_bytes": 1000, **bounds}
    return GraphStore(lambda shape: torch.full((shape.rows, 3), float(shape.rows)), capturer, **bounds)


def size(rows: int) -> StaticShape:
    return StaticShape(rows, 1, rows, LEAST_KEYS)


def test_a_size_is_captured_when_it_comes_again_and_the_least_used_makes_room() -> None:
    capturer = Pretended()
    graphs = store(capturer)
    for rows in (2, 2, 4, 4, 2, 6, 6, 2, 4, 4):
        assert graphs(size(rows)).shape == (rows, 3)
    assert [shape.rows for shape in capturer.captured] == [2, 4, 6, 4]
    assert capturer.replayed == [2, 4, 2, 6, 2, 4], "the size that made room had to come twice again"
    assert len(graphs) == 2


def test_forwards_go_through_the_graphs_that_there_are() -> None:
    """One request, step after step: run, captured, then replayed over other numbers in the same buffers."""
    static, capturer = static_target(), Pretended()
    slot = static.new_slot()
    static.prefill(slot, random_ids(1, 20))
    static.static.graphs = GraphStore(static.static.run, capturer, max_graphs=4, max_bytes=1000)
    expected, twin = plain_target(), plain_target().new_slot()
    expected.prefill(twin, random_ids(1, 20))
    for number in range(4):
        tree = random_tree(number, 5)
        found, rows = static.score([(slot, tree)])[0], expected.score([(twin, tree)])[0]
        torch.testing.assert_close(found, rows, rtol=0, atol=1e-9)
        static.commit(slot, tree, (), number)
        expected.commit(twin, tree, (), number)
    assert ([shape.rows for shape in capturer.captured], capturer.replayed) == ([8], [8, 8, 8])


@pytest.mark.parametrize("attention", ["split", "sdpa"])
def test_operations_that_were_captured_serve_every_later_step_of_their_size(attention: str) -> None:
    """Lengths, places, trees and tokens change under a replay: none of them was baked into its operations."""
    settings = StaticSettings(arena_tokens=8192, capture=False, attention=attention)
    static, taping = TargetModel(tiny_causal_lm(), static=settings), Taping()
    static.static.graphs = GraphStore(static.static.run, taping, max_graphs=99, max_bytes=1)
    for prompts in ((40, 3, 17), (5, 61, 33)):  # other sequences, in other regions
        alike(static, plain_target(), prompts=prompts, rounds=5, widths=(9, 0, 5))
    assert taping.captured.count(StaticShape(24, 4, 16, LEAST_KEYS)) == 1
    assert static.static.forwards > 2 * len(taping.captured)


def test_what_cannot_be_captured_runs_without_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    capturer = Pretended()
    graphs = store(capturer)
    for _ in range(4):
        assert graphs(size(3)).eq(3).all()
    assert (len(graphs), capturer.captured) == (0, [])
    assert [record.getMessage().count("not permitted") for record in caplog.records] == [1]


def test_graphs_that_took_too_much_memory_are_dropped_together() -> None:
    capturer = Pretended(nbytes=400)
    graphs = store(capturer, max_graphs=9)
    for rows in (2, 2, 4, 4, 6, 6):
        graphs(size(rows))
    assert (len(graphs), capturer.forgotten) == (0, 1)
    graphs(size(2))
    assert len(graphs) == 1, "it comes again, and fits"
    greedy = Pretended(nbytes=2000)
    graphs = store(greedy)
    for _ in range(4):
        graphs(size(2))
    assert (len(greedy.captured), greedy.forgotten, len(graphs)) == (1, 1, 0)


def on_cuda(dtype: torch.dtype, **settings: object) -> tuple[TargetModel, TargetModel]:
    """The same weights with and without graphs, on the GPU."""
    static, plain = (tiny_causal_lm(dtype=dtype, **settings).cuda() for _ in range(2))
    return TargetModel(static, static=StaticSettings(arena_tokens=8192)), TargetModel(plain)


@pytest.mark.gpu
def test_on_cuda_replayed_graphs_equal_ordinary_forwards_in_float64() -> None:
    """Sizes come again and again, so that most forwards are replays; lengths, trees and regions change under them."""
    static, plain = on_cuda(torch.float64)
    for _ in range(3):
        alike(static, plain, prompts=(40, 3, 17), rounds=4, widths=(9, 0, 5))
    alike(static, plain, prompts=(30,), rounds=5, widths=(0,))
    assert len(static.static.graphs) >= 2


@pytest.mark.gpu
def test_on_cuda_a_replay_is_bit_for_bit_what_runs_without_a_graph() -> None:
    """In bfloat16, by the kernels that a GPU has: the graph is the same operations on the same memory."""
    static, _ = on_cuda(torch.bfloat16, hidden_size=128, head_dim=32)
    slot, tree = static.new_slot(), random_tree(1, 7)
    static.prefill(slot, random_ids(1, 40))
    graphs, static.static.graphs = static.static.graphs, None
    without = static.score([(slot, tree)])[0]
    static.static.graphs = graphs
    for _ in range(3):
        static.discard(slot)
        assert torch.equal(static.score([(slot, tree)])[0], without)
    assert len(graphs) >= 1


@pytest.mark.gpu
def test_on_cuda_a_step_waits_for_the_device_once_it_is_read() -> None:
    static, _ = on_cuda(torch.float32)
    slot, tree = static.new_slot(), random_tree(1, 7)
    static.prefill(slot, random_ids(1, 40))
    for _ in range(3):
        static.score([(slot, tree)])
        static.discard(slot)
    try:
        torch.cuda.set_sync_debug_mode("error")
        logits = static.score([(slot, tree)])[0]
        static.commit(slot, tree, tree.path_to(len(tree) - 1), 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert logits.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["triton", "split", "sdpa", "flex"])
def test_on_cuda_greedy_texts_are_those_without_graphs(attention: str) -> None:
    static, plain = (tiny_causal_lm(dtype=torch.float32, hidden_size=128, head_dim=32).cuda() for _ in range(2))
    targets = (
        TargetModel(static, static=StaticSettings(arena_tokens=8192, attention=attention)),
        TargetModel(plain),
    )
    texts = []
    for target in targets:
        slot, text = target.new_slot(), []
        target.prefill(slot, random_ids(3, 50))
        for _ in range(30):
            text.append(int(target.plain_step(slot)[0].argmax()))
            target.commit(slot, EMPTY_TREE, (), text[-1])
        texts.append(text)
    assert texts[0] == texts[1]

"""The target on a GPU: steps against the memory's floor, attention, graphs, verification, decoding, agents.

    python benchmarks/bench_gpu.py [--parts steps decoding] [--minutes 9] [--json gpu.json]

A model of Llama 3 8B's shape with random bfloat16 weights, created here; nothing is downloaded. Each part fails alone
and keeps what it had found; after `--minutes` nothing new starts. `--small --device cpu` only tries the program.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from measuring import Measurement, options, seconds
from precedent.cache import SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.drafters import load_draft
from precedent.engine.engine import Engine
from precedent.langchain import ChatPrecedent
from precedent.sampling.rng import CounterRng
from precedent.sampling.target_rows import TargetRows
from precedent.target import Slot, TargetModel
from precedent.target.load.loading import load_target
from precedent.tree import EMPTY_TREE, ROOT, CandidateTree, Sampled, TreeBuilder
from precedent.verify import Pending, Verdict, verify
from precedent_cuda import StaticSettings
from precedent_cuda.ahead import verify_ahead
from precedent_cuda.attention import StaticRows, attend, ordered
from precedent_demo.demo_runs import MEMORY, TENANT, Run, Sample, Turn, speedup_keys
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

LLAMA_3_8B: dict[str, Any] = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 65_536, "rope_theta": 500_000.0,
}  # fmt: skip
SMALL = LLAMA_3_8B | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
TOKENS, LENGTHS, BATCHES = (1, 8, 16, 32, 64), (1024, 4096, 16_384), (1, 8, 32)

Row = dict[str, Any]


class TimeIsUp(Exception):
    """The minutes that were given are over."""


def failed(error: Exception, most: int = 120) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:most]


@dataclass
class Setting:
    """Shared by all parts: the model, the device's ceilings, and a clock for asynchronous work."""

    given: argparse.Namespace
    started: float

    def __post_init__(self) -> None:
        self.device, self.small = torch.device(self.given.device), bool(self.given.small)
        self.on_cuda, self.lengths = self.device.type == "cuda", (64, 200) if self.small else LENGTHS

    def check_time(self) -> None:
        if perf_counter() - self.started > 60.0 * self.given.minutes:
            raise TimeIsUp

    @cached_property
    def model(self) -> PreTrainedModel:
        """Random weights in bfloat16; float32 in the small shape, so that comparisons mean something there."""
        config = AutoConfig.for_model("llama", **(SMALL if self.small else LLAMA_3_8B))
        config.eos_token_id = config.bos_token_id = config.pad_token_id = None
        torch.manual_seed(0)
        with self.device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if self.small else torch.bfloat16)
        return model.eval().requires_grad_(False)  # type: ignore[no-any-return]

    @cached_property
    def static(self) -> TargetModel:
        """The model in forwards of fixed size, as graphs on CUDA; the arena is full of random numbers, not zeros."""
        tokens = 8192 if self.small else None
        target = TargetModel(self.model, cuda_graphs=StaticSettings(arena_tokens=tokens, capture=self.on_cuda))
        for block in target.arena.lent:
            block.keys.normal_()
            block.values.normal_()
        return target

    @cached_property
    def plain(self) -> TargetModel:
        return TargetModel(self.model)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step must read: all but the embeddings."""
        embeddings = self.model.get_input_embeddings().weight
        return sum(weight.nbytes for weight in self.model.parameters()) - embeddings.nbytes

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second of a copy on the device, reads and writes counted."""
        source = torch.randn((1 << 20 if self.small else 1 << 31) // 4, device=self.device)
        copy = torch.empty_like(source)
        return 2 * source.nbytes / (self.milliseconds(lambda: copy.copy_(source)) / 1e3)

    def floor(self, length: int, sequences: int = 1) -> float:
        """Milliseconds that reading weights, keys and values once takes at least."""
        kv_bytes = self.static.kv_shape.row_bytes * length * sequences
        return (self.weight_bytes + kv_bytes) / self.bandwidth * 1e3

    def milliseconds(self, run: Callable[[], object]) -> float:
        """Median time on the device, after three runs that warm up (and let graphs be captured)."""
        for _ in range(3):
            run()
        self.wait()
        repeats = 3 if self.small else 20
        if not self.on_cuda:
            return median(seconds(run) for _ in range(repeats)) * 1e3
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in pairs:
            begin.record()
            run()
            end.record()
        self.wait()
        return median(begin.elapsed_time(end) for begin, end in pairs)

    def wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def slot_of(self, target: TargetModel, length: int, room: int = 0) -> Slot:
        """Make a sequence of `length` tokens whose keys and values are whatever its buffers contain."""
        slot = target.new_slot()
        with torch.inference_mode():
            slot.kv.reserve(length + room + 1)
            slot.kv.keep(range(length))
        slot.token_ids, slot.pending = [1] * length, 1
        return slot

    @property
    def machine(self) -> dict[str, Any]:
        return {
            "device": torch.cuda.get_device_name(self.device) if self.on_cuda else "cpu",
            "torch": torch.__version__,
            "shape": "small" if self.small else "llama-3-8b",
            "copy_bytes_per_second": self.bandwidth,
            "weight_bytes": self.weight_bytes,
        }


def bushy(num_nodes: int, draft_rows: Sequence[Tensor] = ()) -> CandidateTree:
    """Build four chains below the root, as a cache proposes, and a chain sampled from a draft model's rows."""
    builder, ends, node = TreeBuilder(), [ROOT] * 4, ROOT
    for number in range(num_nodes - len(draft_rows)):
        ends[number % 4] = builder.add_fixed(ends[number % 4], number % 400, "bench")
    for row in draft_rows:
        node = builder.add_sampled(node, 410, Sampled(row, builder.children(node)), "draft")
    return builder.build() if num_nodes else EMPTY_TREE


def score_time(setting: Setting, target: TargetModel, length: int, tree: CandidateTree, batch: int = 1) -> float:
    """Milliseconds of scoring a tree in each of several sequences of so many tokens."""
    slots = [setting.slot_of(target, length, len(tree)) for _ in range(batch)]

    def run() -> None:
        target.score([(slot, tree) for slot in slots])
        for slot in slots:
            target.discard(slot)

    return setting.milliseconds(run)


def step_times(setting: Setting) -> Iterator[Row]:
    """A step as a graph, the same code without a graph, and the ordinary forward."""
    for length in setting.lengths:
        for tokens in TOKENS:
            setting.check_time()
            tree, floor, runner = bushy(tokens - 1), setting.floor(length), setting.static.runner.backends[0]
            graph = score_time(setting, setting.static, length, tree)
            graphs, runner.graphs = runner.graphs, None
            without = score_time(setting, setting.static, length, tree)
            runner.graphs = graphs
            times = {"graph_ms": graph, "same_code_ms": without}
            times |= {"ordinary_ms": score_time(setting, setting.plain, length, tree)}
            ratio = {"floor_ms": floor, "times_the_floor": graph / floor}
            yield {"length": length, "tokens": tokens, **times, **ratio}


def batch_times(setting: Setting) -> Iterator[Row]:
    """Plain steps and steps of 16 tokens of several sequences at once, as graphs."""
    length = setting.lengths[0]
    for batch in BATCHES:
        for tokens in (1, 16):
            setting.check_time()
            taken = score_time(setting, setting.static, length, bushy(tokens - 1), batch)
            ratio = taken / setting.floor(length, batch)
            yield {"batch": batch, "tokens": tokens, "length": length, "graph_ms": taken, "times_the_floor": ratio}


def attention_times(setting: Setting) -> Iterator[Row]:
    """One layer's attention by torch and by our kernels, and its relative error against float64."""
    config = setting.model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = config.hidden_size // heads
    for length, tokens in ((length, tokens) for length in setting.lengths for tokens in TOKENS):
        rows = one_sequence(setting.device, length, tokens)
        sizes = (1, heads, tokens, dim), (kv_heads, length + tokens, dim), (kv_heads, length + tokens, dim)
        query, keys, values = (torch.randn(size, device=setting.device, dtype=setting.model.dtype) for size in sizes)
        exact = ordered(query.double(), keys.double(), values.double(), rows, dim**-0.5)
        floor = (keys.nbytes + values.nbytes) / setting.bandwidth * 1e6
        for name, compute in (("torch", ordered), ("kernels", attend)):
            setting.check_time()
            row: Row = {"length": length, "tokens": tokens, "variant": name, "floor_us": floor}
            try:
                attended = partial(compute, query, keys, values, rows, dim**-0.5)
                row["error"] = float((attended().double() - exact).norm() / exact.norm())
                yield {**row, "us": 1e3 * setting.milliseconds(attended)}
            except Exception as error:  # one variant alone: Triton may be absent
                yield {**row, "failed": failed(error)}


def one_sequence(device: torch.device, length: int, tokens: int) -> StaticRows:
    """Lay out one sequence at the beginning of an arena."""
    ancestors, tree = torch.eye(tokens, dtype=torch.bool), bushy(tokens - 1)
    ancestors[:, 0] = True
    if tree:
        ancestors[1:, 1:] = torch.from_numpy(tree.ancestors)
    within, zero = torch.arange(tokens, device=device), torch.zeros(1, dtype=torch.long, device=device)
    return StaticRows(
        slot_of=within, first_rows=zero, counts=zero + tokens, starts=zero,
        lengths=zero + length, ancestors=ancestors[None].to(device), longest=length + tokens,
    )  # fmt: skip


def verification_times(setting: Setting) -> Iterator[Row]:
    """From logits to verdicts as in the decode loop, the read included: milliseconds, and the share of a step."""
    nodes, vocabulary = 64, setting.model.config.vocab_size
    for batch in (1, 8):
        step = score_time(setting, setting.static, setting.lengths[0], bushy(nodes), batch)
        logits = torch.randn(batch, nodes + 1, vocabulary, device=setting.device, dtype=setting.model.dtype)
        drafted = list(torch.randn(6, vocabulary, device=setting.device).softmax(1))
        for mode, temperature, draws in (("traversal", 0.7, []), ("traversal", 0.7, drafted), ("greedy", 0.0, [])):
            setting.check_time()
            params, trees = SamplingParams(temperature=temperature), [bushy(nodes, draws)] * batch
            taken = setting.milliseconds(partial(verdicts, trees, list(logits), params, mode))
            sizes = {"sequences": batch, "nodes": nodes, "draws": len(draws), "vocabulary": vocabulary}
            yield {"mode": mode, **sizes, "ms": taken, "share_of_step": taken / step}


def verdicts(
    trees: Sequence[CandidateTree], scored: Sequence[Tensor], params: SamplingParams, mode: str
) -> list[Verdict]:
    """All verdicts, read at once."""
    found = [
        Pending(TargetRows(logits, tree, params), CounterRng(1, 1), mode)
        for tree, logits in zip(trees, scored, strict=True)
    ]
    verify_ahead(found)
    return [each.verdict() for each in found]


def bitwise_times(setting: Setting) -> Iterator[Row]:
    """Steps and a prompt with `bitwise=True` and without; then texts, drafted and not."""
    static = StaticSettings(arena_tokens=8192 if setting.small else 65_536, capture=setting.on_cuda)
    target = TargetModel(setting.model, bitwise=True, cuda_graphs=static)
    size, vocabulary = 64 if setting.small else 512, setting.model.config.vocab_size
    prompts = [random.Random(number).choices(range(vocabulary), k=size) for number in range(8)]

    def row(what: str, without: float, bitwise: float) -> Row:
        return {"what": what, "without_ms": without, "bitwise_ms": bitwise, "ratio": bitwise / without}

    def prefill(target: TargetModel, slot: Slot) -> None:
        target.rewind(slot, 0)
        target.prefill(slot, prompts[0])

    for length in setting.lengths:
        for tokens in (1, 16, 64):
            setting.check_time()
            pair = [score_time(setting, each, length, bushy(tokens - 1)) for each in (setting.static, target)]
            yield row(f"step of {tokens} behind {length}", *pair)
    pair = [setting.milliseconds(partial(prefill, each, each.new_slot())) for each in (setting.static, target)]
    yield row("prompt of 512", *pair)
    equal = sum(drafted(target, prompt, text) == text for prompt in prompts if (text := drafted(target, prompt, [])))
    yield {"what": "texts that equal plain decoding", "texts": len(prompts), "equal": equal}


def drafted(target: TargetModel, prompt: list[int], known: Sequence[int]) -> list[int]:
    """Decode 48 greedy tokens; steps propose seven tokens of `known`, and a wrong one beside each."""
    slot, text, greedy = target.new_slot(), list[int](), SamplingParams(temperature=0.0)
    target.prefill(slot, prompt)
    while len(text) < 48:
        builder, node = TreeBuilder(), ROOT
        for token in known[len(text) : len(text) + 7]:
            builder.add_fixed(node, token ^ 1, "wrong")
            node = builder.add_fixed(node, token, "right")
        tree = builder.build()
        rows = TargetRows(target.score([(slot, tree)])[0], tree, greedy)
        verdict = verify(tree, rows, "greedy", CounterRng(0, len(text)))
        target.commit(slot, tree, verdict.path, verdict.next_token)
        text += [*(tree.token_ids[node] for node in verdict.path), verdict.next_token]
    return text[:48]


def decoding_rates(setting: Setting) -> Iterator[Row]:
    """Tokens per second of plain decoding, ours and transformers', prefill excluded; each fails alone."""
    ways: dict[str, Callable[[Setting, int], float]] = {
        "ours, graphs": lambda setting, tokens: plainly(setting, setting.static, tokens),
        "ours, ordinary forwards": lambda setting, tokens: plainly(setting, setting.plain, tokens),
        "transformers, eager": generated,
        "transformers, static cache, compiled": partial(generated, cache_implementation="static"),
        "transformers, prompt lookup": partial(generated, prompt_lookup_num_tokens=10),
    }
    tokens = 8 if setting.small else 128
    for name, way in ways.items():
        setting.check_time()
        try:
            taken = way(setting, tokens)
            rates = {"tokens_per_second": tokens / taken, "ms_per_token": 1e3 * taken / tokens}
            yield {"way": name, "tokens": tokens, **rates}
        except Exception as error:
            yield {"way": name, "failed": failed(error)}


def plainly(setting: Setting, target: TargetModel, tokens: int) -> float:
    """Seconds of greedy decoding, each token read back as an engine must; a first run of equal length warms up."""

    def decode(slot: Slot) -> None:
        for _ in range(tokens):
            target.commit(slot, EMPTY_TREE, (), int(target.plain_step(slot)[0].argmax()))

    for _ in range(2):
        slot = setting.slot_of(target, setting.lengths[0], tokens)
        setting.wait()
        taken = seconds(partial(decode, slot))
    return taken


def generated(setting: Setting, tokens: int, **settings: Any) -> float:
    """Seconds of greedy `generate`; the time of a short answer to the same prompt is subtracted as prefill.

    Under prompt lookup the random weights decide what is accepted: it shows what its steps cost, not what it gains.
    """
    model, before = setting.model, setting.model.config._attn_implementation
    prompt = torch.randint(0, 400, (1, setting.lengths[0]), device=setting.device)

    def generate(tokens: int) -> None:
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=False, pad_token_id=0, **settings,
        )  # fmt: skip
        setting.wait()

    model.set_attn_implementation("sdpa")
    try:
        # the first run of each warms up, and compiles
        first, whole = ([seconds(partial(generate, most)) for _ in range(2)][-1] for most in (2, tokens + 2))
        return max(whole - first, 1e-9)
    finally:
        model.set_attn_implementation(before)


DRAFT = ("draft-model",)
WAYS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "plain": ((), None),
    "draft-only": (DRAFT, None),
    "draft-only, pearl": (DRAFT, "pearl"),
    "cache-only": (MEMORY, None),
    "both": ((*MEMORY, *DRAFT), None),
}
"""Drafters, and the decode loop."""


def demo_pair(setting: Setting) -> Iterator[Row]:
    """The order desk's target and draft model, served by an agent in each way; nothing without the desk."""
    try:
        from precedent_demo import make_requests
    except ImportError:
        yield {"failed": "the order desk is not installed: pip install ./plugins/precedent-demo"}
        return
    pair, requests, runs = Pair(setting), make_requests("B")[: 1 if setting.small else None], dict[str, Run]()
    pair.serve("warming", MEMORY, make_requests("A")[: 1 if setting.small else 12], write_back=True)
    others = make_requests("A")[12 : 13 if setting.small else 18]
    for name, (drafters, loop) in WAYS.items():
        try:
            runs[name] = pair.serve(name, drafters, requests, loop=loop, before=others)
            yield pair_row(runs[name], runs.get("plain"))
        except TimeIsUp:
            raise
        except Exception as error:
            yield {"way": name, "failed": failed(error)}
    samples: dict[str, list[Sample]] = {"cache-only": [], "both": []}
    for number in range(1 if setting.small else 5):
        for name in samples if number % 2 else reversed(samples):
            samples[name] += pair.serve(name, WAYS[name][0], requests, before=others).samples("decode_seconds")
    yield {"way": "both against the cache alone", **speedup_keys("ratio", samples["both"], samples["cache-only"])}


def pair_row(run: Run, plain: Run | None) -> Row:
    found = run.as_dict()
    row = {name: found[name] for name in ("requests", "tokens", "tokens_per_step", "tokens_per_second", "solved")}
    row |= {f"{part}_ms": found["milliseconds_per_step"][part] for part in ("forward", "drafting", "verification")}
    if plain is not None:
        row["speedup"] = found["tokens_per_second"] / plain.as_dict()["tokens_per_second"]
        texts = [[[turn.result.token_ids for turn in turns] for turns in each.requests] for each in (run, plain)]
        row["requests_word_for_word_as_plain"] = sum(map(list.__eq__, *texts))
    return {"way": run.name, **row}


class Pair:
    """Both models, the desk, and a cache; each way gets an engine of its own over the same weights."""

    def __init__(self, setting: Setting) -> None:
        from precedent_demo import MAX_TOKENS_PER_TURN, adapted_target, draft_folder, make_database

        self.setting, self.desk = setting, make_database(seed=0)
        self.max_tokens = 4 if setting.small else MAX_TOKENS_PER_TURN
        if setting.small:
            shape = {"dtype": torch.float32, "max_position_embeddings": 8192}
            self.model, self.draft = (tiny_causal_lm(seed=seed, **shape).to(setting.device) for seed in (0, 1))
            self.tokenizer = byte_tokenizer()
        else:
            self.model, self.tokenizer = load_target(adapted_target(), device=str(setting.device))
            self.draft = load_draft(draft_folder(), self.model, self.tokenizer)
        self.static = StaticSettings(8192 if setting.small else 65_536, capture=setting.on_cuda)
        self.cache = SpeculationCache.open(None, embedder=HashEmbedder() if setting.small else None)
        self.cache.warm_up()

    def serve(
        self, name: str, drafters: tuple[str, ...], requests: Sequence[Any], *, loop: str | None = None,
        before: Sequence[Any] = (), write_back: bool = False,
    ) -> Run:  # fmt: skip
        """Serve requests, and `before` them others that do not count, so that graphs are captured."""
        from precedent_demo import run_request

        run, turns = Run(name), list[Turn]()
        engine = Engine(
            TargetModel(self.model, cuda_graphs=self.static),
            self.tokenizer,
            name="the order desk's",
            draft_model=self.draft if DRAFT[0] in drafters else None,
            cache=self.cache if "recall" in drafters else None,
            speculation=SpeculationConfig(enabled=bool(drafters), drafters=drafters, write_back=write_back),
            on_result=lambda prompt_ids, result: turns.append(Turn(prompt_ids, result)),
            loop=loop,
        )
        chat_model = ChatPrecedent.from_engine(engine, max_tokens=self.max_tokens, tenant=TENANT)
        with closing(engine):  # its arena is freed before the next one's is made
            for number, request in enumerate([*before, *requests]):
                self.setting.check_time()
                turns.clear()
                solved = run_request(chat_model, request, self.desk).solved_by_model
                if number >= len(before):
                    run.solved += solved
                    run.requests.append(list(turns))
        return run


PARTS: dict[str, tuple[str, Callable[[Setting], Iterator[Row]]]] = {
    "steps": ("A step, in milliseconds", step_times),
    "attention": ("One layer's attention, in microseconds", attention_times),
    "verification": ("Verification", verification_times),
    "batches": ("Several sequences at once", batch_times),
    "bitwise": ("`bitwise=True`: the same bits whatever was drafted, and its cost", bitwise_times),
    "pair": ("The order desk's own target and draft model, served by an agent", demo_pair),
    "decoding": ("Plain decoding", decoding_rates),  # last: transformers' compiled graphs broke ours once
}


def run_part(name: str, setting: Setting) -> Row:
    """Run a part as far as it gets, and say why it stopped, if it did."""
    (title, part), rows, stopped = PARTS[name], list[Row](), None
    try:
        for row in part(setting):
            rows.append(row)
            print(name, row, file=sys.stderr, flush=True)
    except TimeIsUp:
        stopped = "the time was up"
    except Exception as error:
        stopped = failed(error, 200)
    return {"name": name, "title": title, "rows": rows, "stopped": stopped}


def main() -> None:
    """Run all parts and write what they found."""
    parser = options(__doc__, device="cuda", small=False, minutes=9.0)
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    given = parser.parse_args()
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("there is no CUDA device; --small --device cpu tries the program without one")
    setting = Setting(given, perf_counter())
    measurement = Measurement(gpu=torch.cuda.get_device_name(setting.device) if setting.on_cuda else None)
    results: Row = {"machine": setting.machine, "parts": []}
    for name in PARTS:
        if name in given.parts:
            results["parts"].append(run_part(name, setting))
            measurement.write(given.json, results)  # after every part: a run that is stopped has lost little


if __name__ == "__main__":
    main()

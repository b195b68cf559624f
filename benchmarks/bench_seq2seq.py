"""Draft-then-verify on a translation pair, as in SpecDec (2203.16487): tokens per step and quality, exact and relaxed.

    python benchmarks/bench_seq2seq.py [--steps 2000] [--notes 100] [--draws 6] [--json FILE]

Target and draft model are trained from scratch on shipping notes and translations made by rule, in minutes on a CPU.
Some German words have two forms, of which one is chosen at random: `canonical` maps every right translation to one
text. Held-out notes are translated greedily: plain, with exact verification, and with `lossy_top_beta` at several β
and τ. The draft model always draws a chain of `--draws` tokens, so that tokens per step do not depend on a clock.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from measuring import options, run
from precedent.config import SamplingParams, SpeculationConfig
from precedent.drafters.base import DrawSource
from precedent.engine.engine import Engine
from precedent.planning.plan import Limits, Plan
from precedent.planning.planner import Planner

RELAXED = ((1, 0.0), (2, 0.5), (2, 1.0), (2, 2.0), (3, 1.0), (3, 3.0), (5, 5.0), (10, 10.0))
PAD, END, BATCH, HELD_OUT = 0, 1, 32, 10_000_000
TARGET = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
DRAFT = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_layers": 1, "num_decoder_layers": 1}

ONES = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf"]
TENS = ["_", "zehn", "zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]
NOUNS = {"ship": ("Schiff", "das"), "truck": ("Lastwagen", "der"), "ferry": ("Fähre", "die"), "train": ("Zug", "der"),
         "van": ("Auto", "das"), "plane": ("Maschine", "die")}  # fmt: skip
ADJECTIVES = {"red": "rot", "old": "alt", "fast": "schnell", "small": "klein", "new": "neu", "slow": "langsam"}
CARGO = {"boxes": "Kisten", "barrels": "Fässer", "letters": "Briefe", "books": "Bücher", "lamps": "Lampen"}
CITIES = {"vienna": "Wien", "cologne": "Köln", "rome": "Rom", "prague": "Prag", "athens": "Athen", "oslo": "Oslo"}
DAYS = {"monday": "Montag", "tuesday": "Dienstag", "friday": "Freitag", "sunday": "Sonntag"}
VERBS = {"carries": ("bringt", "befördert"), "loses": ("verliert", "vermisst"), "needs": ("braucht", "benötigt")}
THEN = ("dann", "danach")
SYNONYMS = {second: first for first, second in (*VERBS.values(), THEN)}


def number_words(number: int) -> list[str]:
    """Spell a number below 10,000 in separate parts; the ones stand before the tens."""
    words: list[str] = []
    for size, name in ((1000, "tausend"), (100, "hundert")):
        if number >= size:
            words += [ONES[number // size].removesuffix("s") if number // size == 1 else ONES[number // size], name]
            number %= size
    if number > 12:
        ones = number % 10
        spelled = [ONES[ones].removesuffix("s") if ones == 1 else ONES[ones]] if ones else []
        words += [*spelled, *(["und"] if ones and number > 20 else []), TENS[number // 10]]
    elif number:
        words.append(ONES[number])
    return words


def pair(seed: int) -> tuple[str, str]:
    """Write the note of a seed, one to three sentences long, and one of its right translations."""
    choose = random.Random(seed)
    sentences = [sentence(choose, first=place == 0) for place in range(choose.randint(1, 3))]
    source, target = (" . ".join(" ".join(words) for words in side) for side in zip(*sentences, strict=True))
    return source, target


def sentence(choose: random.Random, *, first: bool) -> tuple[list[str], list[str]]:
    noun, adjective, cargo, city, day, verb = (
        choose.choice(sorted(words)) for words in (NOUNS, ADJECTIVES, CARGO, CITIES, DAYS, VERBS)
    )
    number = choose.choice((choose.randint(2, 99), choose.randint(100, 9999)))
    (german, article), dated = NOUNS[noun], choose.random() < 0.5
    source = ["the", adjective, noun, verb, *str(number), cargo, "to", city, *(["on", day] if dated else [])]
    when, verb = (["am", DAYS[day]] if dated else []), choose.choice(VERBS[verb])
    what = [f"{ADJECTIVES[adjective]}e", german, *number_words(number), CARGO[cargo], "nach", CITIES[city]]
    linked = ([], []) if first else (["then"], [choose.choice(THEN)])
    return [*linked[0], *source], [*linked[1], *when, verb, article, *what]


def canonical(text: str) -> list[str]:
    return [SYNONYMS.get(word, word) for word in text.split()]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Make a token of each word of both languages; an end token follows each text."""
    notes = ["then", "the", "to", "on", ".", *map(str, range(10)), *NOUNS, *ADJECTIVES, *CARGO, *CITIES, *DAYS, *VERBS]
    articles, named = ("der", "die", "das"), [german for german, _ in NOUNS.values()]
    described = [*(f"{word}e" for word in ADJECTIVES.values()), *(form for both in VERBS.values() for form in both)]
    counted = ["ein", "und", "hundert", "tausend", *ONES, *TENS[1:]]
    places = [*CARGO.values(), *CITIES.values(), *DAYS.values()]
    german = [".", "am", "nach", *THEN, *articles, *named, *described, *counted, *places]
    vocabulary = ["<pad>", "</s>", "<unk>", *dict.fromkeys([*notes, *german])]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def trained(tokenizer: PreTrainedTokenizerFast, shape: dict[str, int], steps: int, seed: int) -> Any:
    """Train a T5 of this shape from scratch; no sentence is seen twice."""
    torch.manual_seed(seed)
    ends = {"decoder_start_token_id": PAD, "pad_token_id": PAD, "eos_token_id": END}
    kind = {"dropout_rate": 0.0, "feed_forward_proj": "gated-gelu"}
    model = T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), **ends, **kind, **shape)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        pairs = [pair(number) for number in range(step * BATCH, (step + 1) * BATCH)]
        sources, targets = (
            padded([tokenizer.encode(one[side]) for one in pairs], fill) for side, fill in ((0, PAD), (1, -100))
        )
        model(input_ids=sources, attention_mask=(sources != PAD).long(), labels=targets).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.generation_config = GenerationConfig(**ends)
    return model.eval()


def padded(rows: list[list[int]], fill: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])


class SteadyPlanner(Planner):
    """Plans a chain of so many draws in every step, whatever it costs."""

    draws = 6

    def plan(self, candidates: Sequence[Any], draw_sources: Mapping[str, DrawSource], limits: Limits) -> Plan:
        plan = super().plan(candidates, {}, limits)
        plan.draws.update(dict.fromkeys(draw_sources, min(self.draws, limits.max_draws, limits.max_depth)))
        return plan


def measure(given: Namespace) -> dict[str, Any]:
    tokenizer, ways, found = word_tokenizer(), ["plain", "greedy"], list[dict[str, Any]]()
    ways += [f"lossy_top_beta:beta={beta},tau={tau}" for beta, tau in RELAXED]
    target, draft = trained(tokenizer, TARGET, given.steps, 0), trained(tokenizer, DRAFT, given.steps // 2, 1)
    with closing(Engine.load(target, tokenizer=tokenizer, draft_model=draft)) as engine:
        engine.planner.__class__, SteadyPlanner.draws = SteadyPlanner, given.draws
        answers = {way: translated(engine, given.notes, way) for way in ways}
        found = [{"way": way, **quality(engine, answers[way], answers["plain"])} for way in ways]
    return {"notes": given.notes, "draws": given.draws, "ways": found}


def translated(engine: Engine, notes: int, way: str) -> list[Any]:
    drafted = SpeculationConfig(drafters=("draft-model",), mode=way) if way != "plain" else None
    asked, sampling = drafted or SpeculationConfig(enabled=False), SamplingParams(max_tokens=160)
    prompts = [engine.tokenizer.encode(pair(HELD_OUT + number)[0]) for number in range(notes)]
    return [engine.submit(prompt, sampling, speculation=asked).result() for prompt in prompts]


def quality(engine: Engine, results: Sequence[Any], plain: Sequence[Any]) -> dict[str, float]:
    """Tokens per step, and the shares of right notes, of right words, and of texts that plain decoding gives."""
    tokens, steps = (sum(getattr(one.stats, name) for one in results) for name in ("num_output_tokens", "num_steps"))
    words = [engine.tokenizer.convert_ids_to_tokens(list(one.token_ids)) for one in results]
    found = [canonical(" ".join(word for word in each if word != "</s>")) for each in words]
    compared = [(each, canonical(pair(HELD_OUT + number)[1])) for number, each in enumerate(found)]
    hits = sum(sum(map(str.__eq__, one, other)) for one, other in compared)
    return {
        "tokens_per_step": tokens / steps,
        "right": sum(one == other for one, other in compared) / len(results),
        "words_right": hits / sum(max(len(one), len(other)) for one, other in compared),
        "same": sum(one.token_ids == other.token_ids for one, other in zip(results, plain, strict=True)) / len(results),
    }


if __name__ == "__main__":
    run(options(__doc__, steps=2000, notes=100, draws=6), measure)

"""The tables of figures that pages show, by the name that their place on a page has.

A file's name that ends with `*` stands for one file of each machine. What `{runs[both][speed]:.2f}` means is said by
`figure_cells.Cell`.
"""

from __future__ import annotations

from figure_missed import MISSED
from figure_served import SERVED
from figure_table import Line, Table, named, rows, sentence
from figure_trained import TRAINED
from figure_words import (
    BESIDE,
    DESK,
    EQUAL,
    LEFT_OUT,
    POOLS,
    RECORDED,
    RELAXED,
    REPLAYED,
    SAID,
    SOFTWARE,
    VLLM,
    WRITTEN,
)

SPEEDS = {"machine": "{label}", "plain tok/s": "{runs[plain][tokens_per_second]:.1f}"}
WAYS = {way: f"{{runs[{way}][decode_speedup]:.2f}}x" for way in ("draft-only", "cache-only", "both", "repeat")}


def interval(way: str) -> str:
    """The bounds between which the speed lies in 95 of 100 samples of the requests."""
    found = f"runs[{way}][decode_speedup_interval]"
    return f"{{{found}[0]:.2f}} to {{{found}[1]:.2f}}"


WHOLE = "{runs[both][request_speedup]:.2f}x / {runs[repeat][request_speedup]:.2f}x"
ALONE = "{runs[recall-only][decode_speedup]:.2f}x"
PER_STEP = "{runs[both][tokens_per_step]:.1f} / {runs[repeat][tokens_per_step]:.1f}"

AHEAD = ("{runs[%s][seconds_per_request]:.2f}", "{runs[%s][speedup]:.2f}x")
USED = (
    "{runs[%s][run_ahead][used]}/{runs[%s][run_ahead][started]}",
    "{runs[%s][run_ahead][used]}/{runs[%s][run_ahead][calls]}",
    "{runs[%s][wasted]}",
)
SAME = "{runs[%s][equal_transcripts][0]}/{runs[%s][equal_transcripts][1]}"

WRONG = (
    "{modes[%s][tokens_per_second]:.1f} tokens a second, against {modes[nothing][tokens_per_second]:.1f} of a drafter "
    "that proposes nothing"
)
UNAIDED = " and {modes[plain][tokens_per_second]:.1f} without speculation"
STEPS = "{modes[%s][tokens_per_step]:.2f}, {modes[%s][decode_tokens_per_second]:.1f}/s"


TABLES = {
    **TRAINED,
    **SERVED,
    "missed": MISSED,
    "demo": rows(
        "demo-*",
        SPEEDS
        | WAYS
        | {"recall alone": ALONE, "whole requests, both / repeat": WHOLE, "tokens per step, both / repeat": PER_STEP},
    ),
    "demo-short": Table(
        (*SPEEDS, *SAID.values(), "whole requests, both / seen before"),
        (Line("demo-*", (*SPEEDS.values(), *WAYS.values(), WHOLE)),),
    ),
    "untrained": sentence(
        "untrained",
        "Without training for the desk: "
        + ", ".join(f"{way} {{runs[{way}][decode_speedup]:.2f}}x ({interval(way)})" for way in ("cache-only", "both"))
        + f", repeat {{runs[repeat][decode_speedup]:.2f}}x ({interval('repeat')}); the untrained draft model, "
        "`first-layers:4`, alone {runs[draft-only][decode_speedup]:.2f}x",
    ),
    "run-ahead": Table(
        ("run", "seconds per request", "speed", "used of started", "used of calls", "wasted", "transcripts equal"),
        (
            *named("run-ahead", (), {"neither": "neither", "tokens only": "tokens only"}, *AHEAD, *"–––", SAME).lines,
            *named("run-ahead", (), {"tools only": "tools only", "both": "both"}, *AHEAD, *USED, SAME).lines,
        ),
    ),
    "run-ahead-sources": sentence(
        "run-ahead",
        "Of {runs[both][run_ahead][by_source][memory][started]} calls that memory started "
        "{runs[both][run_ahead][by_source][memory][used]} were used, of "
        "{runs[both][run_ahead][by_source][stream][started]} that the stream started "
        "{runs[both][run_ahead][by_source][stream][used]}. {runs[both][share_of_reading_time_hidden]:.0%} of the "
        "reading time is hidden",
    ),
    "rows": rows(
        "rows-*", {"rows": "{label}"} | {str(n): f"{{steps[{n}][together]:.1f}}" for n in (1, 4, 8, 16, 32, 48)}
    ),
    "busy": named(
        "busy",
        ("beside", "plain tok/s", "both", "repeat"),
        BESIDE,
        "{%s[plain][tokens_per_second]:.1f}",
        "{%s[both][times_plain]:.2f}x",
        "{%s[repeat][times_plain]:.2f}x",
    ),
    "adversarial": rows(
        "adversarial-*",
        {
            "times plain, on": "{label}",
            "a cache full of wrong answers": "{modes[adversarial][speedup_vs_plain]:.2f}x",
            "an empty cache": "{modes[ours-cold][speedup_vs_plain]:.2f}x",
        },
    ),
    "software": named(
        "software",
        ("", "tok/s", "against `generate`", "tokens per step"),
        SOFTWARE,
        "{modes[%s][tokens_per_second]:.1f}",
        "{modes[%s][speedup_vs][generate]:.2f}x",
        "{modes[%s][tokens_per_step]:.2f}",
    ),
    "llama-cpp": sentence(
        "llama-cpp",
        "llama.cpp, plain, four bits a weight: {llama.cpp, plain[tokens_per_second]:.1f} tok/s; ours plain "
        "{ours, plain[tokens_per_second]:.1f}, warm {ours, warm[tokens_per_second]:.1f}",
    ),
    "replay": named(
        "replay",
        ("tau-bench, at most 32 nodes", "tok/step", "vs best", "on tool calls"),
        REPLAYED,
        "{%s[budgets][32][tokens_per_step]:.2f}",
        "{%s[budgets][32][ratio]:.2f}x",
        "{%s[budgets][32][tool_calls][tokens_per_step]:.2f}, {%s[budgets][32][tool_calls][ratio]:.2f}x",
    ),
    "ablation": named(
        "ablation", ("left out", ""), LEFT_OUT, "{drafters[%s][left]!c:+.2g} % ({drafters[%s][left_tool_calls]!c:+.2g})"
    ),
    "calibration": rows(
        "ablation",
        {"called likely": "{predicted:.0%}", "accepted": "{observed:.0%}", "candidates": "{candidates:,}"},
        each="calibration[bins]",
    ),
    "actions": sentence(
        "actions",
        "Of {read_only_calls} read-only calls {started} start ahead and {used} of these are used: precision "
        "{precision:.2f}, recall {recall:.2f}",
    ),
    "capacity": sentence(
        "capacity",
        "On one thread MiniLM embeds {embedding[one by one][texts_per_second]:.0f} short texts a second one by one, "
        "and {embedding[in batches of eight][texts_per_second]:.0f} in batches of eight; a proxy orders "
        "{routing[replicas]} replicas for a request in {routing[milliseconds]:.2g} ms",
    ),
    "steps": sentence(
        "steps",
        "A step with {with a tree[rows]:.0f} rows spends {with a tree[outside_forward]:.1f} ms outside the forward "
        "pass: {with a tree[parts][match and plan]:.2f} to match and plan, "
        "{with a tree[parts][verify and commit]:.2f} to verify and commit, "
        "{with a tree[parts][between the steps]:.2f} to deliver",
    ),
    "vllm-recorded": named(
        "vllm-recorded",
        ("drafter", "tokens per step", "per second of decoding", "per step, beside `ngram`", "beside `suffix`"),
        RECORDED,
        "{modes[%s][tokens_per_step]:.2f}",
        "{modes[%s][decode_tokens_per_second]:.1f}",
        "{modes[%s][beside][ngram]:.2f}",
        "{modes[%s][beside][suffix]:.2f}",
    ),
    "vllm-pools": Table(
        ("recorded, warmed by", "plain", "`ngram`", "`suffix`", "ours", "ours, width free"),
        tuple(
            Line(
                file, (pool, "{modes[plain][decode_tokens_per_second]:.1f}/s", *(STEPS.replace("%s", d) for d in VLLM))
            )
            for file, pool in POOLS.items()
        ),
    ),
    "vllm-misled": Table(
        (),
        (
            Line("vllm-adversarial", (f"With all of our drafters: {WRONG}".replace("%s", "adversarial"),)),
            Line(
                "vllm-misled",
                (f"With recall alone, which the wrong answers mislead: {WRONG}".replace("%s", "misled") + UNAIDED,),
            ),
        ),
    ),
    "vllm-desk": named(
        "vllm-desk",
        ("drafter", "tokens per step", "tokens per second"),
        DESK,
        "{modes[%s][tokens_per_step]:.2f}",
        "{modes[%s][tokens_per_second]:.1f}",
    ),
    "bitwise": rows(
        "bitwise-*",
        {"on": "{label}"}
        | {name: f"{{equal_texts[{way}][0]}} of {{equal_texts[{way}][1]}}" for way, name in EQUAL.items()}
        | {"time of a prompt of 600": "{cost_ms[prompt of 600][ratio]:.2f} times"},
    ),
    "rounding": sentence(
        "rounding",
        "{identical_after_tokens[64]} of {texts} greedy {dtype} texts were equal after 64 tokens and "
        "{identical_after_tokens[500]} after 500",
    ),
    "verify": rows(
        "verify",
        {"accepted tokens (speed)": "{name}"}
        | {f"T = {t}": f"{{temperatures[{t}][0]:.2f}} ({{temperatures[{t}][1]:.2f}})" for t in ("0.3", "0.7", "1")},
        each="cases",
    ),
    "grammar": named(
        "grammar",
        ("", "new mask, 49,152 tokens", "new mask, 151,936 tokens", "applying a kept mask"),
        WRITTEN,
        "{places[%s][mask][0]:,.0f}",
        "{places[%s][mask][1]:,.0f}",
        "{places[%s][kept_mask_on_a_row][0]:,.0f}; {places[%s][kept_mask_on_a_row][1]:,.0f}",
    ),
    "hybrid": sentence(
        "hybrid",
        "The hybrid takes {hybrid[tokens_per_step]:.1f} tokens per step, the other {attention[tokens_per_step]:.1f}. A "
        "step over 16 nodes took {hybrid[ratio]:.2f} times as long as a step over one with the hybrid, "
        "{attention[ratio]:.2f} times with attention",
    ),
    "seq2seq": named(
        "seq2seq",
        ("way", "tokens per step", "notes right", "words right", "same as plain"),
        RELAXED,
        "{ways[%s][tokens_per_step]:.2f}",
        "{ways[%s][right]:.1%}",
        "{ways[%s][words_right]:.1%}",
        "{ways[%s][same]:.1%}",
    ),
}

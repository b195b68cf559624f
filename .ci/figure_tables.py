"""The tables of figures that pages show, by the name that their place on a page has.

A file's name that ends with `*` stands for one file of each machine. What `{runs[both][speed]:.2f}` means is said by
`figure_cells.Cell`.
"""

from __future__ import annotations

from figure_missed import MISSED
from figure_table import Line, Table, lines, named, rows, sentence
from figure_trained import TRAINED
from figure_words import BESIDE, DESK, EQUAL, LEFT_OUT, LOADS, POOLS, RECORDED, REPLAYED, ROUTES, SAID, SOFTWARE, VLLM

SPEEDS = {"machine": "{label}", "plain tok/s": "{runs[plain][tokens_per_second]:.1f}"}
WAYS = {way: f"{{runs[{way}][decode_speedup]:.2f}}x" for way in ("draft-only", "cache-only", "both", "repeat")}

AHEAD = ("{runs[%s][seconds_per_request]:.2f}", "{runs[%s][speedup]:.2f}x")
USED = (
    "{runs[%s][run_ahead][used]}/{runs[%s][run_ahead][started]}",
    "{runs[%s][run_ahead][used]}/{runs[%s][run_ahead][calls]}",
    "{runs[%s][wasted]}",
)
SAME = "{runs[%s][equal_transcripts][0]}/{runs[%s][equal_transcripts][1]}"

WRONG = (
    "{modes[%s][tokens_per_second]:.1f} tokens a second against {modes[nothing][tokens_per_second]:.1f} of a drafter "
    "that proposes nothing"
)
STEPS = "{modes[%s][tokens_per_step]:.2f}, {modes[%s][decode_tokens_per_second]:.1f}/s"
SERVER = "{one stream[%s][server]:.1f} and {one stream[%s][process]:.1f} tok/s"


def served(file: str, what: str, measured: str) -> Line:
    """A line of the table on serving, with its machine and its command."""
    return Line(file, (what, measured, "{label}", "`{command}`"))


SERVING = (
    served("server", "server against in process, plain", SERVER.replace("%s", "plain")),
    served(
        "server",
        "the same, speculated",
        f"{SERVER}, {{one stream[%s][ratio]:.2f}} round by round".replace("%s", "speculated"),
    ),
    served(
        "server",
        "first token of a known prompt",
        "{one stream[first_token_ms][server]:.1f} ms; in process {one stream[first_token_ms][process]:.1f}",
    ),
    served(
        "server-memory",
        "memory after 4 and 20 minutes of traffic",
        "{soak[by_minute][4][mebibytes]:,.0f} and {soak[by_minute][20][mebibytes]:,.0f} MiB",
    ),
    served(
        "start",
        "first answer after a start; model to be converted",
        "{again[first_answer]:.0f} s; {first[first_answer]:.0f} s",
    ),
    served(
        "restart",
        "first token after a restart, with [kept prefixes](../how-to/restart.md)",
        "{with_ms:.0f} ms instead of {without_ms:.0f}",
    ),
    served(
        "concurrency",
        "four requests at once, prompts read",
        "{concurrency[prompts_read][ratio]:.2f} times one after the other",
    ),
    served("service", "drafting for another engine, 16 rows", "{rows[16][step_work_us]!k:.2g} ms a step"),
)

RAY = {
    "what one replica stored is drafted by another after": "{kills[store_to_draft_seconds][least]:.2f} to "
    "{kills[store_to_draft_seconds][most]:.2f} s, {kills[store_to_draft_seconds][times]} times, the other's request "
    "included",
    "kills of a replica while eight tenants ask": "{kills[kills]} kills: {kills[answered]} of {kills[requests]} "
    "requests answered, {kills[changed]} changed; {kills[repeated]} streams were cut, and asked again as "
    "their error says",
    "time per token, beside two plain servers with as many threads": "{ingress[ms_per_token][ray]:.1f} ms and "
    "{ingress[ms_per_token][servers]:.1f} ms: {ingress[ms_per_token][ratio]:.2f} times",
    "time to the first token": "{ingress[first_token_ms][more]:.1f} ms more than of a plain server; of these an "
    "application that does nothing has {empty application[first_event_ms][more]:.1f}",
}

TABLES = TRAINED | {
    "missed": MISSED,
    "demo": rows(
        "demo-*",
        SPEEDS
        | WAYS
        | {"tokens per step, both / repeat": "{runs[both][tokens_per_step]:.1f} / {runs[repeat][tokens_per_step]:.1f}"},
    ),
    "demo-short": Table(
        (*SPEEDS, *SAID.values()),
        tuple(Line(file, (*SPEEDS.values(), *WAYS.values())) for file in ("demo-amx", "demo-avx2", "demo-avx2-busy")),
    ),
    "untrained": sentence(
        "untrained",
        "Without training for the desk: cache-only {runs[cache-only][decode_speedup]:.2f}x, both "
        "{runs[both][decode_speedup]:.2f}x, repeat {runs[repeat][decode_speedup]:.2f}x",
    ),
    "run-ahead": Table(
        ("run", "seconds per request", "speed", "used of started", "used of calls", "wasted", "transcripts equal"),
        (
            *named("run-ahead", (), {"neither": "neither", "tokens only": "tokens only"}, *AHEAD, *"–––", SAME).lines,
            *named("run-ahead", (), {"tools only": "tools only", "both": "both"}, *AHEAD, *USED, SAME).lines,
        ),
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
        {"a cache full of wrong answers, on": "{label}", "times plain": "{modes[adversarial][speedup_vs_plain]:.2f}x"},
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
    "routing": named(
        "routing",
        ("replicas", "tokens per step", "memory at hand", "prompt kept", "replicas used", "busiest"),
        ROUTES,
        "{ways[%s][tokens_per_step]:.2f}",
        "{ways[%s][hit_rate]:.0%}",
        "{ways[%s][prefix_hit_rate]:.0%}",
        "{ways[%s][replicas_used]}",
        "{ways[%s][busiest_share]:.0%}",
    ),
    "serving": Table(("what", "measured", "on", "command"), SERVING),
    "start": sentence(
        "start",
        "`precedent serve` with the packaged model gave its first answer {again[first_answer]:.0f} s after its start, "
        "and {first[first_answer]:.0f} s where the model had yet to be converted",
    ),
    "restart": sentence(
        "restart",
        "The first token of a prompt of {prompt_tokens} tokens came after {with_ms:.0f} ms instead of "
        "{without_ms:.0f} ms",
    ),
    "concurrency": sentence(
        "concurrency",
        "Four requests at once brought {concurrency[prompts_read][ratio]:.2f} times the tokens per second of one after "
        "the other, once their prompts were read, and {concurrency[ratio]:.2f} times where every prompt was new",
    ),
    "service": rows(
        "service",
        {
            "rows in the batch": "{rows}",
            "µs a row": "{row_work_us:.0f}",
            "ms a step": "{step_work_us!k:.2g}",
            "ms on the clock": "{step_us!k:.2g}",
            "drafted a row": "{drafted_a_row:.1f}",
            "accepted a row": "{accepted_a_row:.1f}",
        },
        each="rows",
    ),
    "ray": lines("ray", ("", ""), list(RAY.items())),
    "read-ahead": sentence(
        "store-load",
        "A new replica reads {warm[completions]:,} completions ahead from PostgreSQL in {warm[tokens_seconds]:.0f} s, "
        "and their vectors in {warm[vectors_seconds]:.0f} s; they take {warm[memory_mebibytes]:.0f} MiB",
    ),
    "store-load": named(
        "store-load",
        ("clients", "calls per second", "median ms", "p95 ms"),
        LOADS,
        "{load[%s][per_second]:,.0f}",
        "{load[%s][median_ms]:.1f}",
        "{load[%s][p95_ms]:.1f}",
    ),
    "store": rows(
        "store",
        {
            "completions": "{completions:,}",
            "insert": "{insert_ms:.1f} ms",
            "open": "{later start[open_ms]:.0f} ms",
            "all loaded": "{later start[start_ms]!k:.2g} s",
            "lookup p50 / p99": "{later start[lookup_ms_p50]:.1f} / {later start[lookup_ms_p99]:.1f} ms",
            "memory": "{later start[memory_mb]!m}",
            "table / index on disk": "{mb_on_disk[precedent.sqlite]!m} / {mb_on_disk[precedent.sqlite-index]!m}",
        },
        each="sizes",
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
            Line("vllm-adversarial", (WRONG.replace("%s", "adversarial"),)),
            Line("vllm-misled", (f"With recall alone: {WRONG}".replace("%s", "misled"),)),
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
    "grammar": rows(
        "grammar",
        {
            "": "{name}",
            "new mask, 49,152 tokens": "{mask[0]:,.0f}",
            "new mask, 151,936 tokens": "{mask[1]:,.0f}",
            "applying a kept mask": "{kept_mask_on_a_row[0]:,.0f}; {kept_mask_on_a_row[1]:,.0f}",
        },
        each="places",
    ),
    "hybrid": sentence(
        "hybrid",
        "The hybrid takes {hybrid[tokens_per_step]:.1f} tokens per step, the other {attention[tokens_per_step]:.1f}. A "
        "step over 16 nodes took {hybrid[ratio]:.2f} times as long as a step over one with the hybrid, "
        "{attention[ratio]:.2f} times with attention",
    ),
    "seq2seq": rows(
        "seq2seq",
        {
            "way": "{way}",
            "tokens per step": "{tokens_per_step:.2f}",
            "notes right": "{right:.1%}",
            "words right": "{words_right:.1%}",
            "same as plain": "{same:.1%}",
        },
        each="ways",
    ),
}

"""The tables on serving: a server, a store, replicas, other engines."""

from __future__ import annotations

from figure_table import Line, Table, lines, named, rows, sentence
from figure_words import LOADS

SERVER = "{one stream[%s][server]:.1f} and {one stream[%s][process]:.1f} tok/s"


def served(file: str, what: str, measured: str) -> Line:
    """A line of the table on serving, with its machine and its command."""
    return Line(file, (what, measured, "{label}", "`{command}`"))


SERVING = (
    served("server", "server against in process, plain", SERVER.replace("%s", "plain")),
    served(
        "server",
        "the same, answers that the cache holds",
        f"{SERVER}; quotient, median of rounds: {{one stream[%s][ratio]:.2f}}".replace("%s", "speculated"),
    ),
    served(
        "server",
        "first token of a known prompt",
        "{one stream[first_token_ms][server]:.1f} ms; in process {one stream[first_token_ms][process]:.1f}; "
        "median difference {one stream[first_token_ms][more]:.1f}",
    ),
    served(
        "server-memory",
        "memory after 4 and 20 minutes of traffic",
        "{soak[by_minute][4][mebibytes]:,.0f} and {soak[by_minute][20][mebibytes]:,.0f} MiB",
    ),
    served(
        "start",
        "first answer after a start; if the model must first be converted",
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
    "requests answered, {kills[changed]} changed; {kills[repeated]} streams were cut, and asked again",
    "time per token, beside two plain servers with as many threads": "{ingress[ms_per_token][ray]:.1f} ms and "
    "{ingress[ms_per_token][servers]:.1f} ms: {ingress[ms_per_token][ratio]:.2f} times",
    "time to the first token": "{ingress[first_token_ms][more]:.1f} ms more than of a plain server; of these an "
    "application that does nothing has {empty application[first_event_ms][more]:.1f}",
}

SERVED = {
    "serving": Table(("what", "measured", "on", "command"), SERVING),
    "start": sentence(
        "start",
        "`precedent serve` with the packaged model gave its first answer {again[first_answer]:.0f} s after its start, "
        "and {first[first_answer]:.0f} s where the model had yet to be converted",
    ),
    "restart": sentence(
        "restart",
        "The first token of a prompt of {prompt_tokens} tokens came after {with_ms:.0f} ms instead of "
        "{without_ms:.0f} ms; {same_answers[0]} of {same_answers[1]} greedy answers were the same texts",
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
}

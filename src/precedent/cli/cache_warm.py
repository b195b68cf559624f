"""`precedent cache warm`: fills a cache from recorded calls, so that the first request already finds completions."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from precedent.cache.filling import FillCounts, Vectors
from precedent.cli.cache_store import (
    UNBOUNDED,
    CacheArgument,
    EmbedderOption,
    NeverStoreOption,
    RedactOption,
    opened,
    redaction,
)
from precedent.cli.options import DEFAULT_TARGET, ChatTemplateOption, JsonOption, TargetOption, write_json
from precedent.cli.progress import Progress

SourcesArgument = Annotated[
    list[Path],
    typer.Argument(
        exists=True,
        dir_okay=False,
        metavar="FILE…",
        help="OpenAI-format chats or LangSmith runs (JSONL, .gz), or LangChain answer caches (SQLite).",
        show_default=False,
    ),
]


def warm(
    ctx: typer.Context,
    cache: CacheArgument,
    sources: SourcesArgument,
    target: TargetOption = DEFAULT_TARGET,
    chat_template: ChatTemplateOption = None,
    embedder: EmbedderOption = None,
    tenant: Annotated[str, typer.Option(help="Store the completions under this tenant.")] = "default",
    never_store: NeverStoreOption = None,
    redact: RedactOption = None,
    json_file: JsonOption = None,
) -> None:
    """Store recorded answers as if the model had given them. After an interruption, run it again to continue."""
    from precedent.langchain.recorded_answers import AnswerReader, store_answers
    from precedent.target.load.loading import load_tokenizer

    hook = redaction(never_store, redact)
    reader = AnswerReader(load_tokenizer(target, chat_template), tenant=tenant)
    progress: Progress = ctx.obj
    progress.show("reading the files")
    with opened(cache, create=True, bounds=UNBOUNDED) as store:
        calls = progress.each(_calls(sources, reader.skipped), "warming the cache", sum(map(_num_calls, sources)))
        filled = store_answers(store, calls, reader, Vectors(store, embedder), redact=hook)
    progress.rest()
    results = {"read": reader.num_read, **_counts(filled), "skipped": reader.skipped.as_list()}
    if json_file is not None:
        write_json(json_file, results)
    _print(results)


def _calls(sources: Iterable[Path], skipped: Any) -> Iterator[Any]:
    from precedent.langchain.answer_caches import is_answer_cache, read_answer_cache
    from precedent.text.traces import read_trajectories

    for source in sources:
        if is_answer_cache(source):
            yield from read_answer_cache(source, skipped.add)
        else:
            yield from read_trajectories([source], skipped.add)


def _num_calls(source: Path) -> int:
    from precedent.langchain.answer_caches import is_answer_cache, num_entries

    if is_answer_cache(source):
        return num_entries(source)
    opener = gzip.open if source.suffix == ".gz" else open
    with opener(source, "rb") as lines:
        return sum(1 for _ in lines)


def _counts(filled: FillCounts) -> dict[str, int]:
    return asdict(filled)


def _print(results: dict[str, Any]) -> None:
    print(f"{results['stored']} completions stored, {results['known']} already present")
    if results["refused"]:
        print(f"{results['refused']} refused: the cache is read-only")
    if results["withheld"]:
        print(f"{results['withheld']} withheld by redaction")
    for skipped in results["skipped"]:
        print(f"{skipped['count']} skipped: {skipped['reason']} (first: {skipped['first']})")

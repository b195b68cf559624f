"""`precedent run`: asks a model one question and streams its answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from precedent.cli import options
from precedent.cli.progress import Progress
from precedent.pages.colours import Palette

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from precedent.engine.engine import Emission, Generation, GenerationResult


def run(
    ctx: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(metavar="[MODEL] PROMPT", help="What to ask; before it the model, in place of --target."),
    ],
    target: options.TargetOption = options.DEFAULT_TARGET,
    draft_model: options.DraftModelOption = None,
    draft_device: options.DraftDeviceOption = None,
    loop: options.LoopOption = None,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = None,
    quantization: options.QuantizationOption = None,
    accurate: options.AccurateOption = False,
    backend: options.BackendOption = None,
    n_gpu_layers: options.GpuLayersOption = None,
    chat_template: options.ChatTemplateOption = None,
    bitwise: Annotated[
        bool,
        typer.Option("--bitwise", help="Exactly the tokens of plain decoding; fails if the model cannot do it."),
    ] = False,
    cuda_graphs: options.CudaGraphsOption = False,
    system: Annotated[str, typer.Option(help="System message.", show_default=False)] = "",
    sampling_of: options.SamplingOption = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens of this total probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many of the most likely tokens; 0 is off.")] = 0,
    min_p: Annotated[
        float, typer.Option(help="Leave out tokens below this fraction of the highest probability.")
    ] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Values above 1 make repetition less likely.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the random numbers.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 512,
    cache: Annotated[
        str | None, typer.Option(help="Speculation cache (folder, file or URL) to recall from and store the answer in.")
    ] = None,
    tenant: Annotated[
        str, typer.Option(help="Tenant of the cache; tenants never see each other's completions.")
    ] = "default",
    show_sources: Annotated[bool, typer.Option("--show-sources", help="Colour each token by its source.")] = False,
    json: options.JsonOption = None,
) -> None:
    """Ask a model one question and stream its answer to standard output."""
    from precedent.config import SamplingParams

    target, prompt = _asked(ctx, words, target)
    sampling = SamplingParams(
        temperature, top_k, top_p, min_p, repetition_penalty, seed=seed, max_tokens=max_tokens
    )  # raises for an invalid value before the model is loaded
    from precedent.cache import SpeculationCache
    from precedent.engine.engine import Engine
    from precedent.engine.options import EngineOptions
    from precedent.target.load.source import samples_as_recommended
    from precedent.text.prompt import render_prompt
    from precedent.text.query import recall_query

    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    progress: Progress = ctx.obj
    with ExitStack() as stack:
        chosen = EngineOptions(
            draft_model=draft_model, cache=stack.enter_context(SpeculationCache.open(cache)) if cache else None,
            device=device, draft_device=draft_device, dtype=dtype, quantization=quantization,
            accurate=accurate, backend=backend, n_gpu_layers=n_gpu_layers, chat_template=chat_template,
            bitwise=bitwise, cuda_graphs=cuda_graphs, loop=loop,
        )  # fmt: skip
        progress.show(f"loading {target}")
        engine = stack.enter_context(closing(Engine.load(target, chosen)))
        if samples_as_recommended(target, sampling_of):
            sampling = replace(sampling, **_not_given(ctx, engine.sampling_defaults))
        progress.show("reading the prompt")
        prompt_ids = render_prompt(engine.tokenizer, messages)
        generation = engine.submit(prompt_ids, sampling, tenant=tenant, query=recall_query(messages))
        emissions = _from_the_first(generation, progress)
        if show_sources:
            _stream_with_sources(emissions, engine.tokenizer)
        else:
            for emission in emissions:
                typer.echo(emission.text, nl=False)
            typer.echo()
        options.write_json(json, _results(target, generation.result()))


def _asked(ctx: typer.Context, words: list[str], target: str) -> tuple[str, str]:
    """The target, which may stand before the prompt, and the prompt."""
    *models, prompt = words
    source = ctx.get_parameter_source("target")
    twice = models and source is not None and source.name == "COMMANDLINE"
    alone = not models and " " not in prompt and prompt.startswith(("ollama:", "lmstudio:", "hf:"))
    if twice or alone or len(models) > 1:
        raise typer.BadParameter("give the question after the model's name, in quotes, and the model once")
    return (models[0] if models else target), prompt


def _not_given(ctx: typer.Context, defaults: dict[str, Any]) -> dict[str, Any]:
    """The settings that the command line leaves open."""
    sources = {name: ctx.get_parameter_source(name) for name in defaults}
    return {name: defaults[name] for name, source in sources.items() if source is None or source.name == "DEFAULT"}


def _from_the_first(generation: Generation, progress: Progress) -> Iterator[Emission]:
    """Yield the emissions; stop the progress display with the first, because the answer shows it from then on."""
    for emission in generation:
        progress.rest()
        yield emission


def _stream_with_sources(emissions: Iterable[Emission], tokenizer: PreTrainedTokenizerBase) -> None:
    """Print the answer in colours, even into a pipe, since the user asked for them; then the legend on stderr."""
    console, counts, palette = Console(force_terminal=True), Counter[str](), Palette()
    for source, text, num_tokens in _pieces(emissions, tokenizer):
        counts[source] += num_tokens
        console.print(Text(text, palette.of(source).terminal), end="", soft_wrap=True)
    console.print()
    legend = [Text(f"■ {source} {counts[source]}", colour.terminal) for source, colour in palette.legend(+counts)]
    Console(stderr=True, force_terminal=True).print(Text("   ").join([Text("tokens by source:"), *legend]))


def _pieces(emissions: Iterable[Emission], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, str, int]]:
    """The answer as (source, text, number of tokens); consecutive tokens of one step and source form one piece."""
    from precedent.text.assembly import IncrementalDetokenizer

    detokenizer, source = IncrementalDetokenizer(tokenizer), "target"
    for emission in emissions:
        for source, pairs in groupby(zip(emission.sources, emission.token_ids, strict=True), itemgetter(0)):
            token_ids = [token_id for _, token_id in pairs]
            yield source, detokenizer.push(token_ids), len(token_ids)
    yield source, detokenizer.flush(), 0


def _results(target: str, result: GenerationResult) -> dict[str, Any]:
    stats = result.stats
    return {
        "target": target,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "cached_prompt_tokens": result.cached_prompt_tokens,
        "tokens": len(result.token_ids),
        "tokens_per_step": stats.tokens_per_step,
        "tokens_per_second": stats.tokens_per_second,
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        "speculation": stats.as_dict(),
    }

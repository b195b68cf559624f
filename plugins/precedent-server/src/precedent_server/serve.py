"""`precedent serve`: OpenAI's HTTP interface over one or several models."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from precedent.cli.options import (
    DEFAULT_TARGET,
    AccurateOption,
    BackendOption,
    ChatTemplateOption,
    CudaGraphsOption,
    DeviceOption,
    DraftDeviceOption,
    DraftModelOption,
    DtypeOption,
    GpuLayersOption,
    QuantizationOption,
    SamplingOption,
)
from precedent.cli.progress import Progress
from precedent.errors import ConfigError

ENVIRONMENT = "PRECEDENT_SERVE"
"""How the names of options begin in the environment: `--max-queued` is PRECEDENT_SERVE_MAX_QUEUED."""


def _configured(ctx: typer.Context, path: Path | None) -> Path | None:
    """Read the options in a TOML file; those of the command line and of the environment go first."""
    if path is None:
        return None
    known = {name for parameter in ctx.command.params if (name := parameter.name) not in (None, "config", "help")}
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the options in {str(path)!r}: {error}") from error
    ctx.default_map = {name.replace("-", "_"): value for name, value in found.items()}
    if unknown := ctx.default_map.keys() - known:
        raise ConfigError(f"{str(path)!r} has an unknown option {min(unknown)!r}; known: {', '.join(sorted(known))}")
    return path


commands = typer.Typer()


@commands.command(
    context_settings={"auto_envvar_prefix": ENVIRONMENT},
    epilog="Example: precedent serve --target Qwen/Qwen3-4B --cache orders.db",
)
def serve(
    ctx: typer.Context,
    target: Annotated[str, typer.Option("--target", help="Target model: see `precedent run --help`.")] = DEFAULT_TARGET,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="NAME=TARGET, repeated: several models by name, instead of --target."),
    ] = None,
    model_dir: Annotated[
        Path | None,
        typer.Option(
            "--model-dir", help="Folder whose GGUF files and checkpoints are loaded when a client asks for one by name."
        ),
    ] = None,
    allow_load: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-load",
            help="Name or pattern such as 'ollama:*', repeated: models of other programs here that clients may load.",
        ),
    ] = None,
    max_model_bytes: Annotated[
        int | None,
        typer.Option(
            "--max-model-bytes",
            help="Most bytes of loaded weights. Default: those at the start, and half of the memory then free.",
        ),
    ] = None,
    keep_alive: Annotated[
        float | None,
        typer.Option(
            "--keep-alive",
            help="Seconds for which an idle model stays loaded. Default: 300, and forever if --model names it.",
        ),
    ] = None,
    draft_model: DraftModelOption = None,
    draft_device: DraftDeviceOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    quantization: QuantizationOption = None,
    accurate: AccurateOption = False,
    backend: BackendOption = None,
    n_gpu_layers: GpuLayersOption = None,
    chat_template: ChatTemplateOption = None,
    sampling: SamplingOption = None,
    bitwise: Annotated[bool, typer.Option("--bitwise", help="Exactly the tokens of plain decoding.")] = False,
    cuda_graphs: CudaGraphsOption = False,
    cache: Annotated[
        str | None,
        typer.Option(
            "--cache",
            help="Speculation cache: a folder, file or URL. A URL with a password belongs in the environment.",
        ),
    ] = None,
    max_cache_bytes: Annotated[int | None, typer.Option(help="Most bytes of the cache. Default: 512 MiB.")] = None,
    max_tenant_bytes: Annotated[int | None, typer.Option(help="Most bytes of one tenant's completions.")] = None,
    max_age: Annotated[float | None, typer.Option(help="Seconds after which a completion is deleted.")] = None,
    keep_prefixes: Annotated[
        bool, typer.Option("--keep-prefixes", help="Keep prompts' beginnings across restarts.")
    ] = False,
    host: Annotated[
        str, typer.Option("--host", help="Address; any but the loopback address needs --api-keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port; 0 is any free one.")] = 8000,
    api_keys: Annotated[
        Path | None, typer.Option("--api-keys", help="File of keys, tenants and roles ('precedent keys add').")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", help="PEM file of a certificate: serve HTTPS. SIGHUP reads it again.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="PEM file of its key, without a password.")] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option("--allowed-hosts", help="Name by which clients may call this server, repeated; '*' is any."),
    ] = None,
    cors_origins: Annotated[
        list[str] | None,
        typer.Option("--cors-origins", help="Origin whose web pages may use this server, repeated; '*' is any."),
    ] = None,
    max_queued: Annotated[int, typer.Option("--max-queued", help="Answers that may run or wait at once.")] = 256,
    max_queued_per_key: Annotated[int, typer.Option("--max-queued-per-key", help="The same, of one key.")] = 64,
    requests_per_minute: Annotated[
        int | None, typer.Option(help="Requests that a key may make in a minute, unless the key file says otherwise.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Tokens of prompts and answers that a key may use in a minute, likewise.")
    ] = None,
    max_connections: Annotated[
        int, typer.Option("--max-connections", help="Connections that may be open at once.")
    ] = 512,
    request_seconds: Annotated[float, typer.Option("--request-seconds", help="Longest time for an answer.")] = 600.0,
    grace_seconds: Annotated[
        float, typer.Option("--grace-seconds", help="Time for running answers when told to stop.")
    ] = 30.0,
    inspect: Annotated[
        bool,
        typer.Option(
            "--inspect", help="Keep the last steps for administrators to look at, other users' words included."
        ),
    ] = False,
    log_json: Annotated[bool, typer.Option("--log-json", help="Write the access log as JSON lines.")] = False,
    config: Annotated[
        Path | None,
        typer.Option("--config", is_eager=True, callback=_configured, help="TOML file with any of these options."),
    ] = None,
) -> None:
    """Serve models under OpenAI's HTTP interface: every client of it can use them."""
    from precedent.cache import Bounds
    from precedent.engine.options import EngineOptions
    from precedent_server.access import AccessRules
    from precedent_server.dashboard import KEPT_STEPS
    from precedent_server.keys import KeyFile
    from precedent_server.running import check_address, check_port, hangups_ignored
    from precedent_server.running import serve as serve_until_told
    from precedent_server.serving import ModelOptions, named_models, opened, served_name
    from precedent_server.settings import ServerLimits
    from precedent_server.tls import certificate_of

    limits = ServerLimits(
        max_queued=max_queued,
        max_queued_per_key=max_queued_per_key,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_connections=max_connections,
        request_seconds=request_seconds,
        grace_seconds=grace_seconds,
    )
    certificate = certificate_of(tls_cert, tls_key)
    access = AccessRules(tuple(allowed_hosts or ()), tuple(cors_origins or ()))
    check_address(host, has_keys=api_keys is not None, rules=access)
    keys = None if api_keys is None else KeyFile(api_keys)
    options = EngineOptions(
        draft_model=draft_model, draft_device=draft_device, device=device, dtype=dtype,
        quantization=quantization, accurate=accurate, backend=backend, n_gpu_layers=n_gpu_layers,
        bitwise=bitwise, cuda_graphs=cuda_graphs,
        keep_prefixes=keep_prefixes, chat_template=chat_template,
    )  # fmt: skip
    given = {"max_bytes": max_cache_bytes, "max_tenant_bytes": max_tenant_bytes, "max_age": max_age}
    asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    bounds = Bounds(**asked) if asked else None
    progress: Progress = ctx.obj
    models, source = named_models(model or ()), ctx.get_parameter_source("target")
    is_named = source is not None and source.name != "DEFAULT"  # the default target may be named as well
    if not models and (is_named or not (model_dir or allow_load)):
        models = {served_name(target): target}
    more = ModelOptions(model_dir, tuple(allow_load or ()), max_model_bytes, keep_alive)

    on_demand = [f"models of {place}" for place in (model_dir, *more.allowed) if place is not None]
    served = ", ".join((*models, *on_demand))
    check_port(host, port)
    with hangups_ignored(), opened(
        models, options, limits, more=more, cache=cache, bounds=bounds, keys=keys, access=access, sampling=sampling,
        kept_steps=KEPT_STEPS if inspect else 0, loading=lambda target: progress.show(f"loading {target}"),
    ) as serving:  # fmt: skip
        progress.rest()
        serve_until_told(
            serving, host, port, log_json=log_json, certificate=certificate,
            ready=lambda address: typer.echo(f"serving {served} at {address}/v1", err=True),
        )  # fmt: skip

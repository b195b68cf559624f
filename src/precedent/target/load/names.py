"""Names that can be no model here, and what to write instead: said at once, before anybody is asked."""

from __future__ import annotations

import re
from difflib import get_close_matches

from precedent.errors import ModelLoadError
from precedent.target.load.packaged import DEMO_TARGET

PACKAGED = (DEMO_TARGET,)

NEAR = 0.72
"""How alike a name must be to a packaged one to be taken for it; "smollm2-135m" still is."""

HUB_EXAMPLE = "Qwen/Qwen2.5-0.5B-Instruct"

OF_A_SERVICE = {
    "openai", "azure_openai", "anthropic", "google_genai", "google_vertexai", "mistralai", "groq", "xai", "cohere",
    "bedrock", "fireworks", "together", "perplexity", "deepseek", "openrouter",
}  # fmt: skip
"""What LangChain's `init_chat_model` writes before a colon for models behind an API."""

HOSTED = re.compile(
    r"(gpt-[345]|chatgpt-|o[134](-(mini|pro|preview))?$|claude-|gemini-|grok-|text-davinci|mistral-(small|medium|large)-"
    r"(latest|\d{4}))",
    re.IGNORECASE,
)
"""How names of models begin whose weights nobody hands out."""

TAG = re.compile(r"[\w.-]+(/[\w.-]+)*:[\w.-]+")


def check_name(name: str) -> None:
    """Raise ModelLoadError for a name that is neither a folder's nor the hub's, saying what was probably meant."""
    if name.startswith(("https://", "http://")):
        raise ModelLoadError(f"{name!r} is an address; give the part behind the host alone, as in {HUB_EXAMPLE!r}")
    service, _, rest = name.partition(":")
    if service == "huggingface" and rest:
        raise ModelLoadError(f"write {rest!r}, without huggingface: before it")
    if HOSTED.match(name) or (service in OF_A_SERVICE and rest):
        raise ModelLoadError(
            f"{name!r} is a model behind its maker's API, whose weights cannot be run here; give a Hugging Face id "
            f"such as {HUB_EXAMPLE!r} or a folder (`precedent replay` says what your logs of {name!r} would gain)"
        )
    if TAG.fullmatch(name):
        tag = name.removeprefix("ollama:")
        raise ModelLoadError(
            f"{name!r} is written like a tag of Ollama, which keeps its models to itself; give the Hugging Face id of "
            f"the same model, as in {HUB_EXAMPLE!r}, or the GGUF file that `ollama show --modelfile {tag}` names "
            "behind FROM"
        )
    if "/" not in name and name not in PACKAGED:
        _check_not_mistyped(name)


def _check_not_mistyped(name: str) -> None:
    for meant in get_close_matches(name.lower(), PACKAGED, n=1, cutoff=NEAR):
        raise ModelLoadError(
            f"there is no model {name!r}; did you mean {meant!r}, the packaged one? Models of the Hugging Face hub are "
            "named with their owner, as in HuggingFaceTB/SmolLM2-135M-Instruct"
        )

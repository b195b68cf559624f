"""Rejects names that no model here can have, and says what to write instead, before asking the hub."""

from __future__ import annotations

import re

from precedent.errors import ModelLoadError

ORDER_DESK = "smollm2-135m-order-desk"
"""The demo's own target, which the package precedent-demo builds; only its commands know it by this name."""

HUB_EXAMPLE = "Qwen/Qwen2.5-0.5B-Instruct"

OF_A_SERVICE = {
    "openai", "azure_openai", "anthropic", "google_genai", "google_vertexai", "mistralai", "groq", "xai", "cohere",
    "bedrock", "fireworks", "together", "perplexity", "deepseek", "openrouter",
}  # fmt: skip
"""What LangChain's `init_chat_model` writes before the colon for models behind an API."""

HOSTED = re.compile(
    r"(gpt-[345]|chatgpt-|o[134](-(mini|pro|preview))?$|claude-|gemini-|grok-|text-davinci|mistral-(small|medium|large)-"
    r"(latest|\d{4}))",
    re.IGNORECASE,
)
"""How the names of some models without public weights begin."""

TAG = re.compile(r"[\w.-]+(/[\w.-]+)*:[\w.-]+")


def check_name(name: str) -> None:
    """Raise ModelLoadError for a name that is neither a folder nor a hub id, saying what was probably meant."""
    if name.startswith(("https://", "http://")):
        raise ModelLoadError(f"{name!r} is a URL; give only the part after the host, as in {HUB_EXAMPLE!r}")
    service, _, rest = name.partition(":")
    if service == "huggingface" and rest:
        raise ModelLoadError(f"write {rest!r}, without huggingface: before it")
    if HOSTED.match(name) or (service in OF_A_SERVICE and rest):
        raise ModelLoadError(
            f"{name!r} is available only through its provider's API, so its weights cannot run here; give a Hugging "
            f"Face id such as {HUB_EXAMPLE!r} or a folder (`precedent replay` shows what your logs of {name!r} would "
            "gain)"
        )
    if TAG.fullmatch(name):
        tag = name.removeprefix("ollama:")
        raise ModelLoadError(
            f"{name!r} looks like an Ollama tag, and Ollama keeps its models in its own store; give the Hugging Face "
            f"id of the same model, as in {HUB_EXAMPLE!r}, or the GGUF file that `ollama show --modelfile {tag}` names "
            "after FROM"
        )
    if name == ORDER_DESK:
        raise ModelLoadError(
            f"only `precedent demo` and `precedent train-judge` know {name!r}; give the folder that this prints: "
            "python -c 'from precedent_demo import adapted_target; print(adapted_target())'"
        )

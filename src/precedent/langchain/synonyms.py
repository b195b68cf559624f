"""Translates the argument names of other chat models: tables of synonyms, and hints for names without a counterpart.

A name in none of the tables raises an error that lists all known names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from precedent.errors import ConfigError, UnsupportedError
from precedent.langchain.tools import UNNAMED, is_json_schema
from precedent.runtime.plain_values import is_whole, shown

SAME: dict[str, str] = {
    "model_name": "model",
    "model_id": "model",  # HuggingFacePipeline
    "model_path": "model",  # ChatLlamaCpp
    "repo_id": "model",  # HuggingFaceEndpoint
    "assistant_model": "draft_model",  # transformers
    "torch_dtype": "dtype",
    "num_predict": "max_tokens",  # ChatOllama
    "n_predict": "max_tokens",  # llama.cpp
    "max_new_tokens": "max_tokens",  # transformers
    "max_completion_tokens": "max_tokens",  # OpenAI
    "max_output_tokens": "max_tokens",
    "stop_sequences": "stop",  # Anthropic, Text Generation Inference
    "stop_strings": "stop",  # transformers
    "think": "reasoning",  # Ollama
    "enable_thinking": "reasoning",  # Qwen
    "reasoning_effort": "reasoning",  # OpenAI
    "format": "response_format",  # ChatOllama
}
"""Other libraries' names, each with ours."""

OF_LOADING = (
    *("device_map", "max_memory", "quantization_config", "low_cpu_mem_usage", "offload_folder"),
    *("revision", "token", "cache_dir", "local_files_only", "subfolder", "variant"),
)
"""Arguments of transformers' `from_pretrained`; they go into `model_kwargs`."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of", "num_return_sequences", "num_beams"), (1,)),
    **dict.fromkeys(("trust_remote_code", "validate_model_on_init", "store"), (False,)),
    **dict.fromkeys(("ignore_eos", "logits_all", "vocab_only", "echo"), (False,)),
    "stream_usage": (True, False),
    **dict.fromkeys(("min_tokens", "min_length", "min_new_tokens", "no_repeat_ngram_size", "mirostat"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "top_a"), (0, 0.0)),
    **dict.fromkeys(("tfs_z", "typical_p", "repeat_penalty"), (1, 1.0)),
}
"""Names accepted with these values, or with None, because they ask only for what happens anyway."""

IDLE = ("api_key", "timeout", "max_retries")
"""Constructor arguments that LangChain passes to every chat model; they mean nothing for a model in this process."""

OF_A_SERVER = (
    *("base_url", "openai_api_base", "api_base", "endpoint_url", "inference_server_url"),
    *("client_kwargs", "sync_client_kwargs", "async_client_kwargs", "http_client"),
    *("http_async_client", "headers", "default_headers", "default_query", "extra_headers", "openai_proxy"),
    *("openai_api_key", "openai_organization", "organization", "request_timeout"),
    *("service_tier", "use_responses_api", "use_previous_response_id", "truncation"),
    *("include", "include_response_headers", "provider", "server_kwargs"),
)
"""Names that only a model behind a server can have."""

_OF_THE_RUN = ("callbacks", "metadata", "run_id", "run_name", "tags")
_FORMAT = "write response_format= with a class or a JSON Schema, or with_structured_output(schema)"
_LEAVE = "leave it out"

_HINTS: dict[str, str] = {
    " ".join(OF_A_SERVER): f"this model runs in this process, so {_LEAVE}; for a server write "
    "ChatPrecedentServer(base_url=…), or use ChatOpenAI of langchain-openai",
    # answers
    "n best_of num_return_sequences": f"a request has one answer: {_LEAVE}, and call batch() for several",
    "num_beams": f"there is no beam search: {_LEAVE}",
    "echo suffix": f"an answer is what follows the prompt: {_LEAVE}",
    "max_length": "write max_tokens=, which counts the answer alone",
    "min_tokens min_length min_new_tokens ignore_eos": f"the model itself ends its answers: {_LEAVE}, and bound them "
    "with max_tokens=",
    "verbosity": "say in the prompt how long the answer should be, and bound it with max_tokens=",
    "eos_token_id": "write stop_token_ids=; the model's own end tokens end an answer anyway",
    "system system_prompt system_message": "give it as the first message: ('system', '…')",
    "functions function_call": "write bind_tools([…], tool_choice=…)",
    "guided_json guided_regex guided_grammar guided_choice": _FORMAT,
    "grammar grammar_path": f"{_FORMAT}; a regular expression or a Lark grammar is for submit of llm.engine",
    # sampling
    "do_sample": "write temperature=0 for greedy decoding, and a greater temperature= to sample",
    "bad_words_ids suppress_tokens": "write logit_bias={token id: -100}",
    "repeat_penalty repeat_last_n": "write repetition_penalty=, which counts the whole text and not only its last "
    "tokens",
    "mirostat mirostat_eta mirostat_tau tfs_z typical_p no_repeat_ngram_size epsilon_cutoff eta_cutoff top_a": "this "
    "sampler is not supported: write temperature=, top_k=, top_p=, min_p=, or a penalty",
    "prompt_lookup_num_tokens num_assistant_tokens speculative_config": "write drafters= to choose who proposes, and "
    "max_nodes= in a call to bound how much",
    # weights
    "trust_remote_code": "code from a model's repository is never run here: load the model yourself with transformers, "
    "and write from_model(model, tokenizer)",
    "pipeline tokenizer": "write from_model(model, tokenizer) for a model that you have loaded",
    "llm": "there is nothing to wrap: write model= with a Hugging Face id or a folder",
    "huggingfacehub_api_token hf_token use_auth_token": "write token= for a private model on the Hugging Face Hub",
    "load_in_4bit load_in_8bit": "write quantization_config=BitsAndBytesConfig(…) of transformers",
    "lora_path lora_base lora_request adapter": "merge the adapter into the weights with peft, and write model= with "
    "the folder of the result",
    "use_mmap use_mlock f16_kv low_vram numa vocab_only logits_all": f"weights are loaded as their files hold them: "
    f"{_LEAVE}",
    "attn_implementation": f"attention over candidate trees is our own: {_LEAVE}",
    "keep_alive": "weights stay while a chat model holds them: call unload() to free them",
    "validate_model_on_init": "weights are loaded at the first call: read llm.engine to load them now",
    # the machine
    "num_gpu": 'write device="cuda" or device="cpu", or n_gpu_layers= with backend="llama.cpp"',
    "num_thread n_threads": "torch's threads do the work: set OMP_NUM_THREADS in the environment, or with "
    'backend="llama.cpp" write model_kwargs={"n_threads": …}',
    "num_ctx n_ctx max_model_len": f"the context has the model's own length: {_LEAVE}, and bound the answer with "
    'max_tokens=; with backend="llama.cpp" write model_kwargs={"n_ctx": …}',
    "batch_size n_batch n_ubatch num_batch max_num_seqs": f"requests of one engine are decoded together anyway: "
    f"{_LEAVE}, and call batch()",
    # LangChain and clients
    "task": f"a model here continues a conversation or a text: {_LEAVE}",
    "pipeline_kwargs options": "write its entries as arguments: max_tokens=, temperature=, top_p=",
    "extra_body": "write its entries as arguments: chat_template_kwargs=, top_k=, min_p=, stop_token_ids=",
    "user cache_salt": "write tenant= to say whose request it is",
    "stream_usage stream_options": f"the last chunk has the usage anyway: {_LEAVE}",
    "store": "answers are kept only in the speculation cache: write speculation_cache=",
    "tiktoken_model_name": f"tokens are counted by the model's own tokenizer: {_LEAVE}",
    "disabled_params": "leave out what you do not want to set",
}
HINTS: dict[str, str] = {
    **{name: hint for names, hint in _HINTS.items() for name in names.split()},
    **{name: f'it belongs to the run: write config={{"{name}": …}} after the messages' for name in _OF_THE_RUN},
}
"""What to write instead of a name that has no meaning here, or has it in another place."""

IN_A_CALL = "it belongs in a call: write bind({name}=…)"
WITH_TOOLS = dict.fromkeys(("tools", "tool_choice", "strict", "parallel_tool_calls"), "write bind_tools([…], …)")


def _format(value: Any) -> Any:
    """Return ChatOllama's `format`, "json" or a JSON Schema, as a `response_format`."""
    if isinstance(value, str) and value in ("json", ""):
        return {"type": "json_object"} if value else None
    if isinstance(value, Mapping) and is_json_schema(value):
        return {"type": "json_schema", "json_schema": {"name": UNNAMED, "schema": value}}
    return value


def _effort(value: Any) -> Any:
    return value["effort"] if isinstance(value, Mapping) and value.keys() == {"effort"} else value


def _device(value: Any) -> Any:
    if is_whole(value) and value >= -1:
        return f"cuda:{value}" if value >= 0 else "cpu"
    return str(value) if type(value).__module__ == "torch" else value


def _dtype(value: Any) -> Any:
    if isinstance(value, str):
        return {"half": "float16", "float": "float32"}.get(value, value)
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value


def _number(value: Any) -> Any:
    """Read a number that is written as a text, as in configuration files; a float without a fraction is whole."""
    for read in (int, float):
        if isinstance(value, str):
            with suppress(ValueError):
                value = read(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _top_k(value: Any) -> Any:
    number = _number(value)
    return 0 if is_whole(number) and number == -1 else number  # llama.cpp's and vLLM's way to switch it off


def _max_tokens(value: Any) -> Any:
    number = _number(value)
    if is_whole(number) and number in (-1, -2):  # Ollama's and llama.cpp's
        raise ConfigError(
            f"{number} tokens ask for an answer without a limit: write max_tokens= with the most tokens that an answer "
            "may have; the model's context bounds it as well"
        )
    return number


def _path(value: Any) -> Any:
    return str(value) if hasattr(value, "__fspath__") else value


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "format": _format,
    "reasoning": _effort,
    **dict.fromkeys(("device", "draft_device"), _device),
    "dtype": _dtype,
    "model": _path,
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty"), _number),
    **dict.fromkeys(("presence_penalty", "seed", "top_logprobs"), _number),
    "top_k": _top_k,
    "max_tokens": _max_tokens,
}
"""Read the value of a setting as other libraries write it; any other value stays as it is."""


def translated(
    given: Mapping[str, Any], known: Collection[str], where: str, elsewhere: Mapping[str, str]
) -> dict[str, Any]:
    """Return the arguments under the names in `known`; errors say `where` the arguments were given.

    `elsewhere` maps names that belong in another place to a hint (`{name}` is replaced by the name). Raises ConfigError
    with the best hint for a name without a meaning here, ConfigError for two names of the same setting, and
    UnsupportedError for a value that asks for an unsupported feature.
    """
    found, loading, said = dict[str, Any](), dict[str, Any](), dict[str, str]()
    for name, value in given.items():
        ours = name if name in known else SAME.get(name, name)
        if ours in known and (value is not None or ours == name):
            if value is not None and said.setdefault(ours, name) != name:
                raise ConfigError(f"{said[ours]}= and {name}= mean the same: give one of the two")
            if value is not None or ours not in found:
                convert = _CONVERTERS.get(name) or _CONVERTERS.get(ours)
                found[ours] = convert(value) if convert else value
        elif value is not None and name in OF_LOADING and "model_kwargs" in known:
            loading[name] = value
        elif not _asks_for_nothing(name, value):
            raise _refusal(name, value, known, where, elsewhere)
    if not loading:
        return found
    model_kwargs = found.get("model_kwargs") or {}
    if not isinstance(model_kwargs, Mapping):
        raise ConfigError(f"model_kwargs={shown(model_kwargs)} must be a dict")
    if twice := loading.keys() & model_kwargs.keys():
        raise ConfigError(f"{min(twice)}= is also in model_kwargs=: give it once")
    return {**found, "model_kwargs": {**model_kwargs, **loading}}


def _asks_for_nothing(name: str, value: Any) -> bool:
    if value is None:
        known = any(name in names for names in (SAME, OF_LOADING, HARMLESS, HINTS))
        return known and name not in _OF_THE_RUN  # LangChain itself passes those a second time
    return any(type(value) is type(one) and value == one for one in HARMLESS.get(name, ()))


def _refusal(
    name: str, value: Any, known: Collection[str], where: str, elsewhere: Mapping[str, str]
) -> ConfigError | UnsupportedError:
    place = elsewhere.get(name) or elsewhere.get(SAME.get(name, name))
    if place is not None:
        return ConfigError(f"{where} takes no {name!r}: {place.format(name=name)}")
    if name in HARMLESS:
        return UnsupportedError(f"{name}={shown(value)} is not supported: {HINTS[name]}")
    if name in HINTS:
        return ConfigError(f"{where} takes no {name!r}: {HINTS[name]}")
    return ConfigError(f"{where} takes no {name!r}; known: {', '.join(known)}")

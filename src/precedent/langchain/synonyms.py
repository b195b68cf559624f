"""Translates the argument names of other chat models: tables of synonyms, and hints for names without a counterpart.

A name in none of the tables raises an error that lists all known names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from precedent.errors import ConfigError, UnsupportedError
from precedent.langchain.schemas import UNNAMED, is_json_schema
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
    "n": (1,),
    "best_of": (1,),
    "num_return_sequences": (1,),
    "num_beams": (1,),
    "trust_remote_code": (False,),
    "validate_model_on_init": (False,),
    "stream_usage": (True, False),
    "store": (False,),
    **dict.fromkeys(("min_tokens", "min_length", "min_new_tokens", "no_repeat_ngram_size", "mirostat"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "top_a"), (0, 0.0)),
    **dict.fromkeys(("tfs_z", "typical_p", "repeat_penalty"), (1, 1.0)),
    **dict.fromkeys(("ignore_eos", "logits_all", "vocab_only", "echo"), (False,)),
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

_SERVER = (
    "this model runs in this process, so leave it out; for a server write ChatPrecedentServer(base_url=…), or use "
    "ChatOpenAI of langchain-openai"
)
_ONE_ANSWER = "a request has one answer: leave it out, and call batch() for several"
_TOKEN = "write token= for a private model on the Hugging Face Hub"
_QUANTISED = "write quantization_config=BitsAndBytesConfig(…) of transformers"
_THREADS = "torch's threads do the work: set OMP_NUM_THREADS in the environment"
_LAYERS = 'write device="cuda" or device="cpu", or device_map="auto" to spread the layers'
_CONTEXT = "the context has the model's own length: leave it out, and bound the answer with max_tokens="
_TO_THE_END = "the model itself ends its answers: leave it out, and bound them with max_tokens="
_SAMPLER = "this sampler is not supported: write temperature=, top_k=, top_p=, min_p=, or a penalty"
_BANNED = "write logit_bias={token id: -100}"
_RESPONSE_FORMAT = "write response_format= with a class or a JSON Schema, or with_structured_output(schema)"
_GRAMMAR = f"{_RESPONSE_FORMAT}; a regular expression or a Lark grammar is for submit of llm.engine"
_SPECULATION = "write drafters= to choose who proposes, and max_nodes= in a call to bound how much"
_TOOLS = "write bind_tools([…], tool_choice=…)"
_SYSTEM = "give it as the first message: ('system', '…')"
_TOGETHER = "requests of one engine are decoded together anyway: leave it out, and call batch()"
_AS_STORED = "weights are loaded as their files hold them: leave it out"
_ADAPTER = "merge the adapter into the weights with peft, and write model= with the folder of the result"
_WHOLE_ANSWER = "an answer is what follows the prompt: leave it out"
_TENANT = "write tenant= to say whose request it is"
_OF_THE_RUN = ("callbacks", "metadata", "run_id", "run_name", "tags")

HINTS: dict[str, str] = {
    **dict.fromkeys(OF_A_SERVER, _SERVER),
    **dict.fromkeys(("n", "best_of", "num_return_sequences"), _ONE_ANSWER),
    "num_beams": "there is no beam search: leave it out",
    **dict.fromkeys(("batch_size", "n_batch", "n_ubatch", "num_batch", "max_num_seqs"), _TOGETHER),
    **dict.fromkeys(("use_mmap", "use_mlock", "f16_kv", "low_vram", "numa", "vocab_only", "logits_all"), _AS_STORED),
    **dict.fromkeys(("lora_path", "lora_base", "lora_request", "adapter"), _ADAPTER),
    **dict.fromkeys(("grammar", "grammar_path"), _GRAMMAR),
    **dict.fromkeys(("system", "system_prompt", "system_message"), _SYSTEM),
    **dict.fromkeys(("echo", "suffix"), _WHOLE_ANSWER),
    **dict.fromkeys(("huggingfacehub_api_token", "hf_token", "use_auth_token"), _TOKEN),
    "trust_remote_code": (
        "code from a model's repository is never run here: load the model yourself with transformers, and write "
        "from_model(model, tokenizer)"
    ),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), _QUANTISED),
    "attn_implementation": "attention over candidate trees is our own: leave it out",
    **dict.fromkeys(("num_gpu", "n_gpu_layers"), _LAYERS),
    **dict.fromkeys(("num_thread", "n_threads"), _THREADS),
    **dict.fromkeys(("num_ctx", "n_ctx", "max_model_len"), _CONTEXT),
    "max_length": "write max_tokens=, which counts the answer alone",
    **dict.fromkeys(("min_tokens", "min_length", "min_new_tokens", "ignore_eos"), _TO_THE_END),
    "keep_alive": "weights stay while a chat model holds them: call unload() to free them",
    "validate_model_on_init": "weights are loaded at the first call: read llm.engine to load them now",
    "llm": "there is nothing to wrap: write model= with a Hugging Face id or a folder",
    **dict.fromkeys(("pipeline", "tokenizer"), "write from_model(model, tokenizer) for a model that you have loaded"),
    **dict.fromkeys(("task", "backend"), "a model here continues a conversation or a text: leave it out"),
    **dict.fromkeys(
        ("pipeline_kwargs", "options"), "write its entries as arguments: max_tokens=, temperature=, top_p="
    ),
    "extra_body": "write its entries as arguments: chat_template_kwargs=, top_k=, min_p=, stop_token_ids=",
    "do_sample": "write temperature=0 for greedy decoding, and a greater temperature= to sample",
    "eos_token_id": "write stop_token_ids=; the model's own end tokens end an answer anyway",
    **dict.fromkeys(("bad_words_ids", "suppress_tokens"), _BANNED),
    "repeat_penalty": "write repetition_penalty=, which counts the whole text and not only its last tokens",
    "repeat_last_n": "write repetition_penalty=, which counts the whole text, or frequency_penalty= for the answer",
    **dict.fromkeys(("mirostat", "mirostat_eta", "mirostat_tau", "tfs_z", "typical_p"), _SAMPLER),
    **dict.fromkeys(("no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "top_a"), _SAMPLER),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_grammar", "guided_choice"), _RESPONSE_FORMAT),
    **dict.fromkeys(("prompt_lookup_num_tokens", "num_assistant_tokens", "speculative_config"), _SPECULATION),
    **dict.fromkeys(("functions", "function_call"), _TOOLS),
    **dict.fromkeys(("user", "cache_salt"), _TENANT),
    "stream_usage": "the last chunk has the usage anyway: leave it out",
    "stream_options": "the last chunk has the usage anyway: leave it out",
    "store": "answers are kept only in the speculation cache: write speculation_cache=",
    "tiktoken_model_name": "tokens are counted by the model's own tokenizer: leave it out",
    "disabled_params": "leave out what you do not want to set",
    "verbosity": "say in the prompt how long the answer should be, and bound it with max_tokens=",
    **{name: f'it belongs to the run: write config={{"{name}": …}} after the messages' for name in _OF_THE_RUN},
}
"""What to write instead of a name that has no meaning here, or has it in another place."""

ANSWER_CACHE = (
    "cache= is LangChain's cache of whole answers (True, False or a BaseCache); for a cache to draft from write "
    "speculation_cache="
)

IN_MODEL_KWARGS = "model_kwargs says how weights are loaded: write {name}= as a separate argument"

WITH_TOOLS = "write bind_tools([…], …)"
LEFT_OUT = "it means nothing for a model in this process: leave it out"
IN_A_CALL = "it belongs in a call: write bind({name}=…)"
IN_CHAT = "text completion does not have it: use ChatPrecedent"
IN_THE_CONSTRUCTOR = "it belongs in the constructor: write ChatPrecedent(model=…, {name}=…)"
"""What to write for names that belong in another place."""


def _format(value: Any) -> Any:
    """ChatOllama's `format` as a `response_format`: "json", or a JSON Schema."""
    if isinstance(value, str) and value in ("json", ""):
        return {"type": "json_object"} if value else None
    if isinstance(value, Mapping) and is_json_schema(value):
        return {"type": "json_schema", "json_schema": {"name": UNNAMED, "schema": value}}
    return value


def _effort(value: Any) -> Any:
    """OpenAI's `{"effort": "low"}` as the effort."""
    return value["effort"] if isinstance(value, Mapping) and value.keys() == {"effort"} else value


def _device(value: Any) -> Any:
    """A torch device, or a pipeline's device number, as a text."""
    if is_whole(value) and value >= -1:
        return f"cuda:{value}" if value >= 0 else "cpu"
    return str(value) if type(value).__module__ == "torch" else value


def _dtype(value: Any) -> Any:
    """A torch dtype, or vLLM's name of one, as its name."""
    if isinstance(value, str):
        return {"half": "float16", "float": "float32"}.get(value, value)
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value


def _number(value: Any) -> Any:
    """A number written as a text, as configuration files and environment variables have it."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _whole(value: Any) -> Any:
    """A whole number written as a text or with a point."""
    try:
        return int(value) if isinstance(value, str) or (isinstance(value, float) and value.is_integer()) else value
    except ValueError:
        return value


def _top_k(value: Any) -> Any:
    """llama.cpp's and vLLM's -1 as 0, which is off."""
    number = _whole(value)
    return 0 if is_whole(number) and number == -1 else number


def _max_tokens(value: Any) -> Any:
    """A whole number. Raises ConfigError for Ollama's and llama.cpp's ways to ask for an answer without a limit."""
    number = _whole(value)
    if is_whole(number) and number in (-1, -2):
        raise ConfigError(
            f"{number} tokens ask for an answer without a limit: write max_tokens= with the most tokens that an answer "
            "may have; the model's context bounds it as well"
        )
    return number


def _path(value: Any) -> Any:
    """A path as a text."""
    return str(value) if hasattr(value, "__fspath__") else value


VALUES: dict[str, Callable[[Any], Any]] = {
    "format": _format,
    **dict.fromkeys(("reasoning", "think", "reasoning_effort"), _effort),
    **dict.fromkeys(("device", "draft_device"), _device),
    **dict.fromkeys(("dtype", "torch_dtype"), _dtype),
    **dict.fromkeys(("model", "model_name", "model_id", "model_path"), _path),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), _number),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), _number),
    **dict.fromkeys(("seed", "top_logprobs"), _whole),
    "top_k": _top_k,
    **dict.fromkeys((name for name in (*SAME, "max_tokens") if SAME.get(name, name) == "max_tokens"), _max_tokens),
}
"""Converts the values of these names to ours; other values stay as they are."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Names that belong in another place, and a hint that says where (`{name}` is replaced by the name)."""

    names: Collection[str]
    hint: str


def translated(
    given: Mapping[str, Any], known: Collection[str], where: str, elsewhere: Sequence[Elsewhere]
) -> dict[str, Any]:
    """The arguments under the names in `known`; errors say `where` the arguments were given.

    Raises ConfigError with the best hint for a name without a meaning here, ConfigError for two names of the same
    setting, and UnsupportedError for a value that asks for an unsupported feature.
    """
    found, loading, said = dict[str, Any](), dict[str, Any](), dict[str, str]()
    for name, value in given.items():
        ours = name if name in known else SAME.get(name, name)
        if ours in known and (value is not None or ours == name):
            if value is not None and said.setdefault(ours, name) != name:
                raise ConfigError(f"{said[ours]}= and {name}= mean the same: give one of the two")
            if value is not None or ours not in found:
                found[ours] = VALUES[name](value) if name in VALUES else value
        elif value is not None and name in OF_LOADING and "model_kwargs" in known:
            loading[name] = value
        elif not _asks_for_nothing(name, value):
            raise _refusal(name, value, known, where, elsewhere)
    return found if not loading else {**found, "model_kwargs": _with_loading(found.get("model_kwargs"), loading)}


def _with_loading(model_kwargs: Any, loading: Mapping[str, Any]) -> dict[str, Any]:
    """`model_kwargs` with the loading arguments added."""
    if model_kwargs is not None and not isinstance(model_kwargs, Mapping):
        raise ConfigError(f"model_kwargs={shown(model_kwargs)} must be a dict")
    if twice := loading.keys() & (model_kwargs or {}).keys():
        raise ConfigError(f"{min(twice)}= is also in model_kwargs=: give it once")
    return {**(model_kwargs or {}), **loading}


def _asks_for_nothing(name: str, value: Any) -> bool:
    if value is None:
        known = name in SAME or name in OF_LOADING or name in HARMLESS or name in HINTS
        return known and name not in _OF_THE_RUN  # LangChain itself passes those a second time
    return any(type(value) is type(one) and value == one for one in HARMLESS.get(name, ()))


def _refusal(
    name: str, value: Any, known: Collection[str], where: str, elsewhere: Sequence[Elsewhere]
) -> ConfigError | UnsupportedError:
    for place in elsewhere:
        if name in place.names or SAME.get(name) in place.names:
            return ConfigError(f"{where} takes no {name!r}: {place.hint.format(name=name)}")
    if name in HARMLESS:
        return UnsupportedError(f"{name}={shown(value)} is not supported: {HINTS[name]}")
    if name in HINTS:
        return ConfigError(f"{where} takes no {name!r}: {HINTS[name]}")
    return ConfigError(f"{where} takes no {name!r}; known: {', '.join(known)}")

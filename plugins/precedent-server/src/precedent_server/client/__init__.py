"""The way in for LangChain to a model behind `precedent serve`: requests over HTTP, and no weights in this process.

It reads arguments and messages with the code of `precedent.langchain`, and imports neither torch nor the engine.
"""

from precedent.errors import ConfigError

try:
    from precedent_server.client.chat_model import ChatPrecedentServer
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] not in ("langchain_openai", "openai"):
        raise
    raise ConfigError("ChatPrecedentServer needs langchain-openai: pip install 'precedent-llm[client]'") from error

__all__ = ["ChatPrecedentServer"]

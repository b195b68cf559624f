"""Record the answers of the chat model you use today, and warm the cache of your own model with them.

    python examples/warm_from_logs.py

It needs no weights: it runs on a tiny real model from the library's tests that follows a script.
"""

import tempfile
from pathlib import Path

from langchain_core.language_models import FakeListChatModel

from precedent import ChatPrecedent, PrecedentRecorder, SpeculationCache
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_model_engine

ANSWER = "We are open from nine to six, on Saturdays until one, and closed on Sundays."
QUESTION = "When are you open?"


def desk(warmed_from: Path | None) -> None:
    """Ask our own model, with an empty or a warmed cache."""
    cache = SpeculationCache.open(embedder=HashEmbedder())  # in memory; give a path to keep it
    llm = ChatPrecedent.from_engine(scripted_model_engine([("user", QUESTION), ("assistant", ANSWER)], cache=cache))
    stored = llm.warm(warmed_from) if warmed_from else 0
    figures = llm.invoke(QUESTION).response_metadata["speculation"]
    print(f"{stored} answers known before: {figures['num_steps']} forwards of the model for the same text")
    llm.engine.close()


with tempfile.TemporaryDirectory() as folder:
    log = Path(folder) / "log.jsonl"
    with PrecedentRecorder(log) as recorder:  # works with any chat model
        FakeListChatModel(responses=[ANSWER]).invoke(QUESTION, {"callbacks": [recorder]})
    desk(None)
    desk(log)

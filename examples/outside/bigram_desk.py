"""A package outside Precedent: a back end that runs bigram models, and a drafter that proposes fixed phrases.

    pip install examples/outside
    python -m bigram_desk

A folder with `bigrams.json` is a model: for each word, the words that may follow, with their probabilities. Every name
that is imported here is public.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from precedent import ChatPrecedent, UnsupportedError
from precedent.drafters import Candidates, DrafterParts, Request
from precedent.target.contract import NOTHING_PENDING, Capabilities, Commit, Slot, Target
from precedent.target.support import ModelSource, ModelSupport, TargetOptions
from precedent.tree import CandidateTree

# The back end

FILE = "bigrams.json"
END, UNKNOWN = "</s>", "<unk>"
BYTES_PER_TOKEN = 8


class Bigrams(Target):
    """A target that knows only the last word; `table` `[vocab_size, vocab_size]` has logits of the next one."""

    config, generation_config, device = PreTrainedConfig(), None, torch.device("cpu")
    context_length = 4096

    def __init__(self, table: Tensor) -> None:
        self.table, self.vocab_size = table, len(table)

    @property
    def capabilities(self) -> Capabilities:
        """Trees of any shape."""
        return Capabilities()

    def weights(self) -> dict[str, Tensor]:
        """The table, by which the cache knows the model again."""
        return {"table": self.table}

    def new_slot(self) -> Slot:
        """A slot stores nothing but its tokens."""
        return Slot(kv=None)

    def fork(self, slot: Slot, length: int, room: int = 0) -> Slot:
        """A slot with the first tokens of another."""
        return Slot(None, slot.token_ids[:length])

    def continue_prefill(self, slot: Slot, prompt_ids: Sequence[int], max_tokens: int) -> bool:
        """Take the whole prompt: there is nothing to compute."""
        slot.token_ids, slot.pending = list(prompt_ids[:-1]), prompt_ids[-1]
        return True

    def score(self, batch: Sequence[tuple[Slot, CandidateTree]]) -> list[Tensor]:
        """The rows of the pending token and of every node."""
        if any(slot.pending == NOTHING_PENDING for slot, _ in batch):
            raise ValueError("a slot without a pending token cannot be scored: prefill its prompt first")
        return [self.table[[slot.pending, *tree.token_ids]] for slot, tree in batch]

    def commit_all(self, batch: Sequence[Commit]) -> list[Exception | None]:
        """Keep the accepted tokens of every sequence."""
        return [self._commit(*commit) for commit in batch]

    def _commit(self, slot: Slot, tree: CandidateTree, path: Sequence[int], next_token: int) -> Exception | None:
        try:
            slot.token_ids += [slot.pending, *(tree.token_ids[node] for node in path)]
        except IndexError as error:
            return error
        slot.pending = next_token
        return None

    def rewind(self, slot: Slot, length: int) -> int:
        """Forget the tokens from `length` on."""
        del slot.token_ids[length:]
        return length

    def discard(self, slot: Slot) -> None:
        """Scored nodes leave nothing behind."""

    def slot_bytes(self, slot: Slot) -> int:
        """What its tokens take."""
        return BYTES_PER_TOKEN * len(slot.token_ids)

    def request_bytes(self, prompt_tokens: int, answer_tokens: int, tree_tokens: int, num_rows: int = 0) -> int:
        """What a request's tokens take."""
        return BYTES_PER_TOKEN * (prompt_tokens + answer_tokens + tree_tokens)


class BigramSupport(ModelSupport):
    """Runs folders with `bigrams.json`."""

    def recognises(self, source: ModelSource, options: TargetOptions) -> bool:
        """Whether the folder has such a file. Raises UnsupportedError for an option that it cannot have."""
        if source.place is None or not (Path(source.place) / FILE).is_file():
            return False
        if options.dtype is not None:
            raise UnsupportedError(f"dtype={options.dtype!r} does not work with bigrams: leave it out")
        return True

    def load(self, source: ModelSource, options: TargetOptions) -> Bigrams:
        """Read the table; a word that nothing follows ends the answer."""
        following = json.loads((Path(str(source.place)) / FILE).read_text(encoding="utf-8"))
        words = list(following)
        probs = torch.zeros(len(words), len(words))
        for word, next_words in following.items():
            for next_word, prob in (next_words or {END: 1.0}).items():
                probs[words.index(word), words.index(next_word)] = prob
        return Bigrams(probs.log())


SUPPORT = BigramSupport()


# The drafter

PHRASES = ("is on its way", "will arrive this Monday", "was sent yesterday")


class Phrases:
    """Proposes the rest of a phrase whose first words were just said."""

    name = "phrases"

    def __init__(self, phrases: Sequence[Sequence[int]]) -> None:
        self._next = {pair[0]: phrase[place + 1 :] for phrase in phrases for place, pair in enumerate(pairwise(phrase))}

    def begin(self, request: Request) -> PhraseSession:
        """Start after the prompt's last word."""
        return PhraseSession(self._next, request.prompt_ids[-1:])

    def close(self) -> None:
        """Nothing is shared that needs to be released."""


class PhraseSession:
    """The last word of one request; none of an empty prompt."""

    def __init__(self, following: dict[int, Sequence[int]], last: Sequence[int]) -> None:
        self._next, self._last = following, last

    def match(self, budget: int) -> Candidates:
        """A chain of the words that complete the phrase."""
        words = [word for last in self._last for word in self._next.get(last, ())[:budget]]
        return Candidates.of(Phrases.name, [(word, place - 1, 0.8, 0) for place, word in enumerate(words)])

    def committed(self, token_ids: Sequence[int]) -> None:
        """Remember the last word."""
        self._last = token_ids[-1:] or self._last

    def end(self) -> None:
        """Nothing is held."""


def phrases(parts: DrafterParts) -> Phrases | None:
    """Make the drafter; without a tokenizer it is left out."""
    return None if parts.codec is None else Phrases([parts.codec.encode(text) for text in PHRASES])


# A model of ours, and an answer

QUESTION = "Where is order 1042 ?"
ANSWER = "Your order is on its way and will arrive this Monday"


def save_model(folder: Path) -> Path:
    """Write a model that knows one answer, and its tokenizer."""
    words = list(dict.fromkeys(" ".join([QUESTION, ANSWER, *PHRASES]).split()))
    following: dict[str, dict[str, float]] = {word: {} for word in [*words, END, UNKNOWN]}
    for word, next_word in pairwise([QUESTION.rsplit(maxsplit=1)[-1], *ANSWER.split()]):
        following[word][next_word] = 1.0
    (folder / FILE).write_text(json.dumps(following), encoding="utf-8")
    vocab = {f"▁{word}" if word in words else word: number for number, word in enumerate(following)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Metaspace()]
    )
    tokenizer.decoder = decoders.Metaspace()
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, chat_template=template)
    fast.save_pretrained(folder)
    return folder


def main() -> dict[str, int]:
    """Answer with both; returns how many words of each drafter were accepted."""
    with tempfile.TemporaryDirectory() as folder:
        llm = ChatPrecedent(model=str(save_model(Path(folder))), drafters=("phrases",))
        answer = llm.invoke(QUESTION)
        llm.unload()
    told = answer.response_metadata["speculation"]
    accepted: dict[str, int] = told["accepted_by_source"]
    print(answer.text)
    print(f"{told['num_steps']} steps; accepted words by drafter: {accepted}")
    return accepted


if __name__ == "__main__":
    main()

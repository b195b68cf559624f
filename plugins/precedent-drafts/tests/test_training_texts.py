"""What a draft is trained on: prompts of every kind of file, and completions of a cache."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from helpers.tiny_draft import PROMPTS, RECIPE, tiny_target

from precedent.cache import Completion, SQLiteStore, tokenizer_fingerprint
from precedent.errors import CacheError, PromptError
from precedent_drafts.training.completions import read_completions
from precedent_drafts.training.distil import Distillation
from precedent_drafts.training.prompts import read_prompts, split
from precedent_drafts.training.schedule import Schedule
from precedent_drafts.training.teacher import Teacher
from precedent_drafts.training.texts import Shard, Text
from precedent_testing.tiny_models import byte_tokenizer

TOKENIZER = byte_tokenizer()


# Prompts and completions


def test_prompts_of_every_kind_of_file(tmp_path: Path) -> None:
    def written(name: str, *records: object) -> Path:
        text = "".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records)
        opened = gzip.open if name.endswith(".gz") else open
        with opened(tmp_path / name, "wt", encoding="utf-8") as file:
            file.write(text)
        return tmp_path / name

    def texts(path: Path) -> list[str]:
        return [TOKENIZER.decode(prompt) for prompt in read_prompts(path, TOKENIZER, 400)[0]]

    asked = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert texts(written("a.txt", "one", "two", "", "one")) == [asked.format("one"), asked.format("two")]
    assert texts(written("b.jsonl.gz", {"turns": ["one", "more"]}, {"prompt": "two"})) == [
        asked.format("one"), asked.format("two"),
    ]  # fmt: skip
    user, answer = ({"role": role, "content": role} for role in ("user", "assistant"))
    both = texts(written("c.jsonl", {"messages": [user, answer, user, answer]}))
    assert both[0] == asked.format("user")
    assert both[1].startswith(asked.format("user") + "assistant<|im_end|>\n<|im_start|>user")
    assert texts(written("d.jsonl", {"messages": [user]})) == [asked.format("user")]
    assert texts(written("e.jsonl", {"messages": [user, answer, user], "response": answer})) == [both[1]]
    assert read_prompts(written("f.txt", "short", "long" * 99), TOKENIZER, 60)[1] == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty"),
        ("x" * 99, "all 1 are longer than 60 tokens"),
        ('{"prompt": "a"}\n{"turns": []}', "not a question"),
    ],
)
def test_a_file_without_prompts_says_so(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / ("prompts.jsonl" if text.startswith("{") else "prompts.txt")
    path.write_text(text)
    with pytest.raises(PromptError, match=says):
        read_prompts(path, TOKENIZER, 60)


def test_held_out_prompts_are_not_learned_and_stay_the_same() -> None:
    prompts = [(number,) for number in range(40)]
    learned, held_out = split(prompts, 3)
    assert (len(learned), len(held_out)) == (36, 4)
    assert sorted(learned + held_out) == prompts
    assert split(prompts, 3) == (learned, held_out)
    assert split(prompts, 4) != (learned, held_out)
    with pytest.raises(PromptError, match="one prompt is too few"):
        split(prompts[:1], 0)


def test_completions_of_one_tenant_behind_what_was_asked(tmp_path: Path) -> None:
    store, fingerprint = SQLiteStore.open(tmp_path / "cache"), tokenizer_fingerprint(TOKENIZER)
    for tenant, query, answer in [("shop", "old", "first"), ("other", "secret", "hidden"), ("shop", "new", "second")]:
        ids = tuple(TOKENIZER.encode(answer))
        store.insert(Completion(ids, fingerprint, "m", tenant, query), None, None)
    store.close()
    texts = read_completions(tmp_path / "cache", TOKENIZER, "shop", 5)
    assert [TOKENIZER.decode(text.token_ids) for text in texts] == [
        f"<|im_start|>user\n{query}<|im_end|>\n<|im_start|>assistant\n{answer}"
        for query, answer in [("new", "secon"), ("old", "first")]
    ]
    assert [text.num_answer_tokens for text in texts] == [5, 5]
    with pytest.raises(CacheError, match="no completions of tenant 'nobody'"):
        read_completions(tmp_path / "cache", TOKENIZER, "nobody", 5)


def test_stored_completions_are_learned_from(tmp_path: Path) -> None:
    completions = [Text((5, 6, 7, 8, 9), 3)]
    run = Distillation(
        tiny_target(), TOKENIZER, PROMPTS, RECIPE, tmp_path / "draft", completions=completions
    ).run(Schedule(1, 1, 1, 1, 1))  # fmt: skip
    assert run.num_tokens == 8 * 12 + 3


def test_only_what_is_learned_of_a_text_is_kept_and_learned(tmp_path: Path) -> None:
    """A conversation of two turns gives the lessons of its own words alone, saved and read back the same."""
    target, marks = tiny_target(), (False, True, True, False, True)
    whole, part = Text((5, 6, 7, 8, 9, 3), 5), Text((5, 6, 7, 8, 9, 3), 5, marks)
    everything, some = Teacher(target).shard([whole]).lessons[0], Teacher(target).shard([part])
    some.save(tmp_path / "shard.safetensors")
    (read,) = Shard.load(tmp_path / "shard.safetensors").lessons
    assert read.text == part
    assert torch.equal(read.hidden, everything.hidden[list(marks)])
    assert read.num_learned == 3

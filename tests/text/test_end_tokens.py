"""The tokens that end an answer: every source counts, a name counts only for a control token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import GenerationConfig

from precedent import Engine
from precedent.config import SamplingParams
from precedent.text.end_tokens import end_tokens
from precedent.text.prompt import render_prompt, told_answer
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

USER = {"role": "user", "content": "hello"}


def tokenizer_with(*control: str, text: tuple[str, ...] = (), eos: str = "<eos>") -> Any:
    """A byte tokenizer whose turns end with the first control token, as Gemma's do."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": eos, "additional_special_tokens": list(control)})
    tokenizer.add_tokens([AddedToken(one, special=False) for one in text])
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", (*control, *text)[0])
    return tokenizer


def names(tokenizer: Any, **configured: Any) -> set[str]:
    return {one.text for one in end_tokens(tokenizer, configured)} - {"<|im_end|>", "<|endoftext|>"}


@pytest.mark.parametrize("name", ["<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<turn|>"])
def test_a_known_control_token_ends_an_answer_and_the_same_text_without_the_mark_does_not(name: str) -> None:
    assert names(tokenizer_with(name)) == {"<eos>", name}
    assert names(tokenizer_with(text=(name,))) == {"<eos>"}


def test_a_token_that_separates_messages_of_one_answer_does_not_end_it() -> None:
    assert names(tokenizer_with("<|return|>", "<|call|>", "<|end|>")) == {"<eos>", "<|return|>", "<|call|>"}


@pytest.mark.parametrize("source", ["generation_config", "config", "name"])
def test_an_engine_stops_at_an_end_token_from_any_source(source: str, tmp_path: Path) -> None:
    """A Gemma-style folder: the tokenizer's end token is not the one that ends a turn."""
    name = "<end_of_turn>" if source == "name" else "<of_no_known_family>"
    tokenizer = tokenizer_with(name)
    turn = tokenizer.convert_tokens_to_ids(name)
    model = tiny_causal_lm("gemma3_text", vocab_size=len(tokenizer), head_dim=12, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=[turn] if source == "generation_config" else None)
    if source == "config":
        model.config.eos_token_id = [tokenizer.eos_token_id, turn]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = Engine.load(tmp_path, device="cpu")
    try:
        asked = SamplingParams(max_tokens=8, logit_bias={turn: 100})
        result = engine.submit(render_prompt(engine.tokenizer, [USER]), asked).result()
    finally:
        engine.close()
    assert (result.finish_reason, tuple(result.token_ids), result.text) == ("stop", (turn,), "")


def test_a_recorded_answer_ends_where_the_template_ends_a_turn() -> None:
    """Answers to draft from end with the token that the model writes, which need not be the tokenizer's."""
    tokenizer = tokenizer_with("<end_of_turn>")
    turn = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    told = told_answer(tokenizer, render_prompt(tokenizer, [USER]), [USER], {"role": "assistant", "content": "hi"})
    assert told == (*tokenizer.encode("hi", add_special_tokens=False), turn)


def test_each_token_names_its_sources() -> None:
    tokenizer = tokenizer_with("<end_of_turn>")
    turn = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    found = {one.text: one.sources for one in end_tokens(tokenizer, {"generation_config": [turn, 7], "config": -1})}
    assert found["<end_of_turn>"] == ("generation_config", "name")
    assert found["<eos>"] == ("tokenizer",)
    assert found[tokenizer.convert_ids_to_tokens(7)] == ("generation_config",)

"""Fingerprints: equal where records may be shared, different where they may not."""

from __future__ import annotations

import numpy as np
import pytest

from precedent.cache import model_fingerprint, prompt_fingerprint, tokenizer_fingerprint, tools_fingerprint

tokenizers = pytest.importorskip("tokenizers")


def fast_tokenizer(vocabulary=None, merges=None, added=(), **options):
    from transformers import PreTrainedTokenizerFast

    vocabulary = vocabulary or {"a": 0, "b": 1, "c": 2, "ab": 3, "<unk>": 4, "bc": 5}
    model = tokenizers.models.BPE(vocabulary, merges or [("a", "b"), ("b", "c")], unk_token="<unk>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model), **options)
    tokenizer.add_tokens(list(added))
    return tokenizer


def test_a_tokenizers_padding_truncation_and_template_do_not_count():
    plain, used = fast_tokenizer(), fast_tokenizer(chat_template="{{ messages }}", pad_token="<unk>")
    used("abc", padding="max_length", max_length=9, truncation=True)
    assert tokenizer_fingerprint(plain) == tokenizer_fingerprint(used)
    assert len(tokenizer_fingerprint(plain)) == 32


def test_vocabulary_merges_and_added_tokens_count():
    swapped = {"b": 0, "a": 1, "c": 2, "ab": 3, "<unk>": 4, "bc": 5}
    others = [
        fast_tokenizer(),
        fast_tokenizer(vocabulary=swapped),
        fast_tokenizer(merges=[("b", "c"), ("a", "b")]),
        fast_tokenizer(added=["<tool_call>"]),
        fast_tokenizer(added=["<tool>"]),
    ]
    assert len({tokenizer_fingerprint(one) for one in others}) == len(others)


def test_models_differ_by_configuration_names_shapes_and_values():
    config, weights = {"layers": 2, "dtype": "float32"}, {"w": np.ones((2, 3)), "v": np.zeros(4)}
    same = model_fingerprint({"dtype": "bfloat16", "layers": 2, "_name_or_path": "/x"}, dict(reversed(weights.items())))
    assert same == model_fingerprint(config, weights)
    others = [
        model_fingerprint({"layers": 3}, weights),
        model_fingerprint(config, {"w": np.ones((3, 2)), "v": np.zeros(4)}),
        model_fingerprint(config, {"w": np.ones((2, 3)), "u": np.zeros(4)}),
        model_fingerprint(config, {"w": np.ones((2, 3)), "v": np.full(4, 0.5)}),
    ]
    assert len({same, *others}) == 5


def test_tools_count_whatever_their_order_and_the_order_of_their_keys():
    look, cancel = {"name": "look", "parameters": {"a": 1, "b": 2}}, {"name": "cancel"}
    reordered = {"parameters": {"b": 2, "a": 1}, "name": "look"}
    assert tools_fingerprint([look, cancel]) == tools_fingerprint([cancel, reordered]) != tools_fingerprint([look])
    assert tools_fingerprint(None) == tools_fingerprint([]) == ""
    assert tools_fingerprint([{"name": "\ud800"}]) != tools_fingerprint([{"name": "\ud801"}])


def test_prompts_differ_by_every_token():
    prompts = [(), (1,), (1, 2), (2, 1), (12,), (258,), (1, 0)]
    assert len({prompt_fingerprint(ids) for ids in prompts}) == len(prompts)
    assert prompt_fingerprint([1, 2]) == prompt_fingerprint((1, 2))

"""The user's model: left as it was, set up once, set up anew when it changes, asked by several threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.generating import NEW, PROMPT, VOCABULARY, both, made, prompts
from torch import Tensor, nn
from transformers import PreTrainedModel

import precedent
from precedent.cache import SpeculationCache
from precedent.target import TargetModel
from precedent_generate import prepared
from precedent_generate.prepared import prepared_for
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm


def test_the_users_model_stays_as_it_was() -> None:
    """Modules, classes, configuration and weights: a bfloat16 model, whose linear layers are packed for our loop."""
    model = tiny_causal_lm(vocab_size=VOCABULARY, dtype=torch.bfloat16)
    before = [(name, type(module), dict(vars(module))) for name, module in model.named_modules()]
    weights = {name: (id(tensor), tensor._version, tensor.clone()) for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    model.generate(**prompts(PROMPT), max_new_tokens=4, custom_generate=precedent.generate)
    for name, module in model.named_modules():
        assert (name, type(module), dict(vars(module))) == before.pop(0)
    assert model.config._attn_implementation == "sdpa"
    assert model.config.to_dict() == config
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name][2])
    ours = prepared_for(model).target.model
    assert ours is not model
    assert ours.get_output_embeddings().weight is model.get_output_embeddings().weight


def test_a_second_call_pays_no_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made_targets = _count_targets(monkeypatch)
    model = tiny_causal_lm(vocab_size=VOCABULARY)
    for _ in range(3):
        model.generate(**prompts(PROMPT), max_new_tokens=4, custom_generate=precedent.generate)
        model.generate(**prompts(PROMPT), max_new_tokens=4)
    assert len(made_targets) == 1


def _count_targets(monkeypatch: pytest.MonkeyPatch) -> list[PreTrainedModel]:
    built: list[PreTrainedModel] = []

    def noted(model: PreTrainedModel) -> TargetModel:
        built.append(model)
        return TargetModel(model)

    monkeypatch.setattr(prepared, "TargetModel", noted)
    return built


def change_a_weight(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.get_output_embeddings().weight[:, :8].neg_()


def replace_a_module(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp = nn.Identity()


@pytest.mark.parametrize("change", [change_a_weight, replace_a_module])
def test_a_model_that_was_changed_is_set_up_anew(change: Callable[[PreTrainedModel], None]) -> None:
    """float32, where the packed copies of the old weights would still be at hand."""
    model, settings = made(dtype=torch.float32), {"max_new_tokens": 8, "do_sample": False}
    before = model.generate(**prompts(PROMPT), **settings, custom_generate=precedent.generate).tolist()
    change(model)
    alone, ours = both(model, prompts(PROMPT), **settings)
    assert ours.tolist() == alone.tolist() != before


class Switched(nn.Linear):
    """A layer with a switch, as adapters have one."""

    off = False

    def forward(self, input: Tensor) -> Tensor:
        return torch.zeros_like(input) if self.off else super().forward(input)


def test_an_adapter_that_is_switched_off_is_off() -> None:
    model, settings = made(), {"max_new_tokens": 8, "do_sample": False}
    layer = Switched(48, 48, dtype=torch.float64)
    model.model.layers[0].self_attn.o_proj = layer
    for off in (False, True):
        layer.off = off
        alone, ours = both(model, prompts(PROMPT), **settings)
        assert ours.tolist() == alone.tolist()


@pytest.mark.usefixtures("searches_at_once")
def test_a_cache_recalls_what_it_stored_for_its_tenant_alone() -> None:
    tokenizer, model = byte_tokenizer(), made(vocab_size=259, seed=8)
    inputs = prompts(tokenizer("look up order 17").input_ids)
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:

        def recalled(tenant: str) -> tuple[list[list[int]], int]:
            ours = model.generate(
                **inputs,
                max_new_tokens=40,
                do_sample=False,
                custom_generate=precedent.generate,
                speculation_cache=cache,
                speculation_tokenizer=tokenizer,
                tenant=tenant,
                return_dict_in_generate=True,
            )
            return ours.sequences.tolist(), ours.speculation[0]["accepted_by_source"].get("recall", 0)

        cold, warm, other = recalled("shop"), recalled("shop"), recalled("bank")
        stored = cache.list(tenant="shop")
    assert cold[0] == warm[0] == other[0]
    assert warm[1] > 20
    assert cold[1] == other[1] == 0
    assert [one.token_ids for one in stored] == [tuple(cold[0][0][len(inputs["input_ids"][0]) :])]
    assert "order 17" in stored[0].query


def test_calls_from_several_threads_do_not_meet(model: PreTrainedModel) -> None:
    """One model, one planner, one drafter: eight calls at once, each with the answer that it has alone."""
    rows, settings = [[*PROMPT, 20 + number] for number in range(8)], {"max_new_tokens": NEW, "do_sample": False}

    def ours(row: Sequence[int]) -> list[list[int]]:
        return model.generate(**prompts(row), **settings, custom_generate=precedent.generate).tolist()

    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(ours, rows))
    assert together == [model.generate(**prompts(row), **settings).tolist() for row in rows]

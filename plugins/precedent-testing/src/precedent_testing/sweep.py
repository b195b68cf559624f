"""Tries every causal-LM architecture of transformers as a target model: tiny, with random weights.

Each one that works is compared with plain forwards of an untouched copy, along every path of random trees.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from precedent.errors import UnsupportedError
from precedent.runtime.patched_modules import rebound
from precedent.runtime.plain_values import first_line
from precedent.target import Slot, TargetModel
from precedent.target.kv.layer_kinds import check_type
from precedent.target.support import layer_state_of
from precedent.tree import ROOT, CandidateTree, TreeBuilder
from precedent_testing.tiny_configs import tiny_config

WORKS, CHAINS, REFUSED, CRASHED = "works", "works on chains", "refused", "crashed"

EXACT, IN_FLOAT32 = 1e-9, 1e-5
"""Accepted relative distances: of modules that compute in float64, and of those with float32 inside."""

DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
"""Functions of transformers whose dtype can be replaced from outside."""

ONLY_FLOAT32 = frozenset({"inkling2_text", "xglm", "xlnet"})
"""Models that do not run in float64."""

MOST_PARAMETERS = 20_000_000

NUM_PROMPT, NUM_NODES, NUM_STEPS = 41, 8, 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one architecture: a verdict, the reason unless it works, and its distance from plain forwards."""

    model_type: str
    verdict: str
    reason: str = ""
    distance: float = 0.0


def try_architecture(model_type: str) -> Outcome:
    """Build a tiny model, make it a target and compare; never raises what the architecture is to blame for."""
    try:
        check_type(model_type)
        layer_state_of(config_class_of(model_type)())
        model, plain = tiny_model(model_type), in_float64(tiny_model(model_type))
    except UnsupportedError as refusal:
        return Outcome(model_type, REFUSED, str(refusal))
    except ImportError as missing:
        return Outcome(model_type, REFUSED, f"needs a package that is not installed here ({_line(missing)})")
    except Exception as error:  # nothing of ours has run yet
        return Outcome(model_type, REFUSED, f"transformers cannot build a tiny one here ({_line(error)})")
    try:
        target = TargetModel(model)
        distance = compare(target, plain)
    except UnsupportedError as refusal:
        return Outcome(model_type, REFUSED, str(refusal))
    except Exception as error:
        return Outcome(model_type, CRASHED, _line(error))
    if not distance <= IN_FLOAT32:  # so that one which is not a number is no success
        return Outcome(model_type, CRASHED, f"its trees are {distance:.1g} off plain forwards", distance)
    return Outcome(model_type, CHAINS if target.one_path else WORKS, target.runner.only_chains or "", distance)


def config_class_of(model_type: str) -> type[PreTrainedConfig]:
    """The config class of a causal LM."""
    return next(each for each in MODEL_FOR_CAUSAL_LM_MAPPING if each.model_type == model_type)


def tiny_model(model_type: str) -> PreTrainedModel:
    """A random model in float64; an equal one each time."""
    return copy.deepcopy(_tiny_model(model_type))


@lru_cache(maxsize=4)
def _tiny_model(model_type: str) -> PreTrainedModel:
    config: Any = tiny_config(config_class_of(model_type))
    for part in (config, config.get_text_config()):
        part.is_decoder = True
        part._experts_implementation = "eager"  # the only implementation that computes in float64
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(config).num_parameters()
    if size > MOST_PARAMETERS:
        raise ValueError(f"its tiny config has {size} parameters: testing/tiny_configs.py must know its sizes")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dtype = torch.float32 if model_type in ONLY_FLOAT32 else torch.float64
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():  # transformers' spread of 0.02 is too flat to tell positions apart
                if parameter.dim() > 1 and parameter.is_floating_point():
                    parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    model.eval()
    return model


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """The model, with the gated delta rules of transformers in float64 too, where they name float32 themselves."""
    for module in model.modules():
        forward = type(module).forward
        found = getattr(inspect.unwrap(forward), "__globals__", {})
        rules = {name: rebound(found[name], {"torch": _Float64()}) for name in DELTA_RULES if name in found}
        if rules:
            module.forward = MethodType(rebound(forward, rules), module)
    return model


class _Float64:
    """torch, where float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


@torch.inference_mode()
def compare(target: TargetModel, plain: PreTrainedModel) -> float:
    """The largest relative distance at any node of random trees, and after their commits, from plain forwards."""
    choose, slot, distances = random.Random(0), target.new_slot(), list[float]()
    target.prefill(slot, [choose.randrange(250) for _ in range(NUM_PROMPT)], chunk=NUM_PROMPT // 2)
    for _ in range(NUM_STEPS):
        tree = _tree(choose, only_chains=target.one_path)
        (scored,) = target.score([(slot, tree)])
        distances += _distances(plain, slot, tree, scored)
        target.commit(slot, tree, tree.path_to(choose.randrange(len(tree))), choose.randrange(250))
    return float(torch.tensor(distances).max())  # not a number if one of them is not


def _distances(plain: PreTrainedModel, slot: Slot, tree: CandidateTree, scored: Tensor) -> Iterator[float]:
    """Of every node, by a forward over the path to each leaf."""
    for leaf in set(range(len(tree))) - set(tree.parents):
        path = [ROOT, *tree.path_to(leaf)]
        text = [*slot.token_ids, slot.pending, *tree.tokens_to(leaf)]
        rows = plain(torch.tensor([text]), use_cache=False).logits[0, -len(path) :]
        for node, expected in zip(path, rows, strict=True):
            yield float((scored[node + 1] - expected).norm() / (expected - expected.mean()).norm())


def _tree(choose: random.Random, *, only_chains: bool) -> CandidateTree:
    builder, nodes = TreeBuilder(), [ROOT]
    for _ in range(NUM_NODES):
        parent = nodes[-1] if only_chains else choose.choice(nodes)
        nodes.append(builder.add_fixed(parent, choose.randrange(250), "sweep"))
    return builder.build()

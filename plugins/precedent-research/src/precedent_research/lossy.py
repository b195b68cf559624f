"""The `lossy_*` modes with a rule: the output may move a bounded distance from the target's distribution.

Relaxed verification shifts the target's distribution towards the proposals, then verifies losslessly against that. At
each node a rule maps (target distribution p, what was proposed) to a distribution pi to sample from instead. Nothing
else is lossy: the recursion runs on pi, so the output follows pi exactly, whatever was sampled. pi may depend on the
path, on the distribution of the first sample at the node and on the cached tokens beside it, but never on which token
was sampled there. A node without proposals keeps the target's distribution. A verdict spends the sum of TV(p, pi) over
the rows that its tokens came from.

`lossy_mentored:kl=0.05`, `lossy_typical:epsilon=0.09,delta=0.3` and `lossy_top_beta:beta=3,tau=1` name the rules of
this module; `precedent_research.judge` has `lossy_judge`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from precedent.errors import ConfigError
from precedent.sampling.rng import Rng
from precedent.sampling.target_rows import TargetRows
from precedent.tree import ROOT, CandidateTree, Sampled
from precedent.verify import Decide, RowWeights, Verdict, Verifier, walk

BISECTIONS = 42
SMALLEST = 1e-300  # tokens that nobody proposed lie below c1, so their logarithm is never used


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """What a rule sees at a node: the target's probabilities and logits, and what was proposed there.

    `draft_probs` `[vocab_size]` is the distribution of the first sample, all zero if nothing was sampled; it gives no
    mass to the cached tokens, `fixed` (token ids).
    """

    target_probs: Tensor
    logits: Tensor
    draft_probs: Tensor
    fixed: tuple[int, ...]


Rule = Callable[[Offer], Tensor]
"""The distribution `[vocab_size]` to use in place of `offer.target_probs`; depends only on its argument."""


def offer_at(tree: CandidateTree, rows: TargetRows, node: int) -> Offer | None:
    """What was proposed below `node`, or None if nothing was.

    Beside a sample, only the tokens that it excludes count as cached: once a cached token has been sampled, the tree no
    longer shows that it was cached.
    """
    candidates = tree.candidates_at.get(node, ())
    if not candidates:
        return None
    target_probs, distribution = rows.probs(node), candidates[0].distribution
    if isinstance(distribution, Sampled):
        draft_probs, fixed = distribution.probs().to(target_probs), distribution.excluded
    else:
        draft_probs, fixed = torch.zeros_like(target_probs), tuple(tree.token_ids[each.child] for each in candidates)
    return Offer(target_probs, rows.logits(node), draft_probs, fixed)


class Bent:
    """The distributions that a rule puts in place of the target's, and what each of them costs."""

    def __init__(self, tree: CandidateTree, rows: TargetRows, rule: Rule) -> None:
        self._tree, self._rows, self._rule = tree, rows, rule
        self._probs: dict[int, Tensor] = {}
        self._costs: dict[int, Tensor] = {}

    def probs(self, node: int) -> Tensor:
        """The distribution used after `node`, `[vocab_size]`."""
        if node not in self._probs:
            offer = offer_at(self._tree, self._rows, node)
            self._probs[node] = self._rows.probs(node) if offer is None else self._bent(node, offer)
        return self._probs[node]

    def cost(self, node: int) -> float:
        """Total variation between the distribution used after `node` and the target's."""
        self.probs(node)
        return float(self._costs.get(node, 0.0))

    def _bent(self, node: int, offer: Offer) -> Tensor:
        probs = self._rule(offer)
        self._costs[node] = (probs.double() - offer.target_probs.double()).clamp_(min=0.0).sum()
        return probs


def relaxed(rule: Rule) -> Verifier:
    """Verify with lazy tests against the distributions of `rule`; verdicts report what they spent."""

    def prepare(tree: CandidateTree, rows: TargetRows) -> Decide:
        bent = Bent(tree, rows, rule)
        weights = RowWeights(tree, bent.probs, lazy=True)

        def decide(rng: Rng) -> Verdict:
            verdict = walk(weights, rng)
            return replace(verdict, spent_tv=sum(bent.cost(node) for node in (ROOT, *verdict.path)))

        return decide

    return Verifier(prepare, lossy=True)


@dataclass(frozen=True, slots=True)
class Mentored:
    """Accept as much as KL(target || output) <= `kl` nats allows, at every token (mentored decoding).

    Maximising the accepted mass under that bound gives `clip(q, c1 p, c2 p)` for a sample from q: all ratios output /
    target lie in [c1, c2]. A cached token counts as a sample with probability 1. A token that the target excludes stays
    excluded. Raises ConfigError for a negative `kl`.
    """

    kl: float = 0.05

    def __post_init__(self) -> None:
        _check(self.kl >= 0.0, f"kl={self.kl} must be 0 (lossless) or more nats per token")

    def __call__(self, offer: Offer) -> Tensor:
        """The distribution within the bound that is nearest to the proposals, `[vocab_size]`."""
        target = offer.target_probs.double()
        wanted = _wanted(target, offer)
        if not bool((wanted * target).sum() > 0.0):
            return offer.target_probs  # the target excludes everything that was proposed
        return _nearest(target, wanted, self.kl).to(offer.target_probs)


def _wanted(target: Tensor, offer: Offer) -> Tensor:
    """Draft probabilities; cached tokens share a mass of 1 in proportion to the target's probabilities."""
    wanted = offer.draft_probs.double().clone()
    cached = target[list(offer.fixed)]
    if offer.fixed and bool(cached.sum() > 0.0):
        wanted[list(offer.fixed)] = cached / cached.sum()
    return torch.where(target > 0.0, wanted, 0.0)


def _nearest(target: Tensor, wanted: Tensor, bound: float) -> Tensor:
    """`clip(wanted, c1 target, c2 target)` with sum 1, the least rejected mass and KL(target || result) <= bound.

    Both ends follow from the mass `lifted` onto tokens below c1 target: the mass cut above c2 target is `lifted` plus
    the excess of `wanted` over 1. KL falls as `lifted` grows, so bisection finds the smallest; at the largest,
    c1 = c2 = 1.
    """
    clip = _Clip(target, wanted)
    low = (1.0 - clip.total).clamp(min=0.0)
    high = (target - wanted).clamp(min=0.0).sum()
    high = torch.where(clip.divergence(low) <= bound, low, high)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        fits = clip.divergence(middle) <= bound
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    distribution = clip.distribution(high)
    return distribution / distribution.sum()


class _Clip:
    """`clip(wanted, c1 target, c2 target)` as a function of the mass c1 lifts; tokens sorted by wanted / target."""

    def __init__(self, target: Tensor, wanted: Tensor) -> None:
        self.target, self.wanted, self.total = target, wanted, wanted.sum()
        ratio, order = torch.where(target > 0.0, wanted / target, 0.0).sort()
        self._below_target, self._below_wanted = target[order].cumsum(0), wanted[order].cumsum(0)
        before_target, before_wanted = self._below_target - target[order], self._below_wanted - wanted[order]
        self._above_target, self._above_wanted = target.sum() - before_target, self.total - before_wanted
        self._lifted = ratio * before_target - before_wanted
        self._cut = self._above_wanted - ratio * self._above_target
        self._below_log = (target[order] * ratio.clamp(min=SMALLEST).log()).cumsum(0)

    def distribution(self, lifted: Tensor) -> Tensor:
        """The clipped distribution, `[vocab_size]`."""
        lower, upper, _, _ = self._ends(lifted)
        return torch.maximum(lower * self.target, torch.minimum(self.wanted, upper * self.target))

    def divergence(self, lifted: Tensor) -> Tensor:
        """KL(target || clipped distribution) in nats, without a pass over the vocabulary."""
        lower, upper, last, first = self._ends(lifted)
        between = torch.where(first > last, self._below_log[(first - 1).clamp(min=0)] - self._below_log[last], 0.0)
        return -(self._below_target[last] * lower.log() + between + self._above_target[first] * upper.log())

    def _ends(self, lifted: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """c1 and c2 (one linear equation each), the last token that c1 lifts and the first that c2 cuts."""
        last = (torch.searchsorted(self._lifted, lifted, right=True) - 1).clamp(min=0)
        cut = lifted + self.total - 1.0
        first = torch.searchsorted(-self._cut, -cut).clamp(max=self._cut.numel() - 1)
        lower = (lifted + self._below_wanted[last]) / self._below_target[last]
        return lower, (self._above_wanted[first] - cut) / self._above_target[first], last, first


@dataclass(frozen=True, slots=True)
class Typical:
    """Accept tokens with target probability above `min(epsilon, delta * exp(-entropy))` (typical acceptance, Medusa).

    Other tokens keep their lossless probability. Raises ConfigError for a parameter outside (0, 1].
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        _check(0.0 < self.epsilon <= 1.0, f"epsilon={self.epsilon} must lie in (0, 1]")
        _check(0.0 < self.delta <= 1.0, f"delta={self.delta} must lie in (0, 1]")

    def __call__(self, offer: Offer) -> Tensor:
        """The distribution that results from accepting every typical token, `[vocab_size]`."""
        target = offer.target_probs
        entropy = -torch.special.xlogy(target, target).sum()
        threshold = (self.delta * (-entropy).exp()).clamp(max=self.epsilon)
        return _accepting(offer, target > threshold, target)


@dataclass(frozen=True, slots=True)
class TopBeta:
    """Accept any of the target's `beta` likeliest tokens within `tau` nats of the likeliest (SpecDec).

    Meant for temperature 0, where `beta=1` is greedy decoding. Tokens removed by truncation or a grammar are not
    accepted; ties take the lowest ids. Raises ConfigError for a parameter out of its range.
    """

    beta: int = 3
    tau: float = 1.0

    def __post_init__(self) -> None:
        _check(self.beta >= 1 and self.beta == int(self.beta), f"beta={self.beta} must be a whole number from 1")
        _check(self.tau >= 0.0, f"tau={self.tau} must be 0 or more nats")

    def __call__(self, offer: Offer) -> Tensor:
        """The distribution that results from accepting every token at the top, `[vocab_size]`."""
        scores = offer.logits.to(offer.target_probs)
        is_greedy = offer.target_probs.max() == 1.0
        scores = torch.where((offer.target_probs > 0.0) | is_greedy, scores, -torch.inf)
        top = scores.sort(descending=True, stable=True).indices[: int(self.beta)]
        eligible = torch.zeros_like(scores, dtype=torch.bool).index_fill_(0, top, True)
        eligible &= (scores >= scores.max() - self.tau) & scores.isfinite()
        return _accepting(offer, eligible, scores.softmax(0))


def _accepting(offer: Offer, eligible: Tensor, weights: Tensor) -> Tensor:
    """Accept every `eligible` sample, and others with their lossless probability; then an eligible cached token.

    Eligible cached tokens share the remaining mass in proportion to `weights`. If there is none, the rest is sampled
    from the target's remaining mass.
    """
    accepted = torch.where(eligible, offer.draft_probs, torch.minimum(offer.draft_probs, offer.target_probs))
    missing = (offer.target_probs - accepted).clamp(min=0.0)
    cached = torch.zeros_like(missing)
    cached[list(offer.fixed)] = (weights * eligible)[list(offer.fixed)]
    rest = cached if bool(cached.sum() > 0.0) else missing
    left = (1.0 - accepted.sum()).clamp(min=0.0)
    distribution = accepted + left * rest / rest.sum().clamp(min=torch.finfo(rest.dtype).tiny)
    return distribution / distribution.sum()


def _check(holds: bool, rule: str) -> None:
    if not holds:  # NaN fails every comparison, so it is refused as well
        raise ConfigError(rule)


def mode_text(name: str, parameters: Mapping[str, str]) -> str:
    """Return a mode as its caller wrote it."""
    return ":".join([name, *filter(None, [",".join(f"{key}={value}" for key, value in parameters.items())])])


def number(mode: str, parameters: Mapping[str, str], key: str) -> float:
    """Return a parameter as a number. Raises ConfigError if it is not one."""
    try:
        return float(parameters[key])
    except ValueError as error:
        raise ConfigError(f"mode={mode!r}: {key}={parameters[key]} is not a number") from error


def _relaxed_by(name: str, rule: type[Mentored | Typical | TopBeta], parameters: Mapping[str, str]) -> Verifier:
    """Return the verifier of a mode whose parameters are the rule's fields."""
    mode, known = mode_text(name, parameters), [field.name for field in dataclasses.fields(rule)]
    for key in parameters:
        if key not in known:
            raise ConfigError(f"mode={mode!r}: {name} has no parameter {key!r}; known: {', '.join(known)}")
    return relaxed(rule(**{key: number(mode, parameters, key) for key in parameters}))  # type: ignore[arg-type]


RULES: Mapping[str, type[Mentored | Typical | TopBeta]] = {
    "lossy_mentored": Mentored,
    "lossy_typical": Typical,
    "lossy_top_beta": TopBeta,
}
"""Mode name to rule; the rule's fields are the mode's parameters."""

mentored, typical, top_beta = (partial(_relaxed_by, name, rule) for name, rule in RULES.items())
"""The factories of these modes, for the entry-point group `precedent.modes`."""

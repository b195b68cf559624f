"""The class that vLLM's speculative method `custom_class` loads in its workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from precedent_engines import DRAFTERS, DraftingService, DraftingSession
from precedent_engines.followed import Followed, FollowedRequests
from precedent_vllm.counts import Publisher, Series
from precedent_vllm.engine import Vllm
from precedent_vllm.note import NAME, NOTHING, OFF, Note, unseal
from precedent_vllm.settings import Settings

RequestState = Any
"""vLLM's `CachedRequestState`, one object per request until vLLM forgets it: `prompt_token_ids`, `sampling_params`."""


class Drafter:
    """Drafts for vLLM's batch from the store that the environment names; holds no model.

    vLLM makes one per worker. Where several workers hold parts of one model, only the one whose drafts vLLM takes opens
    the store. Raises UnsupportedError for a vLLM that this package does not know, and what `DraftingService` raises:
    vLLM then does not start.
    """

    def __init__(
        self,
        vllm_config: Any,
        vllm: Vllm | None = None,
        settings: Settings | None = None,
        service: DraftingService | None = None,
    ) -> None:
        self._vllm = vllm = vllm or Vllm()
        self._settings = settings = settings or Settings.read()
        vllm.check_version()
        self.runner: Any = None
        self._requests: FollowedRequests | None = None
        if settings.on and vllm.counts(vllm_config):
            self._requests = FollowedRequests(service or _opened(settings, vllm_config.model_config))
            self._max_tokens = vllm_config.speculative_config.num_speculative_tokens
            self._publisher = Publisher(settings.folder, self.counts)
            vllm.hand_over_runner(self)

    def load_model(self, *_: Any, **__: Any) -> None:
        """Nothing to load; see that vLLM's rejection sampler on this machine is right. Raises UnsupportedError."""
        self._vllm.check_rejection_sampler()

    def arrived(self, states: Mapping[str, RequestState]) -> None:
        """Begin drafting for those of vLLM's requests that are new, before their prompts are computed."""
        if (requests := self._requests) is not None:

            def begin() -> None:
                requests.keep(states)
                for req_id, state in states.items():
                    self._followed(requests, req_id, state)

            requests.guarded(begin, None)

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **_: Any
    ) -> list[list[int]]:
        """One list of drafts per row of the batch; a failure is logged and counted, and costs drafts.

        It is empty for a row that sampled nothing, as in a part of its prompt. `num_tokens_no_spec` are the rows'
        tokens in `token_ids_cpu` ([rows, context]), those just sampled included.
        """
        none: list[list[int]] = [[] for _ in sampled_token_ids]
        if (requests := self._requests) is None:
            return none
        return requests.guarded(
            lambda: self._proposed(requests, sampled_token_ids, num_tokens_no_spec, token_ids_cpu), none
        )

    def counts(self) -> Series:
        """What was counted so far, for Prometheus."""
        assert self._requests is not None
        counts, accepted = self._requests.counts(), self._requests.service.metrics().accepted_by_source
        told = ("drafted_requests", "refused_requests", "failed_steps", "store_failures")
        return {
            "precedent:spec_decode_num_accepted_tokens": {
                f'source="{source}"': number for source, number in accepted.items()
            },
            "precedent:spec_decode_num_draft_tokens": {"": counts["draft_tokens"]},
            **{f"precedent:{name}": {"": counts[name]} for name in told},
        }

    def close(self) -> None:
        """End all sessions and close the store; vLLM does not call it, a process's end does no harm."""
        if self._requests is not None:
            self._publisher.close()
            self._requests.close()
            self._requests = None

    def _proposed(
        self, requests: FollowedRequests, sampled: Sequence[Sequence[int]], lengths: Sequence[int], tokens: Any
    ) -> list[list[int]]:
        states: Mapping[str, RequestState] = self.runner.requests  # all that vLLM knows, waiting ones as well
        requests.keep(states)
        drafts: list[list[int]] = [[] for _ in sampled]
        rows, sessions = list[tuple[int, int]](), list[DraftingSession]()
        for row, (req_id, new) in enumerate(zip(self.runner.input_batch.req_ids, sampled, strict=False)):
            state, length = states[req_id], int(lengths[row])
            num_prompt = _prompt_length(state)
            one = self._followed(requests, req_id, state, length - num_prompt)
            one.tell(tokens[row][num_prompt + one.num_known : length])
            if one.session is not None and len(new):
                most = getattr(state.sampling_params, "max_tokens", None)
                rows.append((row, self._max_tokens if most is None else max(0, int(most) - one.num_known - 1)))
                sessions.append(one.session)
        chains = requests.service.chains(sessions, self._max_tokens) if sessions else []
        for (row, longest), chain in zip(rows, chains, strict=True):
            drafts[row] = chain[:longest]
        return drafts

    def _followed(
        self, requests: FollowedRequests, req_id: str, state: RequestState, num_answered: int | None = None
    ) -> Followed:
        return requests.follow(
            req_id, state, _prompt_length(state), lambda: self._begun(requests, req_id, state), num_answered
        )

    def _begun(self, requests: FollowedRequests, req_id: str, state: RequestState) -> DraftingSession | None:
        params, prompt = state.sampling_params, state.prompt_token_ids
        note = self._note((getattr(params, "extra_args", None) or {}).get(NAME))
        if not prompt or not note.on:
            return None
        return requests.begin(
            req_id, prompt, tenant=note.tenant, query=note.query, workflow_step=note.workflow_step, tools=note.tools,
            end_token_ids=_stops(params), prediction=note.prediction,
        )  # fmt: skip

    def _note(self, text: Any) -> Note:
        """The note of our own middleware; else what holds for every request of this server."""
        if text == OFF:
            return Note(on=False)
        tenant = self._settings.tenant
        return unseal(text, self._settings.secret) or (Note(tenant=tenant) if tenant else NOTHING)


def _opened(settings: Settings, model: Any) -> DraftingService:
    return DraftingService(
        settings.store, model.tokenizer, settings.drafters or DRAFTERS,
        embedder=settings.embedder, cost=settings.step_cost, context_length=model.max_model_len,
    )  # fmt: skip


def _prompt_length(state: RequestState) -> int:
    return 0 if state.prompt_token_ids is None else len(state.prompt_token_ids)


def _stops(params: Any) -> Iterable[int]:
    """The tokens that end an answer; the model's own do not where vLLM is told to ignore them."""
    name = "stop_token_ids" if getattr(params, "ignore_eos", False) else "all_stop_token_ids"
    return getattr(params, name, None) or ()

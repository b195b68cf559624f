"""What pages call the ways, modes and parts that commands name."""

from __future__ import annotations

SAID = {"draft-only": "draft model", "cache-only": "cache", "both": "both", "repeat": "seen before"}
BESIDE = {
    "quiet": "nothing",
    "one neighbour": "one busy program",
    "two neighbours": "two",
    "quiet again": "nothing, again",
}
SOFTWARE = {
    "generate": "transformers `generate`",
    "prompt-lookup": "transformers prompt lookup",
    "plain": "ours, plain",
    "ours": "ours",
}
REPLAYED = {
    f"tau_{file}-{pool}": f"{file}, {pool.replace('-', ' ')}"
    for file in ("airline", "retail")
    for pool in ("online", "same-task", "other-tasks")
}
LEFT_OUT = {
    "without recall": "recall",
    "without prompt": "copying from the prompt",
    "without similarity": "similarity",
    "without holes": "holes: the way back after a value differed",
    "without anchors": "the start of an answer",
    "without kinship": "step, tools, record and age",
    "without calibration": "learnt calibration",
}
WRITTEN = {
    "in a string": "in a JSON string",
    "in a number": "in a JSON number",
    "forced": "forced text",
    "free text": "free text, looking for `<tool_call>`",
}
RELAXED = {"plain": "plain", "greedy": "exact"} | {
    f"lossy_top_beta:beta={beta},tau={tau}": f"β = {beta}, τ = {tau:g}"
    for beta, tau in ((1, 0.0), (2, 0.5), (2, 1.0), (2, 2.0), (3, 1.0), (3, 3.0), (5, 5.0), (10, 10.0))
}
LOADS = {
    "1 writers][write": "1 writer",
    "4 writers][write": "4 writers",
    "16 writers][write": "16 writers",
    "1 readers][read": "1 reader (six transactions a call)",
    "2 readers][read": "2 readers",
    "4 readers][read": "4 readers",
    "16 readers][read": "16 readers",
}
VLLM = {
    "ngram": "vLLM's `ngram`",
    "suffix": "vLLM's `suffix`",
    "precedent": "`precedent_vllm.Drafter`, which drafts what pays at the measured time of a step",
    "free-width": "the same where width is said to be free (`PRECEDENT_VLLM_STEP_COST`), as on most GPUs",
}
RECORDED = {"plain": "none"} | VLLM | {"empty": "`precedent_vllm.Drafter` with an empty store"}
POOLS = {
    "vllm-airline": "airline, the same tasks",
    "vllm-airline-other": "airline, other tasks",
    "vllm-retail-other": "retail, other tasks",
}
DESK = {
    "nothing": "a custom drafter that proposes nothing",
    "ngram": VLLM["ngram"],
    "precedent": "`precedent_vllm.Drafter`",
}
EQUAL = {"cold": "cold cache", "warm": "warm cache", "adversarial": "wrong answers", "8 at once": "eight at once"}
EQUAL |= {"continued": "behind a decoded answer"}

DRAFTS = {
    "first-layers 4": "`first-layers:4`, untrained",
    "exit-4": "exit behind layer 4",
    "chain": "plain chain of one layer",
    "eagle": "chain that reads its target, one pass (EAGLE's training)",
    "passes": "… three passes (HASS)",
    "mask": "… and GRIFFIN's mask",
    "fusion": "… and its fusion",
    "griffin": "… and both",
    "block T=1": "block",
    "block-filled T=1": "block trained partly filled (SpecDiff)",
    "block-filled T=2": "… in two forwards",
    "block-filled T=4": "… in four",
    "block-none T=1": "block without a condition (SpecDec)",
    "block-none T=2": "… in two forwards",
    "block-none T=4": "… in four",
}

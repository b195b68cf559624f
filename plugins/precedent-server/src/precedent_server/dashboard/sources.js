// Where tokens come from: their colours' class names, and what they mean.

import { element, written } from "./dom.js";

const MEANINGS = new Map([
  ["target", "the model's own token, one at the end of each forward pass"],
  ["recall", "earlier completions in the semantic cache"],
  ["prompt", "the conversation so far"],
  ["template", "the forms of the agent's tool calls"],
  ["draft-model", "the draft model"],
  ["prediction", "the caller's own guess"],
  ["grammar", "tokens that the grammar forces"],
]);

const NUM_OTHER_COLOURS = 6;
const others = [];

/** The class of a source's colour; drafters of other packages share a few, in order of appearance. */
export function classOf(source) {
  if (MEANINGS.has(source)) return `source-${source}`;
  if (!others.includes(source)) others.push(source);
  return `other-${others.indexOf(source) % NUM_OTHER_COLOURS}`;
}

/** The source's name on its colour. */
export function swatch(source) {
  return element("span", { className: `swatch ${classOf(source)}`, textContent: source });
}

/** A list of sources with their numbers of tokens, in the order of the table above, then all others. */
export function legend(counts) {
  const names = [...MEANINGS.keys()].filter((name) => counts.has(name));
  names.push(...[...counts.keys()].filter((name) => !MEANINGS.has(name)));
  return names.map((name) =>
    element("li", {}, swatch(name), ` ${written(counts.get(name))}: ${MEANINGS.get(name) ?? "another drafter"}`),
  );
}

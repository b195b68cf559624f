// Browses, searches and forgets the completions of the key's own tenant.

import { ask } from "./api.js";
import { byId, element, written } from "./dom.js";

const PER_PAGE = 20;
const SHOWN_OF_TEXT = 80;

let query = "";
let offset = 0;
let round = 0;

export function startCompletions() {
  byId("search").addEventListener("submit", (event) => {
    event.preventDefault();
    query = byId("query").value;
    showCompletions();
  });
  byId("newer").addEventListener("click", () => showCompletions(offset - PER_PAGE));
  byId("older").addEventListener("click", () => showCompletions(offset + PER_PAGE));
  byId("forget").addEventListener("click", forget);
}

/** Lists completions from the newest, or from a later one; returns whether it could. */
export async function showCompletions(from = 0) {
  const mine = ++round;
  const asked = new URLSearchParams({ model: byId("model").value, query, offset: from, limit: PER_PAGE });
  try {
    const found = await (await ask(`/dashboard/completions?${asked}`)).json();
    if (mine !== round) return;
    offset = from;
    show(found);
  } catch (error) {
    if (mine !== round) return;
    byId("completions").replaceChildren();
    byId("cache-buttons").hidden = true;
    say(`There is nothing to show: ${error.message}`);
  }
}

function show({ completions, more }) {
  byId("completions").replaceChildren(...completions.map(item));
  byId("cache-buttons").hidden = completions.length === 0 && offset === 0;
  byId("newer").disabled = offset === 0;
  byId("older").disabled = !more;
  const numbers = `Completions ${offset + 1} to ${offset + completions.length}, newest first.`;
  say(completions.length ? numbers : query ? "Nothing holds this text." : "There are no completions.");
}

function item(one) {
  const label = `Choose completion ${one.id}`;
  const choice = element("input", { type: "checkbox", value: String(one.id), ariaLabel: label });
  const tried = one.accepted + one.rejected;
  const facts = [
    `${one.id}`,
    new Date(one.created * 1000).toLocaleString(),
    `${written(one.num_tokens)} tokens`,
    ...(one.count > 1 ? [`stored ${written(one.count)} times`] : []),
    ...(tried ? [`${written(one.accepted)} of ${written(tried)} proposed tokens accepted`] : []),
    ...(one.workflow_step ? [one.workflow_step] : []),
  ];
  const start = one.text.trim().slice(0, SHOWN_OF_TEXT) || "(no text)";
  const summary = element("summary", {}, start, element("small", { className: "faint" }, facts.join(" · ")));
  const details = element("details", {}, summary, part("Query", one.query), part("Answer", one.text));
  return element("li", { className: "panel" }, choice, details);
}

function part(title, text) {
  return element("div", {}, element("h3", {}, title), element("p", { className: "answer" }, text));
}

async function forget() {
  const chosen = [...byId("completions").querySelectorAll("input:checked")].map((box) => Number(box.value));
  if (chosen.length === 0) {
    say("Choose completions first.");
    return;
  }
  if (!window.confirm(`Forget ${chosen.length} completions for good?`)) return;
  try {
    const answer = await ask("/dashboard/forget", { body: { ids: chosen, model: byId("model").value } });
    const { forgotten } = await answer.json();
    await showCompletions(offset);
    say(`${forgotten} forgotten. ${byId("cache-status").textContent}`);
    byId("cache-status").focus();
  } catch (error) {
    say(`Nothing was forgotten: ${error.message}`);
  }
}

function say(text) {
  byId("cache-status").textContent = text;
}

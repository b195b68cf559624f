// Live figures of every model, asked for every two seconds while the page can be seen.

import { ask } from "./api.js";
import { byId, element, written } from "./dom.js";
import { swatch } from "./sources.js";

const EVERY_MILLISECONDS = 2000;

const LATENCIES = [
  ["request_queue_time_seconds", "Waiting for a place"],
  ["time_to_first_token_seconds", "First token"],
  ["inter_token_latency_seconds", "Between tokens"],
  ["e2e_request_latency_seconds", "Whole answer"],
];

let timer = null;
let round = 0;
let before = null;

/** Starts anew, as after a change of key; stops when the server refuses. */
export async function startFigures() {
  clearTimeout(timer);
  const mine = ++round;
  if (!document.hidden) {
    try {
      const found = await (await ask("/dashboard/figures")).json();
      if (mine !== round) return;
      show(found);
    } catch (error) {
      if (mine !== round) return;
      byId("figures-models").replaceChildren();
      byId("figures-status").textContent = `There are no figures: ${error.message}`;
      if (error.status === 401 || error.status === 403) return;
    }
  }
  timer = setTimeout(startFigures, EVERY_MILLISECONDS);
}

function show(found) {
  byId("figures-status").textContent = "";
  const blocks = Object.entries(found.models).map(([name, one]) => block(name, one, found));
  byId("figures-models").replaceChildren(...blocks);
  before = found;
}

function block(name, one, found) {
  const values = [
    ["Tokens per second", speed(name, one, found.seconds)],
    ["Tokens per step", one.tokens_per_step === null ? "–" : written(one.tokens_per_step, 2)],
    ["Time saved", `${written(one.decode_seconds_saved, 1)} s`],
    ["Running", written(one.num_requests_running)],
    ["Waiting", written(one.num_requests_waiting)],
    ["Answered", written(one.num_requests_finished)],
    ["Cancelled", written(one.num_requests_cancelled)],
    ["Failed", written(one.num_requests_failed)],
    ["Tokens written", written(one.generation_tokens)],
  ].map(([title, value]) => element("div", {}, element("dt", {}, title), element("dd", {}, value)));
  const tables = element("div", { className: "tables" }, sourceTable(one), latencyTable(one));
  return element("article", { className: "panel" }, element("h3", {}, name),
    element("dl", { className: "clocks" }, ...values), tables);
}

/** Tokens per second since the figures before these. */
function speed(name, one, seconds) {
  const then = before?.models[name];
  if (!then || seconds <= before.seconds) return "–";
  return written(Math.max(0, one.generation_tokens - then.generation_tokens) / (seconds - before.seconds), 1);
}

function sourceTable(one) {
  const counts = Object.entries(one.accepted_by_source).sort((left, right) => right[1] - left[1]);
  const rows = counts.map(([source, number]) => row(swatch(source), written(number), share(number, one)));
  return table("Accepted tokens by source", ["Source", "Tokens", "Of all proposed"], rows);
}

const share = (number, one) => `${written((100 * number) / Math.max(1, one.num_draft_tokens), 1)} %`;

function latencyTable(one) {
  const rows = LATENCIES.map(([field, title]) => row(title, milliseconds(one[field].p50), milliseconds(one[field].p95)));
  return table("Latency of recent requests", ["Time", "Median", "95th percentile"], rows);
}

const milliseconds = (seconds) => `${written(seconds * 1000, 1)} ms`;

function row(head, ...cells) {
  return element("tr", {}, element("th", { scope: "row" }, head), ...cells.map((cell) => element("td", {}, cell)));
}

function table(caption, heads, rows) {
  const head = element("tr", {}, ...heads.map((name) => element("th", { scope: "col" }, name)));
  return element("table", {}, element("caption", {}, caption), element("thead", {}, head),
    element("tbody", {}, ...rows));
}

// Asks the model, plain or speculated or both, and shows the answers.

import { ask } from "./api.js";
import { AnswerView } from "./answer_view.js";
import { byId } from "./dom.js";
import { chunksOf } from "./stream.js";

const TITLES = { speculated: "Speculated", plain: "Plain" };

let running = null;

export function startPlayground() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running === null) run();
  });
  byId("stop").addEventListener("click", () => running?.abort());
}

async function run() {
  const asked = requestOf();
  const chosen = document.querySelector("input[name=run]:checked").value;
  const kinds = chosen === "both" ? ["speculated", "plain"] : [chosen];
  running = new AbortController();
  setBusy(true);
  byId("answers").replaceChildren();
  try {
    const ends = [];
    for (const kind of kinds) ends.push(await runOne(kind, asked, running.signal));
    byId("answer-status").textContent = `The answer is complete. ${ends.join(" ")}`;
  } catch (error) {
    const stopped = error.name === "AbortError";
    byId("answer-status").textContent = stopped ? "Stopped." : `There is no answer: ${error.message}`;
  } finally {
    running = null;
    setBusy(false);
  }
}

function requestOf() {
  return {
    model: byId("model").value,
    messages: [{ role: "user", content: byId("message").value }],
    temperature: byId("temperature").valueAsNumber,
    max_completion_tokens: byId("max-tokens").valueAsNumber,
    stream: true,
    stream_options: { include_usage: true, include_sources: true },
  };
}

async function runOne(kind, asked, signal) {
  byId("answer-status").textContent = `${TITLES[kind]}: the model is writing.`;
  const view = new AnswerView(TITLES[kind]);
  byId("answers").append(view.node);
  const clock = setInterval(() => view.tick(), 100);
  try {
    const answer = await ask("/v1/chat/completions", { body: { ...asked, speculation: kind !== "plain" }, signal });
    for await (const chunk of chunksOf(answer)) view.add(chunk);
  } finally {
    clearInterval(clock);
    view.end();
  }
  return `${TITLES[kind]}: ${view.summary}.`;
}

function setBusy(busy) {
  byId("send").disabled = busy;
  byId("stop").disabled = !busy;
  byId("answers").setAttribute("aria-busy", String(busy));
}

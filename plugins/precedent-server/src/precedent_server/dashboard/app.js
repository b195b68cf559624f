// Starts the page: asks for the models, and for a key where one is needed.

import { ask, useKey } from "./api.js";
import { showCompletions, startCompletions } from "./completions.js";
import { byId, element } from "./dom.js";
import { startFigures } from "./figures.js";
import { startPlayground } from "./playground.js";
import { startSteps } from "./steps.js";

/** Asks for everything anew, as with another key. */
async function load() {
  try {
    const { data } = await (await ask("/v1/models")).json();
    byId("model").replaceChildren(...data.map(({ id }) => element("option", { value: id }, id)));
    byId("page-status").textContent = "";
  } catch (error) {
    byId("page-status").textContent = error.message;
    if (error.status === 401) askForKey();
    return;
  }
  await Promise.all([startFigures(), showCompletions()]);
}

function askForKey() {
  byId("key-form").hidden = false;
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
  byId("key").value = "";
  load();
});
byId("model").addEventListener("change", () => showCompletions());
startPlayground();
startCompletions();
startSteps();
load();

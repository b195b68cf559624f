// Shows the last steps of a model, one at a time: the candidate tree as a picture and as a table.

import { ask } from "./api.js";
import { byId, element, written } from "./dom.js";
import { swatch } from "./sources.js";

let steps = [];
let shown = 0;

export function startSteps() {
  byId("look").addEventListener("click", look);
  byId("later").addEventListener("click", () => show(shown - 1));
  byId("earlier").addEventListener("click", () => show(shown + 1));
}

async function look() {
  try {
    const asked = new URLSearchParams({ model: byId("model").value });
    ({ steps } = await (await ask(`/dashboard/steps?${asked}`)).json());
    show(0);
  } catch (error) {
    steps = [];
    show(0);
    byId("steps-status").textContent = `There is nothing to show: ${error.message}`;
  }
}

function show(at) {
  shown = at;
  const step = steps[at];
  byId("later").disabled = at === 0;
  byId("earlier").disabled = at + 1 >= steps.length;
  byId("step").replaceChildren(...(step ? [picture(step), table(step)] : []));
  byId("steps-status").textContent = step ? summary(step) : "There are no steps with candidates yet.";
}

function summary(step) {
  const accepted = `${written(step.num_accepted)} of ${written(step.nodes.length)} candidates were accepted`;
  const expected = `the planner expected ${written(step.expected_tokens, 2)} tokens of the step`;
  return `Step ${step.number}: ${accepted}; ${expected}. The model’s own token came after them.`;
}

/** The tree as an image, which runs no script and loads nothing. */
function picture(step) {
  const src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(step.picture)}`;
  const image = element("img", { src, alt: "The candidate tree; the table below tells the same." });
  const frame = element("div", { className: "picture", tabIndex: 0, ariaLabel: "Candidate tree" }, image);
  frame.setAttribute("role", "region");
  return frame;
}

function table(step) {
  const heads = ["Candidate", "Token", "After", "Source", "If its parent is", "Whole path", "Accepted"];
  const head = element("tr", {}, ...heads.map((name) => element("th", { scope: "col" }, name)));
  const caption = element("caption", {}, "Candidates, with the probabilities of being accepted that chose them");
  const made = element("table", {}, caption, element("thead", {}, head));
  made.append(element("tbody", {}, ...step.nodes.map(row)));
  return element("div", { className: "picture", tabIndex: 0 }, made);
}

function row(node, number) {
  const cells = [
    element("code", {}, JSON.stringify(node.text)),
    node.parent < 0 ? "the text" : String(node.parent),
    swatch(node.sources[0]),
    probability(node.estimate),
    probability(node.path_probability),
    node.accepted ? "yes" : "no",
  ];
  const head = element("th", { scope: "row" }, String(number));
  return element("tr", {}, head, ...cells.map((cell) => element("td", {}, cell)));
}

const probability = (value) => (value === null ? "sampled" : written(value, 3));

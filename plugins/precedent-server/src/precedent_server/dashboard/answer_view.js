// Shows one answer while it is written: its clocks, its tokens in their sources' colours, and a legend.

import { element, written } from "./dom.js";
import { classOf, legend } from "./sources.js";

export class AnswerView {
  constructor(title) {
    this.counts = new Map();
    this.started = performance.now();
    this.first = null;
    this.total = null;
    this.numTokens = 0;
    this.clocks = ["First token", "Total", "Tokens per second"].map((name) => [name, element("dd", {}, "–")]);
    this.text = element("p", { className: "answer" });
    this.legend = element("ul", { className: "legend" });
    const rows = this.clocks.map(([name, value]) => element("div", {}, element("dt", {}, name), value));
    this.node = element("article", { className: "panel" }, element("h3", {}, title));
    this.node.append(element("dl", { className: "clocks" }, ...rows), this.text, this.legend);
  }

  /** Adds what a chunk tells. */
  add(chunk) {
    for (const [text, source] of chunk.sources ?? []) {
      this.counts.set(source, (this.counts.get(source) ?? 0) + 1);
      this.numTokens += 1;
      if (text) this.text.append(element("span", { className: `token ${classOf(source)}`, title: source }, text));
    }
    if (this.numTokens && this.first === null) this.first = this.seconds;
    if (chunk.usage) this.numTokens = chunk.usage.completion_tokens;
    if (chunk.sources?.length) this.legend.replaceChildren(...legend(this.counts));
    this.tick();
  }

  get seconds() {
    return (performance.now() - this.started) / 1000;
  }

  /** Brings the clocks up to date. */
  tick() {
    const total = this.total ?? this.seconds;
    const values = [
      this.first === null ? "–" : `${written(this.first, 2)} s`,
      `${written(total, 2)} s`,
      this.numTokens ? written(this.numTokens / total, 1) : "–",
    ];
    this.clocks.forEach(([, cell], at) => (cell.textContent = values[at]));
  }

  /** Stops the clocks. */
  end() {
    this.total = this.seconds;
    this.tick();
  }

  /** The answer's end in one sentence. */
  get summary() {
    return `${written(this.numTokens)} tokens in ${written(this.total, 2)} seconds`;
  }
}

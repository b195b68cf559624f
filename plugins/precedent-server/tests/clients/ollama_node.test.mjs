// The `ollama` package against the server: `node --test`, with PRECEDENT_ADDRESS and PRECEDENT_KEY.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Ollama } from "ollama";

const { PRECEDENT_ADDRESS: host, PRECEDENT_KEY: key } = process.env;
const client = new Ollama({ host, headers: { Authorization: `Bearer ${key}` } });

const ADA = '{"name": "Ada", "born": 1815}';
const CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "1042"}}\n</tool_call>';
const LOOK_UP = {
  type: "function",
  function: {
    name: "look_up",
    description: "Looks an order up.",
    parameters: { type: "object", properties: { number: { type: "string" } }, required: ["number"] },
  },
};
const user = (content) => [{ role: "user", content }];
const ask = (content, more = {}) => client.chat({ model: "echo", messages: user(content), ...more });
const all = async (stream) => {
  const found = [];
  for await (const one of stream) found.push(one);
  return found;
};

test("chat", async () => {
  const answer = await ask("Where is order 1042?", { options: { temperature: 0 }, keep_alive: "5m" });
  assert.equal(answer.message.content, "Where is order 1042?");
  assert.equal(answer.done_reason, "stop");
  assert.ok(answer.eval_count > 0 && answer.eval_duration > 0);
});

test("stream", async () => {
  const parts = await all(await ask("Count to 9", { stream: true }));
  assert.equal(parts.map((part) => part.message.content).join(""), "1 2 3 4 5 6 7 8 9");
  assert.equal(parts.at(-1).done, true);
});

test("generate", async () => {
  assert.equal((await client.generate({ model: "echo", prompt: "Hello." })).response, "Hello.");
  const parts = await all(await client.generate({ model: "echo", prompt: "Once", raw: true, stream: true }));
  assert.equal(parts.map((part) => part.response).join(""), " Once");
});

test("a tool call and its result", async () => {
  for (const stream of [false, true]) {
    const found = await ask(CALL, { tools: [LOOK_UP], stream });
    const parts = stream ? await all(found) : [found];
    const [call] = parts.flatMap((part) => part.message.tool_calls ?? []);
    assert.deepEqual(call.function.arguments, { number: "1042" });
    const turn = { role: "assistant", content: "", tool_calls: [call] };
    const messages = [...user(CALL), turn, { role: "tool", tool_name: "look_up", content: "sent on Monday" }];
    const after = await client.chat({ model: "echo", messages, tools: [LOOK_UP] });
    assert.match(after.message.content, /sent on Monday/);
  }
});

test("formats", async () => {
  const format = { type: "object", properties: { name: { type: "string" }, born: { type: "integer" } } };
  assert.deepEqual(JSON.parse((await ask(ADA, { format })).message.content), { name: "Ada", born: 1815 });
  assert.equal((await ask(ADA, { format: "json" })).message.content, ADA);
});

test("embeddings", async () => {
  const { embeddings } = await client.embed({ model: "echo", input: ["one", "two"] });
  assert.equal(embeddings.length, 2);
});

test("errors", async () => {
  const refused = async (asked, status, said) => {
    const error = await asked.then(() => assert.fail("this is refused"), (error) => error);
    assert.equal(error.status_code, status);
    assert.match(error.message, said);
  };
  await refused(client.chat({ model: "gpt", messages: user("hi") }), 404, /^model 'gpt' not found/);
  await refused(ask("hi", { options: { temperature: -1 }, stream: true }), 400, /temperature/);
  await refused(new Ollama({ host }).chat({ model: "echo", messages: user("hi") }), 401, /key/);
});

test("models", async () => {
  assert.ok((await client.list()).models.some((model) => model.model === "echo:latest"));
  assert.ok((await client.ps()).models.some((model) => model.model === "echo:latest"));
  assert.ok((await client.show({ model: "echo" })).capabilities.includes("completion"));
});

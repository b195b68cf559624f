// `@anthropic-ai/sdk` against the server: `node --test`, with PRECEDENT_ADDRESS and PRECEDENT_KEY.

import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";

const { PRECEDENT_ADDRESS: baseURL, PRECEDENT_KEY: apiKey } = process.env;
const client = new Anthropic({ baseURL, apiKey, maxRetries: 0 });

const CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "1042"}}\n</tool_call>';
const LOOK_UP = {
  name: "look_up",
  description: "Looks an order up.",
  input_schema: { type: "object", properties: { number: { type: "string" } }, required: ["number"] },
};

const user = (content) => ({ role: "user", content });
const asked = (content, more = {}) => ({ model: "echo", max_tokens: 500, messages: [user(content)], ...more });

test("create", async () => {
  const message = await client.messages.create(asked("Where is order 1042?", { system: "Be brief." }));
  assert.deepEqual(message.content, [{ type: "text", text: "Where is order 1042?" }]);
  assert.equal(message.stop_reason, "end_turn");
  assert.ok(message._request_id);
});

test("stream helper", async () => {
  const stream = client.messages.stream(asked("Count to 9"));
  let text = "";
  stream.on("text", (delta) => (text += delta));
  const final = await stream.finalMessage();
  assert.equal(text, "1 2 3 4 5 6 7 8 9");
  assert.equal(final.content[0].text, text);
  assert.ok(final.usage.output_tokens > 0);
});

test("thoughts", async () => {
  const asking = asked("Think before you answer.", { model: "scripted-model" });
  const { content } = await client.messages.stream(asking).finalMessage();
  assert.deepEqual(content.map((block) => block.type), ["thinking", "text"]);
  assert.equal(content[0].thinking, "Is it a bun?");
});

test("tool call and its result", async () => {
  const first = asked(CALL, { tools: [LOOK_UP] });
  for (const message of [await client.messages.create(first), await client.messages.stream(first).finalMessage()]) {
    const [call] = message.content;
    assert.equal(message.stop_reason, "tool_use");
    assert.deepEqual(call.input, { number: "1042" });
    const result = { type: "tool_result", tool_use_id: call.id, content: "sent on Monday" };
    const messages = [...first.messages, { role: "assistant", content: message.content }, user([result])];
    const after = await client.messages.create({ ...first, messages });
    assert.match(after.content[0].text, /sent on Monday/);
  }
});

test("forced tool call", async () => {
  for (const tool_choice of [{ type: "any" }, { type: "tool", name: "look_up" }]) {
    const { content } = await client.messages.create(asked(CALL, { tools: [LOOK_UP], tool_choice }));
    assert.equal(content[0].name, "look_up");
  }
});

test("counted tokens", async () => {
  const { max_tokens: _, ...prompt } = asked("Hello there.", { tools: [LOOK_UP] });
  const { usage } = await client.messages.create({ ...prompt, max_tokens: 50 });
  const { input_tokens } = await client.messages.countTokens(prompt);
  assert.equal(input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
});

test("models", async () => {
  const found = [];
  for await (const model of client.models.list()) found.push(model.id);
  assert.deepEqual(found, ["echo", "scripted-model", "other-model"]);
});

test("a stream that is aborted ends", async () => {
  const stream = client.messages.stream(asked("Count to 3000", { max_tokens: 9000 }));
  let seen = 0;
  stream.on("text", () => ++seen === 3 && stream.abort());
  await assert.rejects(stream.finalMessage(), Anthropic.APIUserAbortError);
});

test("errors of the right class", async () => {
  const refused = async (made, kind, type) => {
    const error = await made.then(() => assert.fail("this is refused"), (error) => error);
    assert.ok(error instanceof kind, String(error));
    assert.equal(error.error.error.type, type);
    assert.ok(error.requestID);
  };
  const stranger = new Anthropic({ baseURL, apiKey: "pk-wrong", maxRetries: 0 });
  await refused(client.messages.create(asked("Hi.", { temperature: 2 })), Anthropic.BadRequestError, "invalid_request_error");
  await refused(client.messages.create(asked("Hi.", { model: "gpt" })), Anthropic.NotFoundError, "not_found_error");
  await refused(stranger.messages.create(asked("Hi.")), Anthropic.AuthenticationError, "authentication_error");
  await refused(client.messages.batches.retrieve("x"), Anthropic.NotFoundError, "not_found_error");
});

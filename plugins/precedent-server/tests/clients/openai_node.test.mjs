// openai-node against the server: `node --test`, with PRECEDENT_ADDRESS, PRECEDENT_KEY and PRECEDENT_ADMIN_KEY.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat, zodFunction } from "openai/helpers/zod";
import { z } from "zod";

const { PRECEDENT_ADDRESS: address, PRECEDENT_KEY: apiKey, PRECEDENT_ADMIN_KEY: adminKey } = process.env;
const baseURL = `${address}/v1`;
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const admin = new OpenAI({ baseURL: address, apiKey: adminKey, maxRetries: 0 });

const ADA = '{"name": "Ada", "born": 1815}';
const Person = z.object({ name: z.string(), born: z.number().int() });
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
const ask = (content, more = {}) => client.chat.completions.create({ model: "echo", messages: user(content), ...more });

const all = async (stream) => {
  const found = [];
  for await (const one of stream) found.push(one);
  return found;
};

const cancelled = async () => {
  const text = await (await admin.get("/metrics", { __binaryResponse: true })).text();
  const lines = text.split("\n").filter((line) => line.startsWith("precedent:requests_cancelled") && line.includes("echo"));
  return lines.reduce((sum, line) => sum + Number(line.split(" ").at(-1)), 0);
};

test("chat", async () => {
  const answer = await ask("Where is order 1042?");
  assert.equal(answer.choices[0].message.content, "Where is order 1042?");
  assert.equal(answer.choices[0].finish_reason, "stop");
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
  assert.equal(answer.speculation.lossless, true);
});

test("stream", async () => {
  const chunks = await all(await ask("One two three.", { stream: true, stream_options: { include_usage: true } }));
  assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), "One two three.");
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.ok(chunks.at(-1).usage.completion_tokens > 0);
});

test("stream helper", async () => {
  const stream = client.chat.completions.stream({ model: "echo", messages: user("One two three.") });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  assert.equal(await stream.finalContent(), "One two three.");
  assert.equal(text, "One two three.");
});

test("tool call and its result", async () => {
  const { choices } = await ask(CALL, { tools: [LOOK_UP] });
  const [call] = choices[0].message.tool_calls;
  assert.equal(choices[0].finish_reason, "tool_calls");
  assert.deepEqual(JSON.parse(call.function.arguments), { number: "1042" });
  const result = { role: "tool", tool_call_id: call.id, content: "sent on Monday" };
  const messages = [...user(CALL), choices[0].message, result];
  const after = await client.chat.completions.create({ model: "echo", messages, tools: [LOOK_UP] });
  assert.match(after.choices[0].message.content, /sent on Monday/);
});

test("streamed tool call", async () => {
  const stream = client.chat.completions.stream({ model: "echo", messages: user(CALL), tools: [LOOK_UP] });
  const call = await stream.finalFunctionToolCall();
  assert.equal(call.name, "look_up");
  assert.deepEqual(JSON.parse(call.arguments), { number: "1042" });
});

test("forced tool call", async () => {
  for (const tool_choice of ["required", { type: "function", function: { name: "look_up" } }]) {
    const { choices } = await ask(CALL, { tools: [LOOK_UP], tool_choice });
    assert.equal(choices[0].message.tool_calls[0].function.name, "look_up");
  }
});

test("tools that are run", async () => {
  const asked = [];
  const number = zodFunction({
    name: "look_up",
    parameters: z.object({ number: z.string() }),
    function: (given) => (asked.push(given), "sent on Monday"),
  });
  const runner = client.chat.completions.runTools({ model: "echo", messages: user(CALL), tools: [number] });
  assert.match(await runner.finalContent(), /sent on Monday/);
  assert.deepEqual(asked, [{ number: "1042" }]);
});

test("parsed answer", async () => {
  const response_format = zodResponseFormat(Person, "person");
  const answer = await client.chat.completions.parse({ model: "echo", messages: user(ADA), response_format });
  assert.deepEqual(answer.choices[0].message.parsed, { name: "Ada", born: 1815 });
});

test("parsed stream", async () => {
  const response_format = zodResponseFormat(Person, "person");
  const stream = client.chat.completions.stream({ model: "echo", messages: user(ADA), response_format });
  const final = await stream.finalChatCompletion();
  assert.deepEqual(final.choices[0].message.parsed, { name: "Ada", born: 1815 });
});

test("log-probabilities", async () => {
  const { choices } = await ask("Hello there.", { logprobs: true, top_logprobs: 2 });
  assert.ok(choices[0].logprobs.content.map((one) => one.token).join("").startsWith("Hello there."));
  assert.equal(choices[0].logprobs.content[0].top_logprobs.length, 2);
});

test("several answers with a seed", async () => {
  const { choices } = await ask("Twice.", { n: 2, seed: 7 });
  assert.deepEqual(choices.map((choice) => [choice.index, choice.message.content]), [[0, "Twice."], [1, "Twice."]]);
});

test("a stream that is aborted is cancelled", async () => {
  const before = await cancelled();
  const stream = await ask("Count to 3000", { stream: true, speculation: false });
  let seen = 0;
  for await (const _ of stream) if (++seen === 5) stream.controller.abort();
  for (let turn = 0; turn < 10_000; turn++) if ((await cancelled()) > before) return; // each turn waits for the server
  assert.fail("the answer went on without a reader");
});

test("completions", async () => {
  const asked = { model: "echo", prompt: "Once upon", max_tokens: 50 };
  assert.equal((await client.completions.create(asked)).choices[0].text, " Once upon");
  const chunks = await all(await client.completions.create({ ...asked, stream: true }));
  assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), " Once upon");
});

test("embeddings", async () => {
  const packed = await client.embeddings.create({ model: "echo", input: ["one", "two"] });
  const plain = await client.embeddings.create({ model: "echo", input: ["one", "two"], encoding_format: "float" });
  assert.equal(packed.data.length, 2);
  packed.data[1].embedding.forEach((value, i) => assert.ok(Math.abs(value - plain.data[1].embedding[i]) < 1e-6));
});

test("models", async () => {
  assert.deepEqual((await all(await client.models.list())).map((model) => model.id), ["echo", "scripted-model", "other-model"]);
  assert.equal((await client.models.retrieve("echo")).id, "echo");
});

test("responses", async () => {
  const answer = await client.responses.create({ model: "echo", input: "Hello to you." });
  assert.equal(answer.output_text, "Hello to you.");
  const text = { format: zodTextFormat(Person, "person") };
  assert.deepEqual((await client.responses.parse({ model: "echo", input: ADA, text })).output_parsed, { name: "Ada", born: 1815 });
});

test("streamed responses", async () => {
  const stream = client.responses.stream({ model: "echo", input: "Hello to you." });
  let text = "";
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  assert.equal((await stream.finalResponse()).output_text, "Hello to you.");
  assert.equal(text, "Hello to you.");
});

test("errors of the right class", async () => {
  const refused = async (made, kind, code) => {
    const error = await made.then(() => assert.fail("this is refused"), (error) => error);
    assert.ok(error instanceof kind, String(error));
    if (code !== undefined) assert.equal(error.code, code);
  };
  await refused(ask("Hi.", { top_kk: 1 }), OpenAI.BadRequestError, "unsupported_parameter");
  await refused(ask("Hi.", { temperature: -1, stream: true }), OpenAI.BadRequestError);
  await refused(ask("Hi.", { model: "gpt" }), OpenAI.NotFoundError, "model_not_found");
  await refused(client.files.list(), OpenAI.NotFoundError);
  const stranger = new OpenAI({ baseURL, apiKey: "pk-wrong", maxRetries: 0 });
  await refused(stranger.models.list(), OpenAI.AuthenticationError, "invalid_api_key");
  const desk = new OpenAI({ baseURL: address, apiKey, maxRetries: 0 });
  await refused(desk.get("/dashboard/figures"), OpenAI.PermissionDeniedError);
});

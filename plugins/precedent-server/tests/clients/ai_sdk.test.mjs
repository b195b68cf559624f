// `@ai-sdk/openai-compatible` with `ai` against the server: `node --test`, with PRECEDENT_ADDRESS and PRECEDENT_KEY.

import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, embedMany, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { PRECEDENT_ADDRESS: address, PRECEDENT_KEY: apiKey } = process.env;
const settings = { name: "precedent", baseURL: `${address}/v1`, includeUsage: true, supportsStructuredOutputs: true };
const precedent = createOpenAICompatible({ ...settings, apiKey });
const model = precedent("echo");

const ADA = '{"name": "Ada", "born": 1815}';
const Person = z.object({ name: z.string(), born: z.number().int() });
const CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "1042"}}\n</tool_call>';
const tools = {
  look_up: tool({
    description: "Looks an order up.",
    inputSchema: z.object({ number: z.string() }),
    execute: async ({ number }) => `order ${number} was sent on Monday`,
  }),
};

test("text", async () => {
  const answer = await generateText({ model, prompt: "Where is order 1042?" });
  assert.equal(answer.text, "Where is order 1042?");
  assert.equal(answer.finishReason, "stop");
  assert.equal(answer.usage.totalTokens, answer.usage.inputTokens + answer.usage.outputTokens);
});

test("stream", async () => {
  const stream = streamText({ model, prompt: "One two three." });
  let text = "";
  for await (const delta of stream.textStream) text += delta;
  assert.equal(text, "One two three.");
  assert.ok((await stream.usage).outputTokens > 0);
  assert.equal(await stream.finishReason, "stop");
});

test("reasoning", async () => {
  const prompt = "Think before you answer.";
  const scripted = precedent("scripted-model");
  const answer = await generateText({ model: scripted, prompt });
  assert.equal(answer.reasoningText, "Is it a bun?");
  const stream = streamText({ model: scripted, prompt });
  assert.match(await stream.text, /^one, two, three/);
  assert.equal(await stream.reasoningText, "Is it a bun?");
});

test("tools in several steps", async () => {
  const answer = await generateText({ model, prompt: CALL, tools, stopWhen: stepCountIs(3) });
  assert.deepEqual(answer.steps[0].toolCalls.map((call) => [call.toolName, call.input]), [["look_up", { number: "1042" }]]);
  assert.equal(answer.steps[0].finishReason, "tool-calls");
  assert.match(answer.text, /order 1042 was sent on Monday/);
});

test("streamed tools in several steps", async () => {
  const stream = streamText({ model, prompt: CALL, tools, stopWhen: stepCountIs(3) });
  assert.match(await stream.text, /order 1042 was sent on Monday/);
  assert.equal((await stream.steps).length, 2);
});

test("forced tool", async () => {
  for (const toolChoice of ["required", { type: "tool", toolName: "look_up" }]) {
    const answer = await generateText({ model, prompt: CALL, tools, toolChoice });
    assert.equal(answer.toolCalls[0].toolName, "look_up");
  }
});

test("object", async () => {
  const answer = await generateText({ model, prompt: ADA, output: Output.object({ schema: Person }) });
  assert.deepEqual(answer.output, { name: "Ada", born: 1815 });
});

test("streamed object", async () => {
  const stream = streamText({ model, prompt: ADA, output: Output.object({ schema: Person }) });
  let last;
  for await (const part of stream.partialOutputStream) last = part;
  assert.deepEqual(last, { name: "Ada", born: 1815 });
});

test("sampling settings", async () => {
  const answer = await generateText({
    model, prompt: "One, two, three.", seed: 7, temperature: 0.5, topP: 0.9, frequencyPenalty: 0.1, presencePenalty: 0.1,
    stopSequences: [" three"], maxOutputTokens: 50,
  });
  assert.equal(answer.text, "One, two,");
  assert.deepEqual(answer.warnings ?? [], []);
});

test("messages of every role", async () => {
  const answer = await generateText({
    model,
    instructions: "Be brief.",
    messages: [
      { role: "user", content: "Hello." },
      { role: "assistant", content: [{ type: "reasoning", text: "A greeting." }, { type: "text", text: "Hi." }] },
      { role: "user", content: [{ type: "text", text: "And you?" }] },
    ],
  });
  assert.equal(answer.text, "And you?");
});

test("completion model", async () => {
  const answer = await generateText({ model: precedent.completionModel("echo"), prompt: "Once upon", maxOutputTokens: 90 });
  assert.match(answer.text, /Once upon/);
});

test("embeddings", async () => {
  const { embeddings } = await embedMany({ model: precedent.embeddingModel("echo"), values: ["one", "two"] });
  assert.equal(embeddings.length, 2);
  assert.notDeepEqual(embeddings[0], embeddings[1]);
});

test("a stream that is aborted ends", async () => {
  const controller = new AbortController();
  const stream = streamText({ model, prompt: "Count to 3000", abortSignal: controller.signal });
  let seen = 0;
  const kinds = [];
  for await (const part of stream.fullStream) {
    kinds.push(part.type);
    if (part.type === "text-delta" && ++seen === 3) controller.abort();
  }
  assert.equal(kinds.at(-1), "abort");
});

test("errors say what the server said", async () => {
  const stranger = createOpenAICompatible({ ...settings, apiKey: "pk-wrong" });
  const refused = async (made, status, message) => {
    const error = await made.then(() => assert.fail("this is refused"), (error) => error);
    assert.ok(APICallError.isInstance(error), String(error));
    assert.equal(error.statusCode, status);
    assert.match(error.message, message);
  };
  const asked = { prompt: "Hi.", maxRetries: 0 };
  await refused(generateText({ ...asked, model: precedent("gpt") }), 404, /no model 'gpt'/);
  await refused(generateText({ ...asked, model: stranger("echo") }), 401, /needs an API key/);
  await refused(generateText({ ...asked, model, temperature: -1 }), 400, /temperature/);
});

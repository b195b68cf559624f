// Reads an answer of server-sent events while it comes.

import { Refused } from "./api.js";

/** Yields the chunks of a completion. Throws Refused for an error in the stream, or if it breaks off. */
export async function* chunksOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refused("the answer broke off");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(chunk.error.message);
      yield chunk;
    }
  }
}

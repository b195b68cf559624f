// Asks the server. The key lives in this module's memory and is sent to this server alone.

let key = "";

/** What the server said about a request that it did not answer. */
export class Refused extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export function useKey(given) {
  key = given;
}

/** Sends a request, with JSON if there is a body. Throws Refused with the server's own words. */
export async function ask(path, { body, signal } = {}) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    body: body === undefined ? undefined : JSON.stringify(body),
    headers,
    signal,
    cache: "no-store",
    credentials: "omit",
    redirect: "error",
  });
  if (!answer.ok) throw new Refused(await reasonOf(answer), answer.status);
  return answer;
}

async function reasonOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered with status ${answer.status}`;
  }
}

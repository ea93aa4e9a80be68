// Asking the server: the key, JSON answers, and streams of events. Addresses are relative, so that
// the page works behind a proxy that puts it below a path.

const KEY = "headway-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** What the server said instead of an answer; `status` is 0 when it said nothing. */
export class Refusal extends Error {
  constructor(message, status = 0, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const headers = (more = {}) =>
  key.get() ? { ...more, authorization: `Bearer ${key.get()}` } : more;

async function refusal(response) {
  try {
    const { error } = await response.json();
    return new Refusal(error.message, response.status, error.code ?? "");
  } catch {
    return new Refusal(`The server answered with status ${response.status}.`, response.status);
  }
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (options.signal?.aborted && error.name !== "TimeoutError") throw error;
    throw new Refusal("There is no connection to the server.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** GET an object. */
export async function get(path, timeoutMs = 8000) {
  const response = await ask(path, { headers: headers(), signal: AbortSignal.timeout(timeoutMs) });
  try {
    return await response.json();
  } catch {
    throw new Refusal("The connection ended in the middle of an answer.");
  }
}

/** POST a body and yield the events of its stream; raises Refusal unless it ends with [DONE]. */
export async function* stream(path, body, signal) {
  const response = await ask(path, {
    method: "POST",
    headers: headers({ "content-type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await read(reader, signal);
    if (done) throw new Refusal("The connection was lost before the answer was complete.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error)
        throw new Refusal(event.error.message, response.status, event.error.code ?? "");
      yield event;
    }
  }
}

async function read(reader, signal) {
  try {
    return await reader.read();
  } catch (error) {
    if (signal.aborted) throw error;
    throw new Refusal("The connection was lost before the answer was complete.");
  }
}

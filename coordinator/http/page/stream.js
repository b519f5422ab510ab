// Asks the server: JSON and server-sent events. The API key is kept here, in memory alone.

let key = "";

export class KeyNeeded extends Error {}

export function useKey(given) {
  key = given;
}

function headers(more) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function checked(response) {
  if (response.ok) return response;
  let line = `the server answered ${response.status}`;
  try {
    line = (await response.json()).error.message;
  } catch {
    // no JSON of ours: the status must do
  }
  throw response.status === 401 ? new KeyNeeded(line) : new Error(line);
}

// Return the JSON of a GET request. Throws KeyNeeded, Error.
export async function get(path, signal) {
  const response = await fetch(path, { headers: headers({}), signal, cache: "no-store" });
  return (await checked(response)).json();
}

// Yield the chunks of a streamed answer. Throws KeyNeeded, Error; AbortError after an abort.
export async function* chunks(path, body, signal) {
  const response = await checked(await fetch(path, {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the answer broke off; ask for it again");
    const events = (left + value).split("\n\n");
    left = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

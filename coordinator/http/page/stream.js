// Asks the server: JSON and server-sent events. The API key is kept here, in memory alone.

const BROKEN_OFF = "the answer broke off; ask for it again";

let key = "";

export class KeyNeeded extends Error {}

export function useKey(given) {
  key = given;
}

function headers(more) {
  // A key has the characters of ASCII alone; others cannot be sent in a header.
  if (/[^\x20-\x7e]/.test(key)) throw new KeyNeeded("this is no API key");
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

// Ask the server; a lost connection gets words that say what is wrong.
async function answerTo(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error("the server does not answer");
  }
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
  const options = { headers: headers({}), signal, cache: "no-store" };
  const response = await answerTo(path, options);
  return (await checked(response)).json();
}

async function next(reader) {
  try {
    return await reader.read();
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error(BROKEN_OFF);
  }
}

// Yield the chunks of a streamed answer. Throws KeyNeeded, Error; AbortError after an abort.
export async function* chunks(path, body, signal) {
  const response = await checked(await answerTo(path, {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { done, value } = await next(reader);
    if (done) throw new Error(BROKEN_OFF);
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

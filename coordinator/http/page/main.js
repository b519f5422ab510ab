// The page: reads the form, asks the server, and gives what comes to the views.

import { Answer, commonLength, drawSoon, visible } from "/page/answer.js";
import { Figures, SHOWS_DRAFTS, compared, whyAlone } from "/page/figures.js";
import { Nodes } from "/page/nodes.js";
import { KeyNeeded, chunks, get, useKey } from "/page/stream.js";
import { Timeline } from "/page/timeline.js";

const byId = (id) => document.getElementById(id);
const MAX_SEED = 2 ** 31;
const QUESTION = "How do tides come about, and why are there two of them each day?";
const narrow = matchMedia("(max-width: 860px)"); // as in style.css

// -- figures ---------------------------------------------------------------------------------------

function grouped(number) {
  return number.toLocaleString("en-US");
}

function percent(share) {
  return `${Math.round(share * 100)}\u00a0%`;
}

class FiguresView {
  constructor(timeline) {
    this.timeline = timeline;
    this.figures = null;
    this.plain = null;
    this.shownAt = 0;
    this.timer = null; // draws what came too early
  }

  draw(now) {
    // Numbers that change with every frame cannot be read: four times a second are enough.
    if (now - this.shownAt < 250 && !this.isDone) {
      this.timer ??= setTimeout(() => drawSoon(this), 250);
      return;
    }
    clearTimeout(this.timer);
    this.timer = null;
    this.shownAt = now;
    const { figures, plain } = this;
    const speed = figures?.speed ?? null;
    this.set("speed", speed === null ? "–" : speed.toFixed(0));
    this.set("first", figures?.first == null ? "–" : `${figures.first.toFixed(0)} ms`);
    this.set("acceptance", figures?.drafted
      ? `${percent(figures.accepted / figures.drafted)} of ${figures.drafted}` : "–");
    this.set("per-pass", figures?.passes ? (figures.written / figures.passes).toFixed(2) : "–");
    const overlap = this.timeline.overlap();
    this.set("overlap", overlap === null ? "–" : percent(overlap));
    this.against(this.isDone && speed !== null && plain?.speed ? compared(figures, plain) : {});
    this.tellAlone();
    if (plain?.speed) {
      byId("plain-figures").textContent = `${plain.speed.toFixed(0)} tokens per second`;
    }
  }

  // Show a ratio only if it is more than noise, with its interval.
  against({ ratio, low, high }) {
    const isClear = ratio !== undefined && (low > 1 || high < 1);
    const words = ratio === undefined ? "–" : isClear ? `${ratio.toFixed(2)} ×` : "unclear";
    const range = ratio === undefined ? "" : `${low.toFixed(2)} to ${high.toFixed(2)} ×`;
    if (byId("against").textContent === words + range) return;
    byId("against").textContent = words;
    if (!range) return;
    const small = document.createElement("small");
    small.textContent = range;
    byId("against").append(small);
  }

  // Say in view why many passes had no drafts, and offer a policy that shows some.
  tellAlone() {
    const asked = latest?.body.speculative;
    const told = asked?.enabled && this.figures ? whyAlone(this.figures) : null;
    const height = byId("rest").offsetHeight;
    byId("rest").hidden = !told;
    if (!told) return;
    // The count comes at the end: whoever listens to the page would hear each change of it.
    this.set("rest-words", this.isDone ? `${told.why} ${told.counts}` : told.why);
    byId("show-drafts").hidden = !told.canShow || asked.policy === SHOWS_DRAFTS;
    byId("show-drafts").disabled = running !== null;
    if (byId("rest").offsetHeight > height) comeIntoView(byId("texts")); // it was pushed down
  }

  set(id, words) {
    if (byId(id).textContent !== words) byId(id).textContent = words;
  }
}

// -- the key ---------------------------------------------------------------------------------------

// Ask for the API key; return false if the user cancels.
function askForKey(line) {
  const dialog = byId("key-dialog");
  byId("key").value = "";
  byId("key-title").textContent = line;
  dialog.showModal();
  return new Promise((resolve) => {
    const end = (given) => {
      dialog.close();
      byId("key").value = "";
      if (given) useKey(given);
      resolve(Boolean(given));
    };
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      end(byId("key").value.trim());
    };
    byId("no-key").onclick = () => end("");
    dialog.oncancel = () => end("");
  });
}

async function withKey(work) {
  for (let tries = 0; ; tries += 1) {
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof KeyNeeded)) throw error;
      const line = tries ? "That key is wrong" : "This server wants an API key";
      if (!(await askForKey(line))) throw new Error("the server wants an API key");
    }
  }
}

// -- requests --------------------------------------------------------------------------------------

const timeline = new Timeline(byId("timeline"), byId("moment"));
const answer = new Answer(byId("answer"), byId("tip"));
const plainAnswer = new Answer(byId("plain"), byId("tip"));
const figuresView = new FiguresView(timeline);
const nodes = new Nodes(byId("nodes"), byId("nodes-state"));
let turns = []; // of the chat: {role, content}; a new conversation has another array
let running = null; // AbortController of the request that runs
let latest = null; // {path, body, isComplete, isSaid: it is part of `turns`} of the latest generation

function isChat() {
  return byId("ask").elements.kind.value === "chat";
}

function settings() {
  const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
  // The seed is drawn here, so that plain decoding can be asked for with the same one.
  const seed = number("seed") ?? Math.floor(Math.random() * MAX_SEED);
  const speculative = { enabled: byId("speculate").checked, events: true };
  if (byId("policy").value && speculative.enabled) speculative.policy = byId("policy").value;
  return { temperature: number("temperature") ?? 0, seed, max_tokens: number("max-tokens") ?? 160,
    speculative, return_progress: true };
}

function request() {
  const prompt = byId("prompt").value;
  if (!isChat()) return { path: "/v1/completions", body: { prompt, ...settings() } };
  const messages = [...turns, { role: "user", content: prompt }];
  return { path: "/v1/chat/completions", body: { messages, ...settings() }, turns };
}

function textOf(chunk) {
  const [choice] = chunk.choices;
  return choice?.text ?? choice?.delta?.content ?? "";
}

// Stream one answer into a view; return how it ended.
async function run({ path, body }, view, figures, spansTo) {
  let reason = "";
  const doing = byId("state").textContent;
  for await (const chunk of chunks(path, body, running.signal)) {
    const text = textOf(chunk);
    if (chunk.prompt_progress) {
      const { processed, total } = chunk.prompt_progress;
      say(`Reading the prompt: ${grouped(processed)} of ${grouped(total)} tokens …`);
    } else if (text) {
      say(doing);
    }
    if (chunk.speculation) {
      figures.add(chunk.speculation);
      view.push(chunk.speculation.tokens, text, chunk.choices[0]?.delta?.reasoning);
      spansTo?.add(chunk.speculation.spans);
      drawSoon(figuresView);
    }
    reason = chunk.choices[0]?.finish_reason ?? reason;
  }
  return reason;
}

function say(words, isBad = false) {
  byId("state").textContent = visible(words);
  byId("state").classList.toggle("bad", isBad);
}

function setBusy(isBusy) {
  byId("go").disabled = isBusy;
  byId("stop").disabled = !isBusy;
  byId("compare").disabled = isBusy || !latest?.isComplete || !latest.body.speculative.enabled;
  byId("answer").setAttribute("aria-busy", String(isBusy));
}

// Do one piece of work at a time, with its errors shown; return true if it came to its end.
// `shown` is what it writes into.
async function attempt(work, words, shown) {
  comeIntoView(shown);
  running = new AbortController();
  figuresView.isDone = false;
  setBusy(true);
  say(words);
  try {
    await withKey(work);
    return true;
  } catch (error) {
    const isStopped = error.name === "AbortError";
    say(isStopped ? "Stopped." : error.message, !isStopped);
    return false;
  } finally {
    running = null;
    figuresView.isDone = true;
    drawSoon(figuresView);
    setBusy(false);
    begin();
  }
}

// In a narrow window the parts of the page lie below each other.
function comeIntoView(part) {
  if (narrow.matches) part.scrollIntoView({ block: "nearest" });
}

function summary(figures) {
  const rate = figures.drafted ? `, ${percent(figures.accepted / figures.drafted)} of the drafts accepted` : "";
  const speed = figures.speed ? ` at ${figures.speed.toFixed(0)} a second` : "";
  return `${figures.tokens} tokens${speed}${rate}`;
}

// Generate what the form says, or `again` what was asked before, in another way.
async function generate(again = null) {
  if (running) return;
  const asked = again ?? request();
  latest = asked;
  hideComparison();
  let figures;
  const isWhole = await attempt(async () => {
    answer.clear();
    timeline.clear();
    figures = figuresView.figures = new Figures();
    asked.reason = await run(asked, answer, figures, timeline);
  }, "Generating…", byId("texts"));
  timeline.finish();
  const counts = `${timeline.passes.length} passes, ${timeline.drafts.length} messages with drafts`;
  byId("timeline").setAttribute("aria-label", `Timeline of drafter and target: ${counts}`);
  byId("moment").textContent = `${counts}. Point at a bar, or use the arrow keys.`;
  asked.isComplete = isWhole;
  setBusy(false);
  drawSoon(figuresView);
  if (!isWhole) return;
  say(`Done: ${summary(figures)}.`);
  if (asked.body.messages && turns === asked.turns && !asked.isSaid) {
    asked.isSaid = true;
    addTurns(asked.body.messages.at(-1).content, answer.text);
  }
}

// Write the latest text again under a policy that shows drafts.
function showDrafts() {
  if (running || !latest) return;
  byId("policy").value = SHOWS_DRAFTS;
  const speculative = { ...latest.body.speculative, policy: SHOWS_DRAFTS };
  generate({ ...latest, body: { ...latest.body, speculative }, isComplete: false });
}

// -- the comparison --------------------------------------------------------------------------------

function hideComparison() {
  byId("plain-panel").hidden = true;
  byId("verdict").hidden = true;
  figuresView.plain = null;
}

async function compare() {
  if (running || !latest?.isComplete) return;
  const body = { ...latest.body, speculative: { enabled: false, events: true } };
  byId("plain-panel").hidden = false;
  byId("verdict").hidden = true;
  const isWhole = await attempt(async () => {
    plainAnswer.clear();
    byId("plain-figures").textContent = "";
    figuresView.plain = new Figures();
    await run({ path: latest.path, body }, plainAnswer, figuresView.plain, null);
  }, "The same request, by plain decoding…", byId("plain-panel"));
  if (!isWhole) return;
  say("Done.");
  tellVerdict(answer.thoughts + answer.text, plainAnswer.thoughts + plainAnswer.text);
}

function tellVerdict(one, other) {
  const line = byId("verdict");
  line.hidden = false;
  line.className = one === other ? "same" : "different";
  const { why, low, high } = compared(figuresView.figures, figuresView.plain);
  const speeds = why ?? (low <= 1 && high >= 1
    ? "Their speeds do not differ by more than noise; a longer text tells more." : "");
  if (one === other) {
    line.textContent = `Same text: all ${one.length} characters are equal. ${speeds}`;
    comeIntoView(line);
    return;
  }
  const at = commonLength(one, other);
  const after = (text) => visible(JSON.stringify(text.slice(at, at + 24)));
  line.textContent = `Different after ${at} characters: ${after(one)} with speculation, `
    + `${after(other)} without. That is expected only with --verify token or block, or in a type `
    + `other than float32 without --reproducible. ${speeds}`;
  comeIntoView(line);
}

// -- chat ------------------------------------------------------------------------------------------

function addTurns(asked, said) {
  turns.push({ role: "user", content: asked }, { role: "assistant", content: said });
  showTurns();
  // The next message may have been begun already.
  if (byId("prompt").value === asked) byId("prompt").value = "";
}

function showTurns() {
  byId("turns").replaceChildren(...turns.map((turn) => {
    const made = document.createElement("li");
    const who = document.createElement("b");
    who.textContent = turn.role === "user" ? "You" : "Model";
    made.append(who, " ", visible(turn.content));
    return made;
  }));
  const isShown = isChat() && turns.length > 0;
  byId("turns").hidden = byId("fresh").hidden = !isShown;
  byId("turns").scrollTop = byId("turns").scrollHeight;
}

// A model that was made for conversations opens as one, unless somebody has begun something else.
function openAsChat() {
  const prompt = byId("prompt");
  if (isChat() || prompt.value !== prompt.defaultValue) return;
  byId("ask").elements.kind.value = "chat";
  prompt.value = QUESTION;
  onKind();
}

function onKind() {
  byId("prompt-label").textContent = isChat() ? "Your message" : "Prompt";
  showTurns();
}

// -- all together ----------------------------------------------------------------------------------

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("compare").addEventListener("click", compare);
byId("show-drafts").addEventListener("click", showDrafts);
byId("fresh").addEventListener("click", () => {
  turns = [];
  showTurns();
  byId("prompt").focus();
});
for (const radio of byId("ask").elements.kind) radio.addEventListener("change", onKind);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("key-dialog").open) running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
});
byId("nearer").addEventListener("click", () => timeline.zoom(0.5));
byId("farther").addEventListener("click", () => timeline.zoom(2));
byId("follow").addEventListener("click", () => timeline.follow(!timeline.follows));
timeline.onFollow = (does) => byId("follow").setAttribute("aria-pressed", String(does));
addEventListener("pagehide", () => running?.abort());

// Show the model's name and the nodes; without a key, where one is needed, nothing is shown yet.
async function begin() {
  nodes.ask();
  if (byId("model").textContent) return;
  try {
    const [model] = (await get("/v1/models")).data;
    byId("model").textContent = visible(model.id);
    if (model.has_chat_template) openAsChat();
  } catch {
    // the nodes' line says what is wrong
  }
}

// In a narrow window the settings would push the answer out of view.
const fold = () => { byId("settings").open = !narrow.matches; };
narrow.addEventListener("change", fold);
fold();

onKind();
begin();

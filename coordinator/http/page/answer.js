// Shows an answer: a token is an element with its origin, a line of the text a block. All text is
// put in as text, never as HTML. The page is changed once in a frame, however fast tokens come.

const ORIGINS = {
  "draft:model": ["model", "drafted by the drafter, accepted"],
  "draft:ngram": ["ngram", "copied from this text, accepted"],
  "draft:earlier": ["earlier", "copied from an earlier text, accepted"],
  "draft:heads": ["heads", "drafted by the target's heads, accepted"],
  recovered: ["own", "the target's own, in the place of a rejected draft"],
  bonus: ["own", "the target's own, after accepted drafts"],
  plain: ["own", "the target's own, of a pass without drafts"],
};
// A second drafter's drafts look like the first one's.
const OTHER = ["model", "drafted by another drafter, accepted"];

// Control characters but newline and tab, and characters that change the direction of text, break
// lines, or are not seen. What only chooses the form of the sign before it (in emoji) stays.
const UNSEEN = new RegExp(
  "(?![\\n\\t\\ufe0e\\ufe0f])[\\p{Cc}\\p{Bidi_Control}\\p{Default_Ignorable_Code_Point}"
    + "\\u2028\\u2029\\ufff9-\\ufffb]",
  "gu",
);

// Return a text with a visible sign for each control character; other unseen characters are named
// by their number.
export function visible(text) {
  return text.replace(UNSEEN, (sign) => {
    const code = sign.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    return `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
  });
}

// Return a text on one line, for what was rejected: its layout must not be that of the answer.
function onOneLine(text) {
  return visible(text).replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}

const waiting = new Set(); // views that have something to draw
let isAsked = false;

// Let a view draw itself in the next frame, once.
export function drawSoon(view) {
  waiting.add(view);
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame((now) => {
    isAsked = false;
    const views = [...waiting];
    waiting.clear();
    for (const one of views) one.draw(now);
  });
}

export class Answer {
  constructor(box, tip) {
    this.box = box;
    this.tip = tip;
    this.box.addEventListener("keydown", (event) => this.onKey(event));
    this.box.addEventListener("focusin", (event) => this.show(event.target));
    this.box.addEventListener("focusout", () => this.hide());
    this.box.addEventListener("pointerover", (event) => this.show(event.target));
    this.box.addEventListener("pointerout", () => this.hide());
    this.box.addEventListener("scroll", () => this.placeTip(), { passive: true });
    this.clear();
  }

  clear() {
    this.thoughts = ""; // of a target that thinks before it answers
    this.text = ""; // all that follows them, as it came
    this.queue = [];
    this.line = null;
    this.hasMissed = false; // a place with rejected drafts is shown
    this.box.replaceChildren();
    this.hide();
  }

  // Add tokens as the server tells them: {text, origin, rejected}.
  push(tokens, text, thoughts = "") {
    this.thoughts += thoughts;
    this.text += text;
    this.queue.push(...tokens);
    drawSoon(this);
  }

  draw() {
    const { box } = this;
    const wasAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 24;
    const more = document.createDocumentFragment();
    for (const token of this.queue) this.add(token, more);
    this.queue = [];
    box.append(more);
    if (wasAtEnd) box.scrollTop = box.scrollHeight;
  }

  add(token, more) {
    token.text.split("\n").forEach((part, place) => {
      if (place || !this.line) {
        this.line = document.createElement("div");
        this.line.className = "line";
        more.append(this.line);
      }
      const isFirst = !place && token.rejected;
      if (part || isFirst) this.line.append(this.element(token, part, isFirst));
    });
  }

  element(token, part, isFirst) {
    const [kind, words] = ORIGINS[token.origin] ?? OTHER;
    const made = document.createElement("span");
    made.className = `token ${kind}`;
    made.textContent = visible(part);
    made.dataset.words = words;
    if (isFirst) {
      const rejected = onOneLine(token.rejected);
      made.classList.add("missed");
      made.dataset.rejected = rejected;
      made.tabIndex = this.hasMissed ? -1 : 0; // one of them is reached with Tab
      this.hasMissed = true;
      made.setAttribute("role", "note");
      made.setAttribute("aria-label", `${visible(part)}: ${words}. Rejected here: ${rejected}`);
    }
    return made;
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return; // the browser's own
    if (event.key === "Escape") this.hide();
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const places = [...this.box.querySelectorAll(".missed")];
    if (!places.length) return;
    event.preventDefault();
    const at = places.indexOf(document.activeElement);
    const next = at < 0 ? (step > 0 ? 0 : places.length - 1) : at + step;
    const chosen = places[Math.min(places.length - 1, Math.max(0, next))];
    for (const one of places) if (one.tabIndex === 0) one.tabIndex = -1;
    chosen.tabIndex = 0;
    chosen.focus();
  }

  show(element) {
    if (!element.classList?.contains("token")) return;
    const { tip } = this;
    tip.replaceChildren();
    if (element.dataset.rejected !== undefined) {
      const mark = document.createElement("s");
      mark.textContent = element.dataset.rejected;
      tip.append("rejected ", mark, document.createElement("br"));
    }
    tip.append(element.dataset.words);
    tip.hidden = false;
    this.shown = element;
    this.placeTip();
  }

  // Put the note above its token, or below it where there is no room.
  placeTip() {
    const { shown: element, tip } = this;
    if (!element || tip.hidden) return;
    const place = element.getClientRects()[0] ?? element.getBoundingClientRect();
    const left = Math.min(place.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
    const above = place.top - tip.offsetHeight - 6;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${above > 4 ? above : place.bottom + 6}px`;
  }

  hide() {
    this.tip.hidden = true;
    this.shown = null;
  }
}

// Return how many UTF-16 units two texts have in common at their beginning.
export function commonLength(one, other) {
  const most = Math.min(one.length, other.length);
  let at = 0;
  while (at < most && one[at] === other[at]) at += 1;
  return at;
}

// Draws what both devices did: bars of the drafter above, of the target below, and roll-backs.
// Only the part that is seen is drawn. Times are milliseconds since the text began.

import { drawSoon } from "/page/answer.js";

const GUTTER = 62; // px, for the names of the rows
const AXIS = 18;
const ROW = 40;
const GAP = 44; // between the rows: the strip, and the lines of roll-backs
const HEIGHT = AXIS + 2 * ROW + GAP + 14;
const PASS_WIDTH = 56; // px of a pass in the first view, so that its numbers fit
const LEAST_MS = 5;
const MOST_MS = 600000;

const CAUSES = {
  alone: "no drafts could be used",
  ready: "enough drafts were there",
  late: "the drafts were late",
  quiet: "the drafter was silent",
  cheap: "going on alone was faster",
  resting: "the drafter rests: plain decoding is faster",
};

// Return the index of the first span that ends after `ms`.
function firstAfter(spans, ms) {
  let low = 0;
  let high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle].end_ms <= ms) low = middle + 1;
    else high = middle;
  }
  return low;
}

export class Timeline {
  constructor(canvas, line) {
    this.canvas = canvas;
    this.line = line;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.dark.addEventListener("change", () => this.readColours());
    new ResizeObserver(() => drawSoon(this)).observe(canvas);
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    canvas.addEventListener("pointermove", (event) => this.onPointer(event));
    canvas.addEventListener("pointerdown", (event) => {
      this.draggedFrom = event.clientX;
      this.onPointer(event);
    });
    canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    this.readColours();
    this.clear();
  }

  clear() {
    this.drafts = [];
    this.passes = [];
    this.byNumber = new Map();
    this.end = 0; // of the view
    this.windowMs = 0; // 0: not chosen yet
    this.isChosen = false; // by the reader
    this.isSettled = false; // enough passes were seen to choose it
    this.follow(true);
    this.selected = null;
    drawSoon(this);
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const names = ["ink", "quiet", "rule", "model", "own", "rejected", "panel", "both"];
    this.colours = {};
    for (const name of names) this.colours[name] = style.getPropertyValue(`--${name}`).trim();
    drawSoon(this);
  }

  add(spans) {
    for (const span of spans) {
      if (span.device === "drafter") {
        span.right = null; // not decided
        this.drafts.push(span);
        this.byNumber.set(span.number, span);
        continue;
      }
      this.passes.push(span);
      for (const [number, right] of span.decided) {
        const draft = this.byNumber.get(number);
        if (draft) draft.right = right;
        this.byNumber.delete(number);
      }
    }
    if (spans.length) drawSoon(this);
  }

  get latest() {
    const last = (spans) => (spans.length ? spans[spans.length - 1].end_ms : 0);
    return Math.max(last(this.drafts), last(this.passes));
  }

  // Return the share of the drafter's time in which a pass ran as well; null: it did nothing.
  overlap() {
    let both = 0;
    let all = 0;
    for (const draft of this.drafts) {
      all += draft.end_ms - draft.begin_ms;
      // Drafts of several drafters do not come in the order in which they began.
      for (let at = firstAfter(this.passes, draft.begin_ms); at < this.passes.length; at += 1) {
        const pass = this.passes[at];
        if (pass.begin_ms >= draft.end_ms) break;
        both += Math.min(pass.end_ms, draft.end_ms) - Math.max(pass.begin_ms, draft.begin_ms);
      }
    }
    return all > 0 ? both / all : null;
  }

  // -- the view ----------------------------------------------------------------------------------

  zoom(factor) {
    const middle = this.end - this.windowMs / 2;
    this.isChosen = true;
    this.windowMs = Math.min(MOST_MS, Math.max(LEAST_MS, this.windowMs * factor));
    if (!this.follows) this.end = middle + this.windowMs / 2;
    drawSoon(this);
  }

  move(ms) {
    this.follow(false);
    this.end = Math.min(this.latest, Math.max(this.windowMs, this.end + ms));
  }

  follow(does) {
    this.follows = does;
    this.onFollow?.(does);
    drawSoon(this);
  }

  // Show a time in which the latest passes have room for their numbers.
  fit() {
    const { latest, passes } = this;
    const most = Math.max(3, (this.canvas.clientWidth - GUTTER) / PASS_WIDTH);
    this.isSettled = passes.length > 3 * most;
    const few = passes.slice(-Math.ceil(most) - 1);
    const each = few.length > 1 ? (few.at(-1).end_ms - few[0].end_ms) / (few.length - 1) : latest;
    this.windowMs = Math.max(LEAST_MS, Math.min(each * most, latest * 1.05));
  }

  // The text has ended: show its last passes, unless the reader has chosen what to see.
  finish() {
    if (!this.isChosen) this.fit();
    drawSoon(this);
  }

  // Choose which time is seen; return true if the view is still gliding there.
  place() {
    const { latest } = this;
    if (!this.isChosen && !this.isSettled) this.fit();
    if (!this.follows) return false;
    const goal = Math.max(latest, this.windowMs);
    if (this.still.matches) {
      // Without motion the view jumps by pages.
      if (goal > this.end || goal < this.end - this.windowMs) this.end = goal + this.windowMs * 0.6;
      if (latest <= this.windowMs) this.end = this.windowMs;
      return false;
    }
    const left = goal - this.end;
    this.end = Math.abs(left) < this.windowMs / 2000 || Math.abs(left) > this.windowMs
      ? goal : this.end + left * 0.25;
    return this.end !== goal;
  }

  // -- drawing -----------------------------------------------------------------------------------

  draw() {
    const { canvas } = this;
    const width = canvas.clientWidth;
    if (!width) return;
    const ratio = devicePixelRatio || 1;
    const [wide, high] = [Math.round(width * ratio), Math.round(HEIGHT * ratio)];
    if (canvas.width !== wide || canvas.height !== high) {
      canvas.width = wide;
      canvas.height = high;
    }
    const glides = this.place();
    const pen = canvas.getContext("2d");
    this.pen = pen;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, HEIGHT);
    this.start = this.end - this.windowMs;
    this.scale = (width - GUTTER - 6) / this.windowMs;
    this.width = width;
    this.drawNames();
    if (!this.latest) return;
    this.drawAxis();
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, 0, width - GUTTER, HEIGHT);
    pen.clip();
    const drafts = this.seen(this.drafts);
    const passes = this.seen(this.passes);
    this.drawOverlap(drafts, passes);
    for (const draft of drafts) this.drawDraft(draft);
    for (const pass of passes) this.drawPass(pass);
    for (const pass of passes) this.drawRollBack(pass);
    pen.restore();
    if (glides) drawSoon(this);
  }

  seen(spans) {
    const first = firstAfter(spans, this.start);
    let last = first;
    while (last < spans.length && spans[last].begin_ms < this.end) last += 1;
    // One more: a roll-back is drawn at the end of its pass.
    return spans.slice(Math.max(0, first - 1), last + 1);
  }

  x(ms) {
    return GUTTER + (ms - this.start) * this.scale;
  }

  drawNames() {
    const { pen, colours } = this;
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    pen.fillStyle = colours.ink;
    pen.fillText("drafter", 2, AXIS + ROW / 2);
    pen.fillText("target", 2, AXIS + ROW + GAP + ROW / 2);
    pen.fillStyle = colours.quiet;
    pen.fillText("both", 2, AXIS + ROW + GAP / 2);
  }

  drawAxis() {
    const { pen, colours, width } = this;
    const about = this.windowMs / Math.max(2, (width - GUTTER) / 90);
    const ten = 10 ** Math.floor(Math.log10(about));
    const step = [1, 2, 5, 10].map((one) => one * ten).find((one) => one >= about);
    pen.textAlign = "center";
    for (let ms = Math.ceil(Math.max(0, this.start) / step) * step; ms <= this.end; ms += step) {
      const x = Math.round(this.x(ms)) + 0.5;
      pen.fillStyle = colours.rule;
      pen.fillRect(x, AXIS, 1, HEIGHT - AXIS);
      pen.fillStyle = colours.quiet;
      const words = step >= 1000 ? `${ms / 1000} s` : `${Number(ms.toFixed(2))} ms`;
      if (x < width - 24 && x > GUTTER + 16) pen.fillText(words, x, AXIS / 2);
    }
  }

  bar(span, y, height) {
    const left = this.x(span.begin_ms);
    const width = Math.max(1, this.x(span.end_ms) - left - (this.scale > 1 ? 1 : 0.4));
    return [left, y, width, height];
  }

  drawOverlap(drafts, passes) {
    this.pen.fillStyle = this.colours.both;
    for (const draft of drafts) {
      let at = firstAfter(passes, draft.begin_ms);
      for (; at < passes.length && passes[at].begin_ms < draft.end_ms; at += 1) {
        const begin_ms = Math.max(draft.begin_ms, passes[at].begin_ms);
        const end_ms = Math.min(draft.end_ms, passes[at].end_ms);
        if (end_ms <= begin_ms) continue;
        this.pen.fillRect(...this.bar({ begin_ms, end_ms }, AXIS + ROW + GAP / 2 - 5, 10));
      }
    }
  }

  drawDraft(draft) {
    const { pen, colours } = this;
    const [left, top, width, height] = this.bar(draft, AXIS + 3, ROW - 6);
    const share = draft.right === null || !draft.depth ? 1 : draft.right / draft.depth;
    pen.fillStyle = colours.model;
    pen.globalAlpha = draft.right === null ? 0.4 : 1;
    if (draft.right !== 0) pen.fillRect(left, top, width * share, height);
    pen.globalAlpha = 1;
    if (share < 1) this.hatch(left + width * share, top, width * (1 - share), height);
    pen.fillStyle = colours.panel;
    const step = width / draft.steps;
    if (step > 4) {
      for (let at = 1; at < draft.steps; at += 1) pen.fillRect(left + at * step, top, 1, height);
    }
    this.label(`${draft.tokens}`, left, top, width, height, share < 1 || draft.right === null);
    this.frame(draft, left, top, width, height);
  }

  // Fill a part of a bar with lines: these drafts came to nothing.
  hatch(left, top, width, height) {
    const { pen, colours } = this;
    pen.save();
    pen.beginPath();
    pen.rect(left, top, width, height);
    pen.clip();
    pen.strokeStyle = colours.quiet;
    pen.lineWidth = 1;
    pen.beginPath();
    for (let x = left - height; x < left + width; x += 5) {
      pen.moveTo(x, top + height);
      pen.lineTo(x + height, top);
    }
    pen.stroke();
    pen.strokeRect(left + 0.5, top + 0.5, Math.max(0.5, width - 1), height - 1);
    pen.restore();
  }

  drawPass(pass) {
    const { pen, colours } = this;
    const y = AXIS + ROW + GAP;
    const [left, top, width, height] = this.bar(pass, y + 3, ROW - 6);
    pen.fillStyle = colours.own;
    pen.fillRect(left, top, width, height);
    if (pass.drafted) {
      this.label(`${pass.accepted}/${pass.drafted}`, left, top, width, height, false);
    }
    this.frame(pass, left, top, width, height);
  }

  label(words, left, top, width, height, isInk) {
    const { pen, colours } = this;
    if (width < pen.measureText(words).width + 6) return;
    pen.textAlign = "center";
    if (isInk) {
      // On a hatched or pale bar the number gets a ground of its own.
      const room = pen.measureText(words).width + 6;
      pen.fillStyle = colours.panel;
      pen.fillRect(left + width / 2 - room / 2, top + height / 2 - 8, room, 16);
    }
    pen.fillStyle = isInk ? colours.ink : colours.panel;
    pen.fillText(words, left + width / 2, top + height / 2);
  }

  frame(span, left, top, width, height) {
    if (span !== this.selected) return;
    this.pen.strokeStyle = this.colours.ink;
    this.pen.lineWidth = 2;
    this.pen.strokeRect(left - 1, top - 1, width + 2, height + 2);
  }

  drawRollBack(pass) {
    if (!pass.roll_back) return;
    const { pen, colours } = this;
    const x = this.x(pass.end_ms);
    const bottom = AXIS + ROW + GAP + 3;
    const top = AXIS + ROW - 2;
    pen.strokeStyle = colours.rejected;
    pen.fillStyle = colours.rejected;
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.moveTo(x, bottom);
    pen.lineTo(x, top + 5);
    pen.stroke();
    pen.beginPath(); // the head of an arrow, up to the drafter
    pen.moveTo(x, top);
    pen.lineTo(x - 4, top + 7);
    pen.lineTo(x + 4, top + 7);
    pen.fill();
  }

  // -- reading it by hand ------------------------------------------------------------------------

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return; // the browser's own
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) this.choose(step);
    else if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else if (event.key === "Home") this.select(this.passes[0]);
    else if (event.key === "End") this.follow(true);
    else return;
    event.preventDefault();
  }

  choose(step) {
    const at = this.passes.indexOf(this.selected);
    const from = at < 0 ? firstAfter(this.passes, this.start) - (step > 0 ? 1 : 0) : at;
    this.select(this.passes[Math.min(this.passes.length - 1, Math.max(0, from + step))]);
  }

  select(span) {
    if (!span) return;
    this.selected = span;
    if (span.begin_ms < this.start || span.end_ms > this.end) {
      this.follow(false);
      this.end = span.end_ms + this.windowMs / 2;
    }
    this.line.textContent = this.words(span);
    drawSoon(this);
  }

  onPointer(event) {
    if (event.type === "pointermove" && event.buttons) {
      const moved = event.clientX - this.draggedFrom;
      if (Math.abs(moved) > 3) this.move(-moved / this.scale);
      this.draggedFrom = Math.abs(moved) > 3 ? event.clientX : this.draggedFrom;
      return;
    }
    const box = this.canvas.getBoundingClientRect();
    const ms = this.start + (event.clientX - box.left - GUTTER) / this.scale;
    const spans = event.clientY - box.top < AXIS + ROW + GAP / 2 ? this.drafts : this.passes;
    const span = spans[firstAfter(spans, ms)];
    if (span && span.begin_ms <= ms && span !== this.selected) {
      this.selected = span;
      this.line.textContent = this.words(span);
      drawSoon(this);
    }
  }

  onWheel(event) {
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!isSideways && !event.ctrlKey) return; // the page scrolls
    event.preventDefault();
    if (event.ctrlKey) this.zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2);
    else this.move(event.deltaX / this.scale);
  }

  words(span) {
    const times = `at ${span.begin_ms.toFixed(1)} ms, for ${(span.end_ms - span.begin_ms).toFixed(1)} ms`;
    if (span.device === "drafter") {
      const fate = span.right === null ? "not decided yet" : `${span.right} of at most ${span.depth} right`;
      return `Draft ${span.number}, ${times}: ${span.tokens} tokens in ${span.steps} steps, ${fate}.`;
    }
    const number = this.passes.indexOf(span) + 1;
    const cause = CAUSES[span.cause] ?? span.cause;
    return `Pass ${number}, ${times}: ${span.accepted} of ${span.drafted} drafts accepted, `
      + `${span.tokens} new tokens; it waited ${span.wait_ms.toFixed(1)} ms; ${cause}; `
      + `${span.rolled_back} drafts died${span.roll_back ? ", and none led on: a roll-back" : ""}.`;
  }
}

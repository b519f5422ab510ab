// What one generation came to, how two compare, and why passes had no drafts. It draws nothing.

const FEWEST_PASSES = 24; // of each text: of fewer, a ratio of speeds is mostly chance
const NUM_BLOCKS = 8; // parts of a text, whose speeds say how much its speed varies
const STUDENT = 2.4; // for an interval of 95 % from so few parts
const BETWEEN_RUNS = 0.03; // two runs of the same kind differ by so much, also on an idle machine
const PLAIN_SHARE = 0.9; // of the passes without drafts, from which a text counts as plainly decoded
const TOLD_RESTING = 0.25; // share of passes beside a resting drafter, from which the page says so
const TOLD_ALONE = 0.5; // share of passes without drafts, from which it says why
const TOLD_PASSES = 8; // after which it does

export const SHOWS_DRAFTS = "tree"; // the policy under which the drafter never rests

// Causes of passes without drafts: words, and whether the policy above would show drafts.
const CAUSES = {
  resting: ["The drafter rests: plain decoding was measured to be faster here", true],
  cheap: ["The target went on alone: waiting for drafts was measured to be slower here", true],
  late: ["The drafts came too late", true],
  quiet: ["The drafter was silent", false],
  alone: ["Nobody drafted: this text has no drafter, or nothing was found to copy", false],
};

// One text, from the passes of the target and the clock of this page.
export class Figures {
  constructor() {
    this.sent = performance.now();
    this.first = null; // ms from the request to the first token
    this.tokens = 0;
    this.ofFirst = 0; // tokens that came with the first pass
    this.drafted = 0;
    this.accepted = 0;
    this.passes = 0;
    this.written = 0; // tokens of all passes
    this.since = null; // ends of the first and of the last pass, ms of the coordinator's clock
    this.until = null;
    // The first pass reads the prompt; of the others:
    this.later = []; // [tokens, ms since the pass before]
    this.without = {}; // number of passes without drafts, by their cause
  }

  add(told) {
    this.tokens += told.tokens.filter((token) => token.id !== null).length;
    if (this.first === null && told.spans.some((span) => span.device === "target")) {
      this.first = performance.now() - this.sent;
    }
    for (const span of told.spans) if (span.device === "target") this.pass(span);
  }

  pass(span) {
    this.passes += 1;
    this.drafted += span.drafted;
    this.accepted += span.accepted;
    this.written += span.tokens;
    if (this.since === null) {
      this.since = span.end_ms;
      this.ofFirst = span.tokens;
    } else {
      this.later.push([span.tokens, span.end_ms - this.until]);
      if (!span.drafted) this.without[span.cause] = (this.without[span.cause] ?? 0) + 1;
    }
    this.until = span.end_ms;
  }

  // Tokens per second after the first pass; null: not known yet.
  get speed() {
    if (this.since === null || this.until <= this.since) return null;
    return (this.written - this.ofFirst) / ((this.until - this.since) / 1000);
  }

  // The relative error of the speed (a standard deviation), from the speeds of parts of the text.
  get error() {
    const size = Math.max(1, Math.ceil(this.later.length / NUM_BLOCKS));
    const [tokens, ms] = sums(this.later);
    let squares = 0;
    let number = 0;
    for (let at = 0; at < this.later.length; at += size) {
      const part = sums(this.later.slice(at, at + size));
      squares += (part[0] - (tokens / ms) * part[1]) ** 2;
      number += 1;
    }
    return Math.sqrt((squares * number) / Math.max(1, number - 1)) / tokens;
  }

  get numAlone() {
    return Object.values(this.without).reduce((sum, number) => sum + number, 0);
  }
}

function sums(pairs) {
  return pairs.reduce((sum, pair) => [sum[0] + pair[0], sum[1] + pair[1]], [0, 0]);
}

// Compare the speeds of a text and of plain decoding: {ratio, low, high}, with a 95 % interval; or
// {why}: a ratio would say nothing.
export function compared(figures, plain) {
  if (figures.numAlone >= PLAIN_SHARE * figures.later.length) {
    return { why: "Both texts were written by plain decoding, so their speeds are not compared." };
  }
  if (Math.min(figures.later.length, plain.later.length) < FEWEST_PASSES) {
    return { why: "The texts are too short to compare their speeds." };
  }
  const ratio = figures.speed / plain.speed;
  const factor = Math.exp(STUDENT * Math.hypot(figures.error, plain.error, BETWEEN_RUNS));
  return { ratio, low: ratio / factor, high: ratio * factor };
}

// Why many passes of a text had no drafts: {why, counts, canShow}; null: most had some, or it is
// too early to say.
export function whyAlone(figures) {
  const { without, numAlone } = figures;
  const all = figures.later.length;
  const rests = (without.resting ?? 0) >= TOLD_RESTING * all;
  if (all < TOLD_PASSES || !(rests || numAlone >= TOLD_ALONE * all)) return null;
  const [[commonest]] = Object.entries(without).sort((one, other) => other[1] - one[1]);
  const cause = rests ? "resting" : commonest;
  const [why, canShow] = CAUSES[cause] ?? ["Drafts were missing", true];
  return { why: `${why}.`, counts: `${numAlone} of ${all} passes had no drafts.`, canShow };
}

// The table of nodes and links, from GET /status. It asks while the page is seen, and not often.

import { KeyNeeded, get } from "/page/stream.js";
import { visible } from "/page/answer.js";

const EVERY_MS = 4000;

function cell(row, words, kind = "td") {
  const made = document.createElement(kind);
  made.textContent = visible(words);
  if (kind === "th") made.scope = "row";
  row.append(made);
  return made;
}

function link(node) {
  if (node.round_trip_ms === null) return "not measured yet";
  const start = node.round_trip_at_start_ms;
  const now = `${node.round_trip_ms.toFixed(1)} ms`;
  return start === null ? now : `${now} (at the start ${start.toFixed(1)})`;
}

export class Nodes {
  constructor(body, line) {
    this.body = body;
    this.line = line;
    document.addEventListener("visibilitychange", () => this.ask());
  }

  async ask() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    try {
      this.show(await get("/status"));
    } catch (error) {
      if (error instanceof KeyNeeded) {
        this.line.textContent = "Give the API key to see them: generate a text.";
        return; // main.js asks again once there is a key
      }
      this.line.textContent = `The nodes are not known: ${visible(error.message)}.`;
      this.body.replaceChildren(); // what it said of its nodes may hold no longer
    }
    this.timer = setTimeout(() => this.ask(), EVERY_MS);
  }

  show(found) {
    if (found.hung || !found.nodes) {
      this.line.textContent = found.hung
        ? "The coordinator's loop hangs." : "The server is ending.";
      this.body.replaceChildren();
      return;
    }
    this.body.replaceChildren(...found.nodes.map((node) => {
      const row = document.createElement("tr");
      cell(row, node.name, "th");
      const health = cell(row, node.health);
      health.className = `health ${node.health === "ready" ? "good" : "bad"}`;
      if (node.doing && node.doing !== node.health) health.append(`, ${visible(node.doing)}`);
      cell(row, `${node.texts} of ${node.max_texts}`);
      cell(row, node.model);
      cell(row, [node.device, node.dtype].filter(Boolean).join(", "));
      cell(row, link(node));
      return row;
    }));
    const counts = `${found.open} running, ${found.queued} waiting, ${found.complete} complete`;
    this.line.textContent = `Texts: ${counts}, ${found.cancelled} stopped, ${found.failed} failed.`;
  }
}

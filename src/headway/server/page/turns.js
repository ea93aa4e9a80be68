// Turns of a conversation as elements. A turn is {role, content, files} of the user, or {role,
// versions: [{content, thought, after}], at} of the model: each time it is asked again, a version.

import { make, show, write } from "./dom.js";
import { bytes, said } from "./format.js";
import { Markdown, copy } from "./markdown.js";

const RENDER_SHARE = 8; // of the time, one part in eight at most goes into showing an answer

/** What the model is told of a turn: attached files first, each fenced, then the text. */
export function contentOf(turn) {
  if (turn.role === "assistant") return turn.versions[turn.at].content;
  const files = (turn.files ?? []).map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
    const fence = "`".repeat(longest + 1);
    return `File ${name}:\n${fence}\n${text}\n${fence}\n\n`;
  });
  return files.join("") + turn.content;
}

export const fileWords = ({ name, text }) => `${name}, ${said(bytes(new Blob([text]).size))}`;

const button = (label, onClick, more = {}) => {
  const node = make("button", { type: "button", class: "small", ...more }, label);
  node.addEventListener("click", () => onClick(node));
  return node;
};

/** A turn of the user: plain text, its files, and what can be done with it. */
export class UserTurn {
  constructor(turn, onEdit) {
    const files = (turn.files ?? []).map((file) => make("li", {}, fileWords(file)));
    this.said = make("div", { class: "said" }, turn.content);
    this.actions = make(
      "div",
      { class: "actions" },
      button("Copy", (node) => copy(turn.content, node)),
      button("Edit", () => onEdit(turn)),
    );
    this.node = make(
      "article",
      { class: "turn user" },
      make("h3", { class: "unseen" }, "You"),
      ...(files.length ? [make("ul", { class: "files" }, ...files)] : []),
      this.said,
      this.actions,
    );
  }
}

/** A turn of the model: reasoning, Markdown, its times, and the versions there are. */
export class AnswerTurn {
  constructor(turn, { model, isMarkdown, onAgain }) {
    this.turn = turn;
    this.isMarkdown = isMarkdown;
    this.said = make("div", { class: "said" });
    this.after = make("p", { class: "after", "data-term": "chat" });
    this.place = make("span");
    this.older = button("‹", () => this.turnTo(-1), { "aria-label": "Earlier version" });
    this.newer = button("›", () => this.turnTo(1), { "aria-label": "Later version" });
    this.versions = make("span", { class: "versions" }, this.older, this.place, this.newer);
    this.again = button("Regenerate", () => onAgain(turn));
    this.actions = make(
      "div",
      { class: "actions" },
      button("Copy", (node) => copy(this.version.content, node)),
      this.again,
      this.versions,
    );
    this.node = make(
      "article",
      { class: "turn assistant" },
      make("h3", { class: "unseen" }, model),
      this.said,
      this.after,
      this.actions,
    );
    this.showVersion();
  }

  get version() {
    return this.turn.versions[this.turn.at];
  }

  turnTo(step) {
    const { versions, at } = this.turn;
    this.turn.at = Math.max(0, Math.min(versions.length - 1, at + step));
    this.showVersion();
    this.node.dispatchEvent(new CustomEvent("version", { bubbles: true }));
  }

  /** Show the chosen version from its beginning. */
  showVersion() {
    this.thought?.node.remove();
    this.thought = null;
    this.said.replaceChildren();
    this.said.classList.toggle("as-text", !this.isMarkdown);
    this.markdown = this.isMarkdown ? new Markdown(this.said) : null;
    this.text = this.markdown ? null : this.said.appendChild(document.createTextNode(""));
    this.costMs = this.renderedMs = 0;
    this.write();
    if (this.thought) this.thought.node.open = false;
    write(this.after, this.version.after ?? "");
    const { versions, at } = this.turn;
    show(this.versions, versions.length > 1);
    write(this.place, `${at + 1} of ${versions.length}`);
    this.older.disabled = at === 0;
    this.newer.disabled = at === versions.length - 1;
  }

  /** More came: show it in the next frame, or later where showing takes long. */
  came() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => this.frame());
  }

  frame() {
    if (!this.waiting) return;
    if (performance.now() - this.renderedMs < RENDER_SHARE * this.costMs) {
      requestAnimationFrame(() => this.frame());
      return;
    }
    this.write();
    this.node.dispatchEvent(new CustomEvent("grown", { bubbles: true }));
  }

  write() {
    this.waiting = false;
    const beganMs = performance.now();
    const { content, thought } = this.version;
    if (thought && !this.thought) this.think();
    if (thought) this.thought.text.data = thought;
    if (content && this.thought && !this.begun) this.thought.node.open = false;
    this.begun = Boolean(content);
    if (this.markdown) this.markdown.write(content);
    else this.text.data = content;
    this.renderedMs = performance.now();
    this.costMs = this.renderedMs - beganMs;
  }

  /** The place of the reasoning: open until the answer begins. */
  think() {
    const text = document.createTextNode("");
    const body = make("div", { class: "thinking" }, text);
    const node = make("details", { class: "thought" }, make("summary", {}, "Reasoning"), body);
    node.open = true;
    this.said.before(node);
    this.thought = { node, text };
  }

  fail({ message, code }) {
    const words = message + (code ? ` (${code})` : "");
    this.after.before(make("p", { class: "error", role: "alert" }, words));
  }
}

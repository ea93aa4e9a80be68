// The chat box: one conversation, streamed from the server like from any other client's. What the
// model says is put into text nodes and nothing else.

import { byId, make, show, write } from "./dom.js";
import { EXAMPLES, SKILLED } from "./examples.js";
import { digits, said, seconds } from "./format.js";
import { stream } from "./talk.js";

const COMPLETION_TOKENS = 200;

/** A piece of a tool call: its name comes first, then its arguments bit by bit. */
const called = ({ function: { name, arguments: given } = {} }) =>
  (name ? `${name} ` : "") + (given ?? "");

/** How to ask this model: its path, the texts of the box, the shape of a body and of a chunk. */
const WAYS = {
  messages: {
    path: "v1/chat/completions",
    label: "Message",
    hint: "Ask the model …",
    note: "Answers stream from this server, beside whatever else it does.",
    body: (turns) => ({ messages: turns }),
    piece: ({ delta }) => (delta?.content ?? "") + (delta?.tool_calls ?? []).map(called).join(""),
    thought: (choice) => choice.delta?.reasoning_content ?? "",
  },
  text: {
    path: "v1/completions",
    label: "Text to continue",
    hint: "Once upon a time …",
    note: "This model has no chat template: it continues the text you give it.",
    body: (turns) => ({ prompt: turns[turns.length - 1].content, max_tokens: COMPLETION_TOKENS }),
    piece: (choice) => choice.text ?? "",
    thought: () => "",
  },
};

/** Times and tokens of one answer, by this browser's clock. */
class Stopwatch {
  constructor() {
    this.startMs = performance.now();
    this.firstMs = this.lastMs = null;
    this.numChunks = 0;
    this.numTokens = null;
  }

  arrived() {
    this.lastMs = performance.now();
    this.firstMs ??= this.lastMs;
    this.numChunks += 1;
  }

  /**
   * "TTFT 34 ms · 45 tokens in 0.41 s, 110 tok/s", as the reader saw it: from sending to the last
   * text. "about", from the chunks, where usage did not come.
   */
  words() {
    if (this.firstMs === null) return "";
    const tokens = this.numTokens ?? this.numChunks;
    const exact = this.numTokens === null ? "about " : "";
    const parts = [`TTFT ${said(seconds((this.firstMs - this.startMs) / 1e3))}`];
    const wholeS = (this.lastMs - this.startMs) / 1e3;
    const speed = tokens > 1 && wholeS > 0 ? `, ${digits(tokens / wholeS)} tok/s` : "";
    const unit = tokens === 1 ? "token" : "tokens";
    parts.push(`${exact}${tokens} ${unit} in ${said(seconds(wholeS))}${speed}`);
    return parts.join(" · ");
  }
}

export class Chat {
  constructor({ onDenied }) {
    this.onDenied = onDenied;
    this.turns = [];
    this.model = null;
    this.way = WAYS.messages;
    this.stopper = null;
    this.log = byId("chat-log");
    this.input = byId("chat-input");
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      } else if (event.key === "Escape") this.stop();
    });
    this.example = null;
    byId("chat-example-list").append(
      ...EXAMPLES.map((one) => {
        const button = make("button", { class: "plain", type: "button" }, one.skill);
        button.addEventListener("click", () => this.fill(one));
        return make("li", {}, button);
      }),
    );
    byId("chat-stop").addEventListener("click", () => this.stop());
    byId("chat-clear").addEventListener("click", () => this.clear());
  }

  /** Use this model from now on; `accepts` is that of its card. */
  use(model, accepts) {
    const way = accepts.includes("messages")
      ? WAYS.messages
      : accepts.includes("text")
        ? WAYS.text
        : null;
    if (this.model === model && this.way === way) return;
    this.model = model;
    this.way = way;
    this.turns = [];
    this.input.disabled = byId("chat-send").disabled = way === null;
    write(byId("chat-label"), way?.label ?? "Message");
    this.input.placeholder = way?.hint ?? "";
    show(byId("chat-examples"), way === WAYS.messages && SKILLED.test(model));
    write(
      byId("chat-note"),
      way?.note ??
        "This server runs without a tokenizer and takes token ids alone: there is nothing to type.",
    );
  }

  /** Put an example into the box; nothing is sent. */
  fill(example) {
    this.example = example;
    this.input.value = example.text;
    this.input.focus();
  }

  clear() {
    this.stop();
    this.turns = [];
    this.log.replaceChildren(byId("chat-hint"));
    show(byId("chat-hint"), true);
    this.input.focus();
  }

  stop() {
    this.stopper?.abort();
  }

  async send() {
    const content = this.input.value;
    if (!content.trim() || this.stopper || !this.way || !this.model) return;
    this.input.value = "";
    show(byId("chat-hint"), false);
    this.turns.push({ role: "user", content });
    this.add("user", "You", content);
    const example = content === this.example?.text ? this.example : null;
    this.example = null;
    await this.answer(this.add("assistant", this.model, ""), example);
    const answered = this.turns.at(-1)?.role === "assistant";
    if (example?.then && answered && !this.input.value) this.fill({ text: example.then });
  }

  /** One turn on the page: its role (for screen readers), its text, and its result. */
  add(role, who, content) {
    const text = document.createTextNode(content);
    const after = make("p", { class: "after" });
    const said = make("div", { class: "said" });
    said.append(text);
    const node = make(
      "article",
      { class: `turn ${role}` },
      make("h3", { class: "unseen" }, who),
      said,
      after,
    );
    this.log.append(node);
    this.scroll(true);
    return { node, said, text, after, thought: null };
  }

  /** The place of the reasoning: open until the answer begins. */
  think(turn) {
    const text = document.createTextNode("");
    const body = make("div", { class: "thinking" });
    body.append(text);
    const node = make("details", { class: "thought" }, make("summary", {}, "Reasoning"), body);
    node.open = true;
    turn.said.before(node);
    turn.thought = { node, text };
  }

  async answer(turn, example) {
    const watch = new Stopwatch();
    const turns = this.turns;
    this.stopper = new AbortController();
    this.busy(true);
    let failure = null;
    try {
      await this.listen(turn, watch, this.stopper.signal, example?.tools);
    } catch (error) {
      failure = error;
    }
    const stopped = failure?.name === "AbortError";
    this.flush(turn);
    this.stopper = null;
    this.busy(false);
    if (turn.text.data) turns.push({ role: "assistant", content: turn.text.data });
    else turns.pop();
    if (failure && !stopped) this.fail(turn, failure);
    write(turn.after, [stopped ? "Stopped" : "", watch.words()].filter(Boolean).join(" · "));
    turn.after.dataset.term = "chat";
    if (!failure) write(byId("announce"), `Answer complete. ${watch.words()}`);
    this.scroll();
  }

  async listen(turn, watch, signal, tools) {
    const body = {
      model: this.model,
      ...this.way.body(this.turns),
      ...this.options(),
      ...(tools ? { tools } : {}),
      stream: true,
      stream_options: { include_usage: true },
    };
    for await (const event of stream(this.way.path, body, signal)) {
      if (event.usage) watch.numTokens = event.usage.completion_tokens;
      if (!event.choices?.length) continue;
      const piece = this.way.piece(event.choices[0]);
      const thought = this.way.thought(event.choices[0]);
      if (!piece && !thought) continue;
      watch.arrived();
      this.show(turn, piece, thought);
    }
  }

  options() {
    const chosen = {};
    const most = byId("chat-max").valueAsNumber,
      temperature = byId("chat-temperature").valueAsNumber;
    if (!Number.isNaN(most)) chosen.max_tokens = most;
    if (!Number.isNaN(temperature)) chosen.temperature = temperature;
    return chosen;
  }

  /** Collect chunks and write them once a frame. */
  show(turn, piece, thought) {
    if (!turn.pending) requestAnimationFrame(() => this.flush(turn));
    turn.pending ??= { piece: "", thought: "" };
    turn.pending.piece += piece;
    turn.pending.thought += thought;
  }

  flush(turn) {
    if (!turn.pending) return;
    const atEnd = this.atEnd();
    const { piece, thought } = turn.pending;
    turn.pending = null;
    if (thought && !turn.thought) this.think(turn);
    turn.thought?.text.appendData(thought);
    if (piece && turn.thought && !turn.text.data) turn.thought.node.open = false;
    turn.text.appendData(piece);
    if (atEnd) this.scroll(true);
  }

  fail(turn, failure) {
    const code = failure.code ? ` (${failure.code})` : "";
    turn.after.before(make("p", { class: "error", role: "alert" }, `${failure.message}${code}`));
    if (failure.status === 401) this.onDenied();
  }

  busy(running) {
    show(byId("chat-stop"), running);
    show(byId("chat-send"), !running);
    this.log.setAttribute("aria-busy", String(running));
    if (!running && document.activeElement === document.body)
      this.input.focus({ preventScroll: true });
  }

  atEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
  }

  scroll(always = false) {
    if (always || this.atEnd()) this.log.scrollTop = this.log.scrollHeight;
  }
}

// The chat: a conversation with the served model, streamed like to any other client, kept in this
// browser. How turns look is in turns.js, what a model may show in markdown.js.

import * as store from "./conversations.js";
import { byId, make, show, write } from "./dom.js";
import { EXAMPLES, SKILLED } from "./examples.js";
import { HistoryDialog } from "./history_dialog.js";
import { Stopwatch } from "./stopwatch.js";
import { Refusal, stream } from "./talk.js";
import { AnswerTurn, UserTurn, contentOf, fileWords } from "./turns.js";

const COMPLETION_TOKENS = 200,
  MOST_FILE_BYTES = 512 * 1024;

/** A piece of a tool call: its name comes first, then its arguments bit by bit. */
const called = ({ function: { name, arguments: given } = {} }) =>
  (name ? `${name} ` : "") + (given ?? "");

/** How to ask this model: its path, the texts of the box, the shape of a body and of a chunk. */
const WAYS = {
  messages: {
    path: "v1/chat/completions",
    label: "Message",
    hint: "Ask the model …",
    note: "Answers stream from this server, beside whatever else it does. Conversations stay in this browser.",
    body: (turns, system) => ({
      messages: [
        ...(system ? [{ role: "system", content: system }] : []),
        ...turns.map((turn) => ({ role: turn.role, content: contentOf(turn) })),
      ],
    }),
    piece: ({ delta }) => (delta?.content ?? "") + (delta?.tool_calls ?? []).map(called).join(""),
    thought: (choice) => choice.delta?.reasoning_content ?? "",
  },
  text: {
    path: "v1/completions",
    label: "Text to continue",
    hint: "Once upon a time …",
    note: "This model has no chat template: it continues the text you give it.",
    body: (turns) => ({ prompt: contentOf(turns[turns.length - 1]), max_tokens: COMPLETION_TOKENS }),
    piece: (choice) => choice.text ?? "",
    thought: () => "",
  },
};
const SETTINGS = ["system", "max", "temperature", "more"];

export class Chat {
  constructor({ onDenied }) {
    this.onDenied = onDenied;
    this.model = this.way = this.stopper = this.example = this.editing = null;
    this.files = [];
    this.log = byId("chat-log");
    this.input = byId("chat-input");
    this.history = new HistoryDialog({
      onOpen: (conversation) => this.open(conversation),
      onRemove: (id) => (id === null || id === this.id) && this.clear(),
    });
    this.listen();
    this.listExamples();
    for (const [name, value] of Object.entries(store.settings()))
      if (SETTINGS.includes(name)) byId(`chat-${name}`).value = value;
    this.begin(store.lastOpen() ?? { id: store.newId(), turns: [] });
  }

  listen() {
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.input.addEventListener("keydown", (event) => this.key(event));
    this.input.addEventListener("input", () => this.grow());
    document.addEventListener("keydown", (event) => this.shortcut(event));
    byId("chat-stop").addEventListener("click", () => this.stop());
    byId("chat-clear").addEventListener("click", () => this.clear());
    byId("chat-history").addEventListener("click", () => this.history.show());
    byId("chat-edit-cancel").addEventListener("click", () => this.edit(null));
    byId("chat-wide").addEventListener("click", () => {
      const isWide = document.body.classList.toggle("wide-chat");
      byId("chat-wide").setAttribute("aria-pressed", String(isWide));
    });
    for (const name of SETTINGS) byId(`chat-${name}`).addEventListener("change", () => this.saveSettings());
    this.log.addEventListener("version", () => this.save());
    this.log.addEventListener("grown", () => this.scroll());
    this.listenForFiles();
  }

  listenForFiles() {
    const chosen = byId("chat-file");
    byId("chat-attach").addEventListener("click", () => chosen.click());
    chosen.addEventListener("change", () => {
      this.attach([...chosen.files]);
      chosen.value = "";
    });
    const form = byId("chat");
    form.addEventListener("dragover", (event) => event.preventDefault());
    form.addEventListener("drop", (event) => {
      event.preventDefault();
      this.attach([...event.dataTransfer.files]);
    });
  }

  listExamples() {
    byId("chat-example-list").append(
      ...EXAMPLES.map((one) => {
        const button = make("button", { class: "plain", type: "button" }, one.skill);
        button.addEventListener("click", () => this.fill(one));
        return make("li", {}, button);
      }),
    );
  }

  key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.send();
    } else if (event.key === "Escape") {
      if (this.editing) this.edit(null);
      else this.stop();
    } else if (event.key === "ArrowUp" && !this.input.value && !this.stopper) {
      const turn = this.turns.findLast(({ role }) => role === "user");
      if (!turn) return;
      event.preventDefault();
      this.edit(turn);
    }
  }

  shortcut(event) {
    if (!(event.ctrlKey || event.metaKey) || document.querySelector("dialog[open]")) return;
    const act = event.shiftKey ? { O: () => this.clear() } : { k: () => this.history.show() };
    const found = act[event.key];
    if (!found) return;
    event.preventDefault();
    found();
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
    this.input.disabled = byId("chat-send").disabled = way === null;
    write(byId("chat-label"), way?.label ?? "Message");
    this.input.placeholder = way?.hint ?? "";
    show(byId("chat-examples"), way === WAYS.messages && SKILLED.test(model));
    show(byId("chat-system-row"), way === WAYS.messages);
    write(
      byId("chat-note"),
      way?.note ??
        "This server runs without a tokenizer and takes token ids alone: there is nothing to type.",
    );
  }

  /** Put an example into the box; nothing is sent. */
  fill(example) {
    this.example = example;
    this.put(example.text);
  }

  put(text) {
    this.input.value = text;
    this.grow();
    this.input.focus();
  }

  /** The box is as high as its text, up to what the style sheet allows. */
  grow() {
    this.input.style.height = "auto";
    this.input.style.height = `${this.input.scrollHeight + 2}px`;
  }

  // ── conversations ─────────────────────────────────────────────────────────────────────────

  /** A new conversation; the one before is in the history. */
  clear() {
    this.stop();
    store.close();
    this.begin({ id: store.newId(), turns: [] });
    this.input.focus();
  }

  open(conversation) {
    this.stop();
    this.begin(conversation);
    store.markOpen(conversation.id);
    this.input.focus();
  }

  begin({ id, turns }) {
    this.id = id;
    this.turns = turns;
    this.views = new Map();
    this.edit(null);
    this.log.replaceChildren(byId("chat-hint"));
    show(byId("chat-hint"), turns.length === 0);
    for (const turn of turns) this.add(turn);
    this.scroll(true);
  }

  save({ id, turns } = this) {
    if (!turns.length) return store.remove(id);
    if (id === this.id) store.markOpen(id);
    const isKept = store.save({ id, title: store.titleOf(turns), turns });
    if (!isKept) write(byId("announce"), "This browser has no room to keep the conversation.");
    return undefined;
  }

  saveSettings() {
    const values = SETTINGS.map((name) => [name, byId(`chat-${name}`).value]);
    store.saveSettings(Object.fromEntries(values.filter(([, value]) => value)));
  }

  add(turn) {
    const view =
      turn.role === "user"
        ? new UserTurn(turn, () => this.edit(turn))
        : new AnswerTurn(turn, {
            model: turn.model ?? "",
            isMarkdown: !turn.isText,
            onAgain: () => this.again(turn),
          });
    this.views.set(turn, view);
    this.log.append(view.node);
    this.scroll(true);
    return view;
  }

  // ── files ─────────────────────────────────────────────────────────────────────────────────

  async attach(files) {
    const faults = [];
    for (const file of files) {
      if (file.size > MOST_FILE_BYTES) {
        faults.push(`${file.name} is larger than 512 KiB.`);
        continue;
      }
      try {
        const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
        if (text.includes("\0")) throw new TypeError("binary");
        this.files.push({ name: file.name.replace(/[\r\n]/g, " "), text });
      } catch {
        faults.push(`${file.name} is not text in UTF-8.`);
      }
    }
    this.drawFiles(faults.join(" "));
  }

  drawFiles(fault = "") {
    const chips = this.files.map((file) => {
      const button = make("button", { type: "button", class: "small", "aria-label": `Remove ${file.name}` }, "×");
      button.addEventListener("click", () => {
        this.files = this.files.filter((one) => one !== file);
        this.drawFiles();
      });
      return make("li", {}, fileWords(file), " ", button);
    });
    byId("chat-files").replaceChildren(...chips);
    write(byId("chat-file-error"), fault);
  }

  // ── asking ────────────────────────────────────────────────────────────────────────────────

  stop() {
    this.stopper?.abort();
  }

  /** Change an earlier message: its text goes into the box; null ends that. */
  edit(turn) {
    if (this.stopper && turn) return;
    if (!turn && this.editing) this.put("");
    this.editing = turn;
    this.files = [...(turn?.files ?? [])];
    this.drawFiles();
    show(byId("chat-editing"), turn !== null);
    if (turn) this.put(turn.content);
  }

  async send() {
    const content = this.input.value;
    if (!content.trim() || this.stopper || !this.way || !this.model) return;
    const turn = { role: "user", content, ...(this.files.length ? { files: this.files } : {}) };
    const example = content === this.example?.text ? this.example : null;
    this.example = null;
    this.branch();
    this.put("");
    this.turns.push(turn);
    show(byId("chat-hint"), false);
    this.add(turn);
    await this.answer(this.expect(), example);
    const isAnswered = this.turns.at(-1)?.role === "assistant";
    if (example?.then && isAnswered && !this.input.value) this.fill({ text: example.then });
  }

  /** What follows an edited message goes; the conversation as it was stays in the history. */
  branch() {
    if (this.editing) {
      const turns = structuredClone(this.turns.slice(0, this.turns.indexOf(this.editing)));
      this.begin({ id: store.newId(), turns });
    }
    this.files = [];
    this.drawFiles();
  }

  expect() {
    const isText = this.way === WAYS.text;
    const turn = { role: "assistant", model: this.model, versions: [{ content: "" }], at: 0, ...(isText ? { isText } : {}) };
    this.turns.push(turn);
    this.add(turn);
    return turn;
  }

  /** Ask once more for the last answer; the earlier one stays as a version. */
  async again(turn) {
    if (this.stopper || this.turns.at(-1) !== turn || !this.way) return;
    turn.versions.push({ content: "" });
    turn.at = turn.versions.length - 1;
    this.views.get(turn).showVersion();
    await this.answer(turn, null);
  }

  async answer(turn, example) {
    const watch = new Stopwatch();
    const { id, turns } = this;
    const view = this.views.get(turn);
    const version = turn.versions[turn.at];
    this.stopper = new AbortController();
    this.busy(true);
    this.save();
    let failure = null;
    try {
      await this.listenTo(turn, watch, this.stopper.signal, example?.tools);
    } catch (error) {
      failure = error;
    }
    const isStopped = failure?.name === "AbortError";
    version.after = [isStopped ? "Stopped" : "", watch.words()].filter(Boolean).join(" · ");
    view.write();
    write(view.after, version.after);
    this.stopper = null;
    this.busy(false);
    if (failure && !isStopped) this.fail(view, failure);
    if (!version.content) this.takeBack(turn, turns, isStopped || Boolean(failure));
    if (!failure) write(byId("announce"), `Answer complete. ${watch.words()}`);
    if (id === this.id || store.load(id)) this.save({ id, turns }); // else it was deleted meanwhile
    this.scroll();
  }

  /** Nothing was said: the version goes, and with the only one the question, back into the box. */
  takeBack(turn, turns, isUnanswered) {
    turn.versions.splice(turn.at, 1);
    turn.at = turn.versions.length - 1;
    if (turn.versions.length) return this.views.get(turn)?.showVersion();
    const [question] = turns.splice(turns.indexOf(turn) - 1, 2);
    for (const one of [question, turn]) show(this.views.get(one)?.actions ?? make("i"), false);
    if (isUnanswered && turns === this.turns && !this.input.value) {
      this.input.value = question.content;
      this.files = [...(question.files ?? [])];
      this.drawFiles();
    }
    return undefined;
  }

  async listenTo(turn, watch, signal, tools) {
    const body = {
      model: this.model,
      ...this.way.body(this.turns.slice(0, this.turns.indexOf(turn)), byId("chat-system").value.trim()),
      ...this.options(),
      ...(tools ? { tools } : {}),
      stream: true,
      stream_options: { include_usage: true },
    };
    const { way } = this;
    const version = turn.versions[turn.at];
    for await (const event of stream(way.path, body, signal)) {
      if (event.usage) watch.numTokens = event.usage.completion_tokens;
      if (!event.choices?.length) continue;
      const piece = way.piece(event.choices[0]);
      const thought = way.thought(event.choices[0]);
      if (!piece && !thought) continue;
      watch.arrived();
      version.content += piece;
      if (thought) version.thought = (version.thought ?? "") + thought;
      this.views.get(turn)?.came();
    }
  }

  options() {
    const chosen = {};
    const most = byId("chat-max").valueAsNumber,
      temperature = byId("chat-temperature").valueAsNumber,
      more = byId("chat-more").value.trim();
    if (!Number.isNaN(most)) chosen.max_tokens = most;
    if (!Number.isNaN(temperature)) chosen.temperature = temperature;
    if (!more) return chosen;
    try {
      return { ...chosen, ...JSON.parse(more) };
    } catch {
      throw new Refusal(`Options, more fields: not a JSON object: ${more}`);
    }
  }

  fail(view, failure) {
    view.fail(failure);
    if (failure.status === 401) this.onDenied();
  }

  busy(isRunning) {
    show(byId("chat-stop"), isRunning);
    show(byId("chat-send"), !isRunning);
    this.log.setAttribute("aria-busy", String(isRunning));
    if (!isRunning && document.activeElement === document.body)
      this.input.focus({ preventScroll: true });
  }

  /** Follow the newest text, unless the reader has scrolled away from it. */
  scroll(always = false) {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    if (always || scrollHeight - scrollTop - clientHeight < 120) this.log.scrollTop = scrollHeight;
  }
}

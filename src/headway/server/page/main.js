// The page's clock: read /stats once a second, update what has changed, show when the server is away.

import { Chat } from "./chat.js";
import { byId, make, mark, show, write } from "./dom.js";
import { age, bytes, count, plainSteps, said } from "./format.js";
import { History } from "./history.js";
import {
  ClassList,
  DraftsLine,
  Figures,
  GroupList,
  LatencyTable,
  StepParts,
} from "./panels.js";
import { RequestTable } from "./requests.js";
import { Refusal, get, key } from "./talk.js";
import { explainTerms } from "./terms.js";
import { StepTimeline } from "./timeline.js";
import { VerdictCard } from "./verdict.js";

const TICK_MS = 1000,
  LONGEST_WAIT_MS = 10_000,
  KEPT_TICKS = 120;
const WINDOWS = ["10", "60", "300"];
const WINDOW_WORDS = ["last 10 s", "last 1 min", "last 5 min"];
const STATES = {
  ready: ["ready", ""],
  restarting: [
    "down",
    "The engine stopped and is being started again. Open answers ended with an error; new ones are taken in a moment.",
  ],
  draining: [
    "down",
    "The server is shutting down: running answers are finished, new ones are refused.",
  ],
  failed: ["down", "The engine cannot be started. The server's log says why."],
  stopped: ["down", "The server has stopped."],
};
const LOADING = [
  "loading",
  "The model is being loaded; figures and answers follow when it is ready.",
];

/** Milliseconds of script in each tick, read by the tests. */
export const ticks = [];

/** ", 3 of 4 engines" where there are several. */
function ofEngines(engines) {
  if (engines.length < 2) return "";
  return `, ${engines.filter((each) => each.ready).length} of ${engines.length} engines`;
}

class Page {
  constructor() {
    this.models = [];
    this.model = null;
    this.snapshot = null;
    this.failures = 0;
    this.timer = 0;
    this.verdict = new VerdictCard();
    this.history = new History();
    this.timeline = new StepTimeline(byId("timeline"));
    this.panels = [
      new Figures(),
      new ClassList(),
      new LatencyTable(),
      new GroupList(),
      new DraftsLine(),
      new StepParts(),
      new RequestTable(),
    ];
    this.chat = new Chat({ onDenied: () => this.askKey("The server does not know this key.") });
    this.listen();
  }

  listen() {
    for (const choice of document.querySelectorAll("[name=window]"))
      choice.addEventListener("change", () => this.snapshot && this.draw());
    byId("banner-action").addEventListener("click", () =>
      this.denied ? this.askKey() : this.tick(),
    );
    byId("model-select").addEventListener("change", (event) => this.choose(event.target.value));
    byId("forget-key").addEventListener("click", () => {
      key.forget();
      this.tick();
    });
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && !this.denied) this.tick();
    });
    byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      key.set(byId("key-input").value.trim());
      byId("key-input").value = "";
      byId("key-dialog").close();
      this.tick();
    });
  }

  /** One round; the next is due a second after this one began, later while the server does not answer. */
  async tick() {
    clearTimeout(this.timer);
    if (this.running) return;
    this.running = true;
    const beganMs = performance.now();
    try {
      if (!this.models.length) await this.readModels();
      const { model } = this;
      const past = this.history.isBlank ? "history=true&" : "";
      const snapshot = await get(`stats?${past}model=${encodeURIComponent(model.id)}`);
      if (model === this.model) this.heard(snapshot);
    } catch (error) {
      this.unheard(error);
    }
    this.running = false;
    if (document.hidden || this.denied) return;
    const wait = Math.min(TICK_MS * 2 ** this.failures, LONGEST_WAIT_MS);
    this.timer = setTimeout(() => this.tick(), Math.max(50, wait - (performance.now() - beganMs)));
  }

  async readModels() {
    const { data } = await get("v1/models");
    const seen = new Map();
    for (const card of data) if (!seen.has(card.root)) seen.set(card.root, card);
    this.models = [...seen.values()];
    this.model = this.models.find((card) => card.id === this.model?.id) ?? this.models[0];
    byId("model-select").replaceChildren(
      ...this.models.map((card) => make("option", { value: card.id }, card.id)),
    );
    byId("model-select").value = this.model.id;
    show(byId("model-choice"), this.models.length > 1);
    show(byId("model-name"), this.models.length === 1);
    write(byId("model-name"), this.model.id);
    this.chat.use(this.model.id, this.model.accepts);
  }

  choose(id) {
    this.model = this.models.find((card) => card.id === id);
    this.history.forget();
    this.chat.use(this.model.id, this.model.accepts);
    this.tick();
  }

  heard(snapshot) {
    this.failures = 0;
    this.denied = false;
    this.snapshot = snapshot;
    byId("figures").classList.remove("stale");
    const [state, words] = STATES[snapshot.status] ?? LOADING;
    this.status(state, snapshot.status + ofEngines(snapshot.engines));
    this.banner(state, words);
    show(byId("forget-key"), Boolean(key.get()));
    const beganMs = performance.now();
    this.history.update(snapshot);
    this.timeline.update(snapshot.steps, snapshot.now_s);
    this.draw();
    ticks.push(performance.now() - beganMs);
    if (ticks.length > KEPT_TICKS) ticks.shift();
  }

  /** Update everything that depends on the chosen window. */
  draw() {
    const chosen = WINDOWS.indexOf(document.querySelector("[name=window]:checked").value);
    const window = this.snapshot.windows[chosen];
    for (const words of document.querySelectorAll(".window")) write(words, WINDOW_WORDS[chosen]);
    this.verdict.update(this.snapshot, window);
    for (const panel of this.panels) panel.update(this.snapshot, window);
    write(byId("uptime"), this.uptime());
    write(byId("machine"), this.machine());
  }

  /** "up 2 h 5 min, engine restarted 1×" */
  uptime() {
    const { uptime_s: up, totals } = this.snapshot;
    const restarts = totals.engine_restarts;
    return `up ${age(up)}${restarts ? `, engine restarted ${restarts}×` : ""}`;
  }

  machine() {
    const { model, machine, version, limits } = this.snapshot;
    const parameters = plainSteps(model.num_parameters).join("");
    return (
      `Headway ${version}: ${model.architecture}, ${parameters} parameters in ${model.dtype} (${said(bytes(model.weight_bytes))}), ` +
      `context ${said(count(model.max_model_len))}, up to ${limits.max_num_seqs} sequences and ${said(count(limits.max_num_batched_tokens))} tokens a step, on ${machine.name || machine.device}.`
    );
  }

  unheard(error) {
    if (!(error instanceof Refusal)) console.error(error);
    byId("figures").classList.add("stale");
    this.history.interrupt();
    this.denied = error.status === 401;
    if (this.denied) {
      this.status("down", "locked");
      this.banner("loading", "This server wants an API key to show its figures.", "Enter key");
      this.askKey(key.get() ? "The server does not know this key." : "");
      key.forget();
      show(byId("forget-key"), false);
      return;
    }
    if (error.status === 404) this.models = [];
    this.failures += 1;
    this.status("down", error.status ? "error" : "disconnected");
    this.banner(
      "down",
      `${error.message} Trying again by itself; the figures below are the last that came.`,
      "Retry now",
    );
  }

  status(state, words) {
    mark(byId("status"), "data-state", state);
    write(byId("status-text"), words);
  }

  banner(state, words, action = "") {
    mark(byId("banner"), "data-state", state);
    write(byId("banner-text"), words);
    show(byId("banner"), Boolean(words));
    write(byId("banner-action"), action);
    show(byId("banner-action"), Boolean(action));
  }

  askKey(words = "") {
    write(byId("key-error"), words);
    if (!byId("key-dialog").open) byId("key-dialog").showModal();
  }
}

/** The theme button: auto, light, dark; the choice is stored for the next visit. */
function themeButton() {
  const button = byId("theme"),
    names = ["auto", "light", "dark"];
  const label = () => write(byId("theme-name"), document.documentElement.dataset.theme ?? "auto");
  button.addEventListener("click", () => {
    const now = document.documentElement.dataset.theme ?? "auto";
    const next = names[(names.indexOf(now) + 1) % names.length];
    if (next === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    if (next === "auto") localStorage.removeItem("headway-theme");
    else localStorage.setItem("headway-theme", next);
    label();
  });
  label();
}

explainTerms();
themeButton();
new Page().tick();

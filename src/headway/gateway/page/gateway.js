// The gateway's page: ask /stats once a second, write what has changed, say so when nobody answers.

import { byId, mark, show, write } from "./dom.js";
import { said } from "./format.js";
import { Refusal, get, key } from "./talk.js";
import { TABLES, totalsOf, voidsOf } from "./tables.js";
import { Figures, Lines, Table } from "./table.js";

const TICK_MS = 1000,
  LONGEST_WAIT_MS = 10_000;
const THEMES = ["auto", "light", "dark"];

class Page {
  constructor() {
    this.failures = 0;
    this.timer = 0;
    this.denied = false;
    this.tables = TABLES.map((row) => new Table(row));
    this.totals = new Figures(byId("totals"));
    this.voids = new Lines(byId("voids"));
    this.listen();
    this.showTheme();
  }

  listen() {
    byId("theme").addEventListener("click", () => this.nextTheme());
    byId("banner-action").addEventListener("click", () =>
      this.denied ? this.askKey() : this.tick(),
    );
    byId("forget-key").addEventListener("click", () => {
      key.forget();
      this.tick();
    });
    byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      key.set(byId("key-input").value.trim());
      byId("key-input").value = "";
      byId("key-dialog").close();
      this.tick();
    });
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && !this.denied) this.tick();
    });
  }

  nextTheme() {
    const now = localStorage.getItem("headway-theme") ?? "auto";
    const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
    localStorage.setItem("headway-theme", next);
    this.showTheme();
  }

  showTheme() {
    const theme = localStorage.getItem("headway-theme") ?? "auto";
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    write(byId("theme-name"), theme);
  }

  /** One round; the next is due a second after this one began, later while nobody answers. */
  async tick() {
    clearTimeout(this.timer);
    if (this.running) return;
    this.running = true;
    const beganMs = performance.now();
    try {
      this.heard(await get("stats"));
    } catch (error) {
      this.unheard(error);
    }
    this.running = false;
    if (document.hidden || this.denied) return;
    const wait = Math.min(TICK_MS * 2 ** this.failures, LONGEST_WAIT_MS);
    this.timer = setTimeout(() => this.tick(), Math.max(50, wait - (performance.now() - beganMs)));
  }

  heard(stats) {
    this.failures = 0;
    this.denied = false;
    show(byId("banner"), false);
    show(byId("forget-key"), key.get() !== "");
    byId("figures").classList.remove("stale");
    const up = stats.upstreams.filter((each) => each.state === "closed").length;
    const all = stats.upstreams.length;
    mark(byId("status"), "data-state", up === all ? "ready" : up ? "loading" : "down");
    write(byId("status-text"), `${up} of ${all} upstreams`);
    this.totals.update(totalsOf(stats).map(([label, value]) => [label, said(value)]));
    this.voids.update(voidsOf(stats));
    for (const table of this.tables) table.update(stats);
  }

  unheard(error) {
    if (!(error instanceof Refusal)) throw error;
    byId("figures").classList.add("stale");
    mark(byId("status"), "data-state", "down");
    this.denied = error.status === 401 || error.status === 403;
    if (this.denied) return this.askKey();
    this.failures += 1;
    write(byId("status-text"), "no answer");
    this.say(error.message, "Retry now");
  }

  askKey() {
    write(byId("status-text"), "locked");
    this.say("These figures need an operator's key.", "Enter key");
    show(byId("forget-key"), key.get() !== "");
    if (!byId("key-dialog").open) byId("key-dialog").showModal();
  }

  say(text, action) {
    mark(byId("banner"), "data-state", "down");
    write(byId("banner-text"), text);
    write(byId("banner-action"), action);
    show(byId("banner-action"), true);
    show(byId("banner"), true);
  }
}

new Page().tick();

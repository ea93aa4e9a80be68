// The list of earlier conversations: open one, delete it, search, save all as a file.

import * as store from "./conversations.js";
import { byId, make, show, write } from "./dom.js";

const when = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
const textOf = ({ role, content, versions, at }) => (role === "user" ? content : versions?.[at]?.content) ?? "";

export class HistoryDialog {
  constructor({ onOpen, onRemove }) {
    this.onOpen = onOpen;
    this.onRemove = onRemove;
    this.dialog = byId("history-dialog");
    this.search = byId("history-search");
    this.search.addEventListener("input", () => this.draw());
    byId("history-close").addEventListener("click", () => this.dialog.close());
    byId("history-save").addEventListener("click", () => this.save());
    byId("history-clear").addEventListener("click", () => this.clear());
  }

  show() {
    this.search.value = "";
    this.armed = false;
    this.draw();
    if (!this.dialog.open) this.dialog.showModal();
  }

  draw() {
    const wanted = this.search.value.toLowerCase();
    const found = store
      .all()
      .filter(({ turns }) => !wanted || turns.some((turn) => textOf(turn).toLowerCase().includes(wanted)));
    byId("history-list").replaceChildren(...found.map((one) => this.row(one)));
    const none = wanted ? "None has these words." : "No conversation is kept in this browser yet.";
    write(byId("history-none"), none);
    show(byId("history-none"), found.length === 0);
    write(byId("history-clear"), this.armed ? "Really delete all?" : "Delete all");
  }

  row(one) {
    const open = make("button", { type: "button", class: "open" }, make("b", {}, one.title), make("span", { class: "quiet" }, when.format(one.updatedMs)));
    open.addEventListener("click", () => {
      this.dialog.close();
      this.onOpen(one);
    });
    const remove = make("button", { type: "button", class: "small", "aria-label": `Delete ${one.title}` }, "Delete");
    remove.addEventListener("click", () => {
      store.remove(one.id);
      this.onRemove(one.id);
      this.draw();
    });
    return make("li", {}, open, remove);
  }

  /** The second click deletes. */
  clear() {
    if (this.armed) {
      for (const { id } of store.all()) store.remove(id);
      this.onRemove(null);
    }
    this.armed = !this.armed;
    this.draw();
  }

  save() {
    const file = new Blob([JSON.stringify(store.all(), null, 2)], { type: "application/json" });
    const link = make("a", { href: URL.createObjectURL(file), download: "headway-conversations.json" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
}

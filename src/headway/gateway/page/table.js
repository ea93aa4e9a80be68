// Tables whose rows and columns are data: what is shown of /stats is in tables.js.

import { Rows, byId, make, mark, show, write } from "./dom.js";

/** One table: `rows(stats)` are its items, `columns` say what a cell holds. */
export class Table {
  constructor({ id, rows, keyOf, columns, empty = "" }) {
    this.rowsOf = rows;
    this.keyOf = keyOf;
    this.columns = columns;
    this.empty = empty;
    this.card = byId(`${id}-card`);
    const table = byId(id);
    const heads = columns.map(({ label, kind }) =>
      make("th", { scope: "col", class: kind ?? "" }, label),
    );
    const body = make("tbody");
    table.replaceChildren(make("thead", {}, make("tr", {}, ...heads)), body);
    this.rows = new Rows(body, () => {
      const cells = columns.map(({ kind }) => make("td", { class: kind ?? "" }));
      return { node: make("tr", {}, ...cells), cells };
    });
  }

  update(stats) {
    const items = this.rowsOf(stats);
    if (this.card) show(this.card, items.length > 0);
    this.rows.update(items, this.keyOf, ({ cells }, item) => {
      this.columns.forEach(({ value, kind, tone }, place) => {
        write(cells[place], value(item));
        mark(cells[place], "class", [kind, tone?.(item)].filter(Boolean).join(" "));
      });
    });
  }
}

/** Large figures with their labels: [[label, text], …], the same labels each time. */
export class Figures {
  constructor(node) {
    this.node = node;
    this.values = new Map();
  }

  update(pairs) {
    for (const [label, text] of pairs) {
      if (!this.values.has(label)) {
        const value = make("dd", { "data-figure": label });
        this.values.set(label, value);
        this.node.append(make("div", {}, make("dt", {}, label), value));
      }
      write(this.values.get(label), text);
    }
  }
}

/** A list of plain lines. */
export class Lines {
  constructor(node) {
    this.rows = new Rows(node, () => ({ node: make("li") }));
  }

  update(lines) {
    this.rows.update(lines, (line) => line, ({ node }, line) => write(node, line));
  }
}

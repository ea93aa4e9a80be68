// Writing to the page: text nodes only, and only what has changed.

export const byId = (id) => document.getElementById(id);

/** Set an element's text unless it is that already; its one text node stays. */
export function write(node, text) {
  if (node.shown === text) return;
  node.shown = text;
  if (node.firstChild) node.firstChild.data = text;
  else node.append(text);
}

/** [number, unit] as a large number and a small unit. */
export function writeFigure(node, [number, unit]) {
  const key = number + unit;
  if (node.shown === key) return;
  node.shown = key;
  node.replaceChildren(number);
  if (unit) node.append(make("small", {}, unit));
}

/** Set an attribute unless it is that already. */
export function mark(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

export function show(node, visible) {
  if (node.hidden === visible) node.hidden = !visible;
}

/** An element with attributes and children; strings become text nodes. */
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** The label of a figure whose definition `terms.js` has. */
export const term = (name, label) =>
  make("button", { class: "term", type: "button", "data-term": name }, label);

/** A list's rows under their keys: those that left go, new ones are made, in the data's order. */
export class Rows {
  constructor(parent, create) {
    this.parent = parent;
    this.create = create;
    this.rows = new Map();
  }

  update(items, keyOf, fill) {
    this.remove(new Set(items.map(keyOf)));
    let next = this.parent.firstElementChild;
    for (const item of items) {
      const key = keyOf(item);
      const row = this.rows.get(key) ?? this.create(item);
      this.rows.set(key, row);
      fill(row, item);
      if (row.node === next) next = next.nextElementSibling;
      else this.parent.insertBefore(row.node, next);
    }
  }

  /** Take away what is not among `kept`: first, so that the rest need not move. */
  remove(kept) {
    for (const [key, row] of this.rows) {
      if (kept.has(key)) continue;
      row.node.remove();
      this.rows.delete(key);
    }
  }
}

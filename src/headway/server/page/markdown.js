// Markdown as elements: `marked` splits the text into tokens, and each token becomes a node made
// here, with the attributes set here. No HTML is parsed, so what a model writes as HTML is shown as
// text, an image is a link to it, and a link has an http, https or mailto address or is text.

import { make } from "./dom.js";
import { Lexer } from "./marked.js";

const SLOW_MS = 60,
  FIRST_CHARS = 4000;
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const ENTITIES = { "&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": '"', "&#39;": "'", "&nbsp;": "\u00a0" };

const plain = (text) => text.replace(/&(lt|gt|amp|quot|#39|nbsp);/g, (entity) => ENTITIES[entity]);
const all = (tokens = []) => tokens.flatMap((token) => node(token));
const wrapped = (tag) => (token) => make(tag, {}, ...all(token.tokens));

/** An address that may be opened, or null. */
function address(href) {
  try {
    const url = new URL(href);
    return SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/** A link that tells its target nothing of this page; its title shows where it leads. */
function link(href, children) {
  const target = address(href);
  if (target === null) return children;
  return make("a", { href: target, target: "_blank", rel: "noopener noreferrer nofollow", title: target }, ...children);
}

/** Copy text; without the clipboard's API (plain HTTP from another machine) by a selection. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    button.after(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const label = button.textContent;
  button.textContent = "Copied";
  button.disabled = true;
  setTimeout(() => {
    button.textContent = label;
    button.disabled = false;
  }, 1200);
}

function code({ text, lang }) {
  const button = make("button", { type: "button", class: "small" }, "Copy");
  button.addEventListener("click", () => copy(text, button));
  const language = (lang ?? "").split(/\s/)[0];
  const header = make("div", { class: "code-top" }, make("span", {}, language || "text"), button);
  return make("div", { class: "code" }, header, make("pre", { tabindex: "0" }, make("code", {}, text)));
}

const item = ({ tokens }) => make("li", {}, ...all(tokens));

function list({ ordered, start, items }) {
  const attributes = ordered && start !== 1 && start !== "" ? { start: String(start) } : {};
  return make(ordered ? "ol" : "ul", attributes, ...items.map(item));
}

function table({ header, rows }) {
  const row = (tag) => (cells) =>
    make("tr", {}, ...cells.map(({ tokens, align }) => make(tag, align ? { class: `to-${align}` } : {}, ...all(tokens))));
  const body = make("tbody", {}, ...rows.map(row("td")));
  return make("div", { class: "wide-table", tabindex: "0" }, make("table", {}, make("thead", {}, row("th")(header)), body));
}

const NODES = {
  space: () => [],
  def: () => [],
  hr: () => make("hr"),
  br: () => make("br"),
  paragraph: wrapped("p"),
  blockquote: wrapped("blockquote"),
  strong: wrapped("strong"),
  em: wrapped("em"),
  del: wrapped("del"),
  heading: (token) => make(`h${Math.min(6, token.depth + 2)}`, {}, ...all(token.tokens)),
  text: (token) => (token.tokens ? all(token.tokens) : plain(token.text)),
  escape: (token) => token.text,
  codespan: (token) => make("code", {}, token.text),
  checkbox: (token) => (token.checked ? "☑ " : "☐ "),
  link: (token) => link(token.href, all(token.tokens)),
  image: (token) => link(token.href, [`image: ${token.text || token.href}`]),
  code,
  list,
  table,
};

/** The nodes of a token; those of HTML and of kinds unknown here are its text. */
const node = (token) => (NODES[token.type] ?? (({ raw }) => raw))(token);

/** One text that grows: blocks that stay the same keep their elements, and so a reader's selection. */
export class Markdown {
  constructor(host) {
    this.host = host;
    this.blocks = [];
    this.proven = FIRST_CHARS / 2;
    this.isPlain = false;
  }

  write(text) {
    const tokens = this.isPlain ? null : this.split(text);
    if (tokens === null) return this.writePlain(text);
    let same = 0;
    while (same < this.blocks.length && same < tokens.length && this.blocks[same].raw === tokens[same].raw) same += 1;
    for (const { nodes } of this.blocks.splice(same)) for (const one of nodes) one.remove();
    for (const token of tokens.slice(same)) {
      const nodes = [node(token)].flat().map((one) => (typeof one === "string" ? make("p", { class: "as-text" }, one) : one));
      this.blocks.push({ raw: token.raw, nodes });
      this.host.append(...nodes);
    }
    return undefined;
  }

  writePlain(text) {
    this.isPlain = true;
    this.blocks = [];
    this.host.replaceChildren(make("p", { class: "as-text" }, text));
  }

  /** The blocks of a text, or null where splitting it takes long: some texts cost their length squared. */
  split(text) {
    try {
      while (this.proven * 2 < text.length) {
        this.proven *= 2;
        if (this.timed(text.slice(0, this.proven)) === null) return null;
      }
      return this.timed(text);
    } catch (error) {
      if (error instanceof RangeError) return null; // nested deeper than the stack
      throw error;
    }
  }

  timed(text) {
    const beganMs = performance.now();
    const tokens = Lexer.lex(text, { gfm: true, breaks: true });
    return performance.now() - beganMs > SLOW_MS ? null : tokens;
  }
}

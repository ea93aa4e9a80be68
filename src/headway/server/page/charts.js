// Charts over time, drawn as SVG so that the style sheet colours them. A chart gets its samples
// at each tick and draws one path per line; the pointer selects a moment.

import { make, mark, write } from "./dom.js";
import { said } from "./format.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
export const SPAN_S = 300;
const SPANS_S = [
  [60, "1 min ago"],
  [120, "2 min ago"],
  [SPAN_S, "5 min ago"],
];
const LEFT = 46,
  RIGHT = 6,
  TOP = 8,
  BOTTOM = 18;

/** An SVG element with attributes. */
export function draw(tag, attributes = {}, text = "") {
  const node = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  return node;
}

/** The least of 1, 2, 5 × 10ⁿ that is not below `value`: 0.034 → 0.05, 130 → 200. */
export function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value * 0.9999);
}

/** A drawing as wide as its place; `redraw` is called when that changes. */
export class Drawing {
  constructor(host, height, label) {
    this.host = host;
    this.height = height;
    this.svg = draw("svg", { height, role: "img", "aria-label": label });
    host.append(this.svg);
    this.width = host.clientWidth || 320;
    new ResizeObserver(() => {
      if (host.clientWidth && host.clientWidth !== this.width) {
        this.width = host.clientWidth;
        this.redraw();
      }
    }).observe(host);
  }

  add(tag, attributes, text) {
    return this.svg.appendChild(draw(tag, attributes, text));
  }
}

/**
 * Lines over the last minute, and over five when the page has been open that long. `series` is
 * [[key of a sample, name, class], …], `format` makes [number, unit] of a value, `axis` its words
 * at the scale, `most` is the top of the scale where it is fixed (1 for shares), `each` says what
 * time a point stands for. Values are shown under the pointer alone: figures have their own window.
 */
export class LineChart extends Drawing {
  constructor(host, { title, name, series, format, axis = null, most = null, height = 112, each = "" }) {
    const header = host.appendChild(make("header"));
    super(host, height, title);
    Object.assign(this, { title, series, format, most, each, samples: [], at: null });
    this.axis = axis ?? ((value) => said(format(value)));
    header.append(make("button", { class: "term", type: "button", "data-term": name }, title));
    this.values = series.map(([, label, style]) => {
      const value = make("b");
      header.append(make("span", { class: `key ${style}` }, label, value));
      return value;
    });
    this.moment = header.appendChild(make("span", { class: "at" }));
    this.grid = [0, 0.5, 1].map((share) => ({
      share,
      line: this.add("path", { class: "grid" }),
      text: this.add("text", { x: LEFT - 8, "text-anchor": "end" }),
    }));
    this.times = [
      this.add("text", { "text-anchor": "start" }),
      this.add("text", { "text-anchor": "end" }, "now"),
    ];
    this.lines = series.map(([, , style]) => this.add("path", { class: `line ${style}` }));
    this.cursor = this.add("path", { class: "cursor" });
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.point(null));
  }

  update(samples, nowS) {
    this.samples = samples;
    this.nowS = nowS;
    const covered = samples.length ? nowS - samples[0].t : 0;
    [this.span, this.since] = SPANS_S.find(([span]) => covered <= span) ?? SPANS_S[2];
    this.redraw();
  }

  /** Read the sample under the pointer, or the newest again. */
  point(x) {
    this.at =
      x === null ? null : this.nowS - (1 - (x - LEFT) / (this.width - LEFT - RIGHT)) * this.span;
    if (this.samples.length) this.read();
  }

  read() {
    const newest = this.samples[this.samples.length - 1];
    const near = (best, one) =>
      Math.abs(one.t - this.at) < Math.abs(best.t - this.at) ? one : best;
    const sample = this.at === null ? newest : this.samples.reduce(near);
    const parts = this.series.map(([key, label], i) => {
      const text = said(this.format(sample[key]));
      write(this.values[i], this.at === null ? "" : text);
      return `${label} ${text}`;
    });
    write(this.moment, this.at === null ? this.each : `${Math.round(this.nowS - sample.t)} s ago`);
    const x = this.at === null ? -1 : this.x(sample.t);
    mark(this.cursor, "d", x < LEFT ? "" : `M${x},${TOP}V${this.height - BOTTOM}`);
    if (this.at === null)
      mark(this.svg, "aria-label", `${this.title} since ${this.since}; now ${parts.join(", ")}`);
  }

  x(t) {
    return LEFT + (this.width - LEFT - RIGHT) * (1 - (this.nowS - t) / this.span);
  }

  redraw() {
    if (!this.samples.length) return;
    const right = this.width - RIGHT,
      base = this.height - BOTTOM;
    const top = this.most ?? this.scale();
    for (const { share, line, text } of this.grid) {
      const y = Math.round(base - (base - TOP) * share);
      mark(line, "d", `M${LEFT},${y}H${right}`);
      mark(text, "y", String(y + 4));
      write(text, share === 0 ? "0" : this.axis(top * share));
    }
    write(this.times[0], this.since);
    this.times.forEach((text, i) => {
      mark(text, "x", String(i ? right : LEFT));
      mark(text, "y", String(this.height - 4));
    });
    this.series.forEach(([key], i) => mark(this.lines[i], "d", this.path(key, top, base)));
    this.read();
  }

  scale() {
    let most = 0;
    for (const sample of this.samples)
      for (const [key] of this.series) most = Math.max(most, sample[key] ?? 0);
    return most > 0 ? roundUp(most) : 1;
  }

  /** One line; it breaks where nothing was measured, and a lone point is a short dash. */
  path(key, top, base) {
    let text = "",
      drawing = false;
    for (const sample of this.samples) {
      const value = sample[key];
      if (value === null || value === undefined) {
        drawing = false;
        continue;
      }
      const x = this.x(sample.t).toFixed(1),
        y = (base - (base - TOP) * Math.min(value / top, 1)).toFixed(1);
      text += drawing ? `L${x},${y}` : `M${x},${y}h1`;
      drawing = true;
    }
    return text;
  }
}

// The roofline: what the measured ceilings allow, and where the work of the window lies under it.

import { Drawing } from "./charts.js";
import { mark, write } from "./dom.js";
import { bandwidth, digits, flops, plainSteps, said } from "./format.js";

const LEFT = 44,
  RIGHT = 12,
  TOP = 22,
  BOTTOM = 34;
const POINTS = [
  ["decode", "decode"],
  ["prefill", "prefill"],
];

const floor10 = (value) => Math.floor(Math.log10(value));
const ceil10 = (value) => Math.ceil(Math.log10(value));

export class Roofline extends Drawing {
  constructor(host) {
    super(host, 200, "Roofline");
    this.grid = this.add("path", { class: "grid" });
    this.roof = this.add("path", { class: "roof" });
    this.labels = [];
    this.axis = this.add("text", { "text-anchor": "end", y: this.height - 4 }, "work per byte read, FLOP/B");
    this.add("text", { x: 0, y: 11 }, "speed, FLOP/s");
    this.spots = POINTS.map(([key, style]) => ({
      key,
      spot: this.add("circle", { class: `spot ${style}`, r: 6, visibility: "hidden" }),
      name: this.add("text", { class: "name", visibility: "hidden" }, key),
    }));
  }

  update(machine, used) {
    this.machine = machine;
    this.points = this.spots
      .filter(({ key }) => used[key])
      .map(({ key }) => ({ key, ...used[key] }));
    this.redraw();
  }

  /**
   * The roof: measured ceilings, or higher where work of the window exceeded them, for what was
   * reached can be reached. Weights that fit the cache are read faster than memory: no slope then.
   */
  ceilings() {
    const { bandwidth_bytes_per_s: slope, flops_per_s: peak, cache_resident: cached } = this.machine ?? {};
    if (!slope || !peak) return null;
    const speeds = this.points.map((point) => point.flops_per_s);
    const reads = this.points.map((point) => point.flops_per_s / point.flops_per_byte);
    const top = Math.max(peak, ...speeds);
    return { peak: top, slope: cached ? Infinity : Math.max(slope, ...reads), isStale: top > peak * 1.001 || (!cached && Math.max(...reads) > slope * 1.001) };
  }

  redraw() {
    const roof = this.ceilings();
    mark(this.svg, "visibility", roof ? "visible" : "hidden");
    if (!roof) return;
    const { peak, slope, isStale } = roof;
    const ridge = peak / slope;
    const xs = [ridge || 1, ...this.points.map((point) => point.flops_per_byte)];
    const ys = [peak, ...this.points.map((point) => point.flops_per_s)];
    this.x0 = floor10(Math.min(...xs) / 2);
    this.x1 = Math.max(ceil10(Math.max(...xs) * 4), this.x0 + 2);
    this.y0 = Math.min(floor10(Math.min(...ys) / 1.5), floor10(peak / 100));
    this.y1 = ceil10(Math.max(...ys) * 1.2);
    this.axes();
    const left = Math.max(10 ** this.y0 / slope, 10 ** this.x0);
    const rise = ridge > left ? `M${this.at(left, left * slope)}L${this.at(ridge, peak)}` : `M${this.at(left, peak)}`;
    mark(this.roof, "d", `${rise}L${this.at(10 ** this.x1, peak)}`);
    mark(this.roof, "class", isStale ? "roof stale" : "roof");
    for (const spot of this.spots) this.put(spot);
    mark(this.svg, "aria-label", this.sentence(slope, peak));
  }

  put({ key, spot, name }) {
    const point = this.points.find((one) => one.key === key);
    for (const node of [spot, name]) mark(node, "visibility", point ? "inherit" : "hidden");
    if (!point) return;
    const [x, y] = [this.x(point.flops_per_byte), this.y(point.flops_per_s)];
    mark(spot, "cx", x.toFixed(1));
    mark(spot, "cy", y.toFixed(1));
    mark(name, "x", Math.min(x + 11, this.width - 50).toFixed(1));
    mark(name, "y", (y + (x + 60 > this.width ? 20 : 4)).toFixed(1));
  }

  /** Grid lines and their numbers at the powers of ten, every second one where they are many. */
  axes() {
    const places = [];
    const stepY = this.y1 - this.y0 > 4 ? 2 : 1,
      stepX = this.x1 - this.x0 > 5 ? 2 : 1;
    let path = "";
    for (let power = this.y0; power <= this.y1; power += stepY) {
      const y = Math.round(this.y(10 ** power));
      path += `M${LEFT},${y}H${this.width - RIGHT}`;
      places.push([LEFT - 6, y + 4, "end", plainSteps(10 ** power).join("")]);
    }
    for (let power = this.x0; power <= this.x1; power += stepX) {
      const x = Math.round(this.x(10 ** power));
      path += `M${x},${TOP}V${this.height - BOTTOM}`;
      places.push([x, this.height - BOTTOM + 13, "middle", digits(10 ** power)]);
    }
    mark(this.grid, "d", path);
    mark(this.axis, "x", String(this.width - RIGHT));
    while (this.labels.length < places.length) this.labels.push(this.add("text", {}));
    this.labels.forEach((text, i) => {
      const [x, y, anchor, words] = places[i] ?? [0, 0, "end", ""];
      mark(text, "x", String(x));
      mark(text, "y", String(y));
      mark(text, "text-anchor", anchor);
      write(text, words);
    });
  }

  x(value) {
    return (
      LEFT + ((this.width - LEFT - RIGHT) * (Math.log10(value) - this.x0)) / (this.x1 - this.x0)
    );
  }

  y(value) {
    const share = (Math.log10(value) - this.y0) / (this.y1 - this.y0);
    return this.height - BOTTOM - (this.height - BOTTOM - TOP) * share;
  }

  at(x, y) {
    return `${this.x(x).toFixed(1)},${this.y(y).toFixed(1)}`;
  }

  sentence(slope, peak) {
    const places = this.points.map(
      (point) =>
        `${point.key} reaches ${said(flops(point.flops_per_s))} at ${digits(point.flops_per_byte)} FLOP/B`,
    );
    const memory = slope === Infinity ? "" : `${said(bandwidth(slope))} and `;
    return `Roofline, ceilings ${memory}${said(flops(peak))}; ${places.join(", ") || "nothing ran"}`;
  }
}

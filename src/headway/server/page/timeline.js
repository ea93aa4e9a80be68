// The last steps on one time axis: a lane for prompt tokens, a lane for sequences that decode.

import { Drawing } from "./charts.js";
import { make, mark, write } from "./dom.js";
import { count, said, seconds, share } from "./format.js";

const MOST_S = 5,
  STALE_S = 30;
const LEFT = 46,
  RIGHT = 6,
  LANE = 46,
  GAP = 12,
  TOP = 6,
  BOTTOM = 18;
const [STEP, START, DURATION, PREFILL, DECODE, RUNNING, WAITING, KV, PREDICTED] = [
  0, 1, 2, 3, 4, 5, 6, 7, 8,
];
const LANES = [
  [PREFILL, "prefill"],
  [DECODE, "decode"],
];

export class StepTimeline extends Drawing {
  constructor(host) {
    const header = host.appendChild(make("header"));
    super(host, TOP + 2 * LANE + GAP + BOTTOM, "Step timeline");
    header.append(
      make("button", { class: "term", type: "button", "data-term": "timeline" }, "Timeline"),
      make("span", { class: "key prefill" }, "prompt tokens a step"),
      make("span", { class: "key decode" }, "decoding a step"),
    );
    this.read = header.appendChild(make("span", { class: "at" }));
    this.lanes = LANES.map(([field, style], i) => ({
      field,
      base: TOP + LANE + i * (LANE + GAP),
      line: this.add("path", { class: "grid" }),
      text: this.add("text", { x: LEFT - 8, "text-anchor": "end" }),
      bars: this.add("path", { class: `bars ${style}` }),
    }));
    this.times = ["start", "end"].map((anchor) =>
      this.add("text", { "text-anchor": anchor, y: this.height - 4 }),
    );
    this.cursor = this.add("path", { class: "cursor" });
    this.steps = [];
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.point(null));
  }

  update(steps, nowS) {
    this.nowS = nowS;
    const last = steps[steps.length - 1];
    const end = last ? last[START] + last[DURATION] : 0;
    const stale = !last || nowS - end > STALE_S; // the last steps of an idle server are not current
    if (this.newest === last?.[START] && this.stale === stale) {
      this.tell();
      return;
    }
    this.newest = last?.[START];
    this.stale = stale;
    this.steps = stale ? [] : steps.filter((step) => step[START] >= end - MOST_S);
    this.redraw();
    this.tell();
  }

  redraw() {
    if (!this.steps.length) {
      for (const { bars, text } of this.lanes) {
        mark(bars, "d", "");
        write(text, "");
      }
      for (const text of this.times) write(text, "");
      return;
    }
    const last = this.steps[this.steps.length - 1];
    this.from = this.steps[0][START];
    this.span = Math.max(last[START] + last[DURATION] - this.from, 1e-4);
    for (const lane of this.lanes) this.lane(lane);
    const right = this.width - RIGHT;
    this.times.forEach((text, i) => mark(text, "x", String(i ? right : LEFT)));
    write(this.times[0], `${said(seconds(this.span))} before`);
    write(this.times[1], "newest step");
  }

  lane({ field, base, line, text, bars }) {
    const most = Math.max(1, ...this.steps.map((step) => step[field]));
    mark(line, "d", `M${LEFT},${base}H${this.width - RIGHT}`);
    write(text, String(most));
    mark(text, "y", String(base - LANE + 12));
    let path = "";
    for (const step of this.steps) {
      if (!step[field]) continue;
      const x = this.x(step[START]),
        width = Math.max(1, this.x(step[START] + step[DURATION]) - x - 0.6);
      const height = Math.max(1.5, ((LANE - 4) * step[field]) / most);
      path += `M${x.toFixed(1)},${base}v${(-height).toFixed(1)}h${width.toFixed(1)}V${base}z`;
    }
    mark(bars, "d", path);
  }

  x(t) {
    return LEFT + ((this.width - LEFT - RIGHT) * (t - this.from)) / this.span;
  }

  /** Without the pointer: the age of the newest step, where it is old. */
  tell() {
    if (this.pointed) return;
    const ago = this.newest === undefined ? null : this.nowS - this.newest;
    const text =
      ago === null
        ? "no step yet"
        : ago > 3
          ? `last step ${said(seconds(Math.round(ago)))} ago`
          : "";
    write(this.read, text);
    mark(
      this.svg,
      "aria-label",
      `Step timeline of ${this.steps.length} steps; ${text || "running"}`,
    );
  }

  point(x) {
    this.pointed = x !== null && this.steps.length > 0;
    if (!this.pointed) {
      mark(this.cursor, "d", "");
      this.tell();
      return;
    }
    const t = this.from + ((x - LEFT) / (this.width - LEFT - RIGHT)) * this.span;
    const step = this.steps.findLast((one) => one[START] <= t) ?? this.steps[0];
    const at = this.x(step[START]).toFixed(1);
    mark(this.cursor, "d", `M${at},${TOP}V${this.height - BOTTOM}`);
    const predicted = step[PREDICTED] ? ` (${said(seconds(step[PREDICTED]))} predicted)` : "";
    write(
      this.read,
      `step ${step[STEP]}: ${said(seconds(step[DURATION]))}${predicted}, ${step[PREFILL]} + ${step[DECODE]} tokens, ` +
        `${said(count(step[RUNNING]))} run, ${step[WAITING]} wait, KV ${said(share(step[KV]))}`,
    );
  }
}

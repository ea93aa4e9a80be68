// Samples of the charts: one for each tick, for five minutes, after those that the server had stored
// before the page was opened. Rates are differences of the totals between two ticks; percentiles are
// those of the last 10 s.

import { LineChart, SPAN_S } from "./charts.js";
import { byId } from "./dom.js";
import { count, digits, rate, seconds, share } from "./format.js";

const P50_P99 = (name) => [
  [`${name}50`, "p50", "decode"],
  [`${name}99`, "p99", "second"],
];
const CHARTS = [
  [
    "chart-ttft",
    { title: "TTFT", name: "ttft", series: P50_P99("ttft"), format: seconds, height: 96, each: "each point: 10 s" },
  ],
  [
    "chart-tpot",
    { title: "TPOT", name: "tpot", series: P50_P99("tpot"), format: seconds, height: 96, each: "each point: 10 s" },
  ],
  [
    "chart-tokens",
    {
      title: "Tokens per second",
      name: "output",
      series: [
        ["output", "out", "decode"],
        ["input", "in", "prefill"],
      ],
      format: (value) => rate(value, "tok/s"),
      axis: digits,
      each: "each point: 1 s",
    },
  ],
  [
    "chart-queue",
    {
      title: "Sequences",
      name: "running",
      series: [
        ["running", "running", "decode"],
        ["waiting", "waiting", "prefill"],
      ],
      format: (value) => count(value),
      axis: digits,
      each: "each point: 1 s",
    },
  ],
  [
    "chart-kv",
    {
      title: "KV blocks in use",
      name: "kv",
      series: [["kv", "", "decode"]],
      format: share,
      most: 1,
      height: 130,
      each: "each point: 1 s",
    },
  ],
];

/** A second of the server's own history, in the order of /stats, as a sample. */
const sample = ([t, output, input, running, waiting, kv, ttft50, ttft99, tpot50, tpot99]) => ({
  t,
  output,
  input,
  running,
  waiting,
  kv,
  ttft50,
  ttft99,
  tpot50,
  tpot99,
});

export class History {
  constructor() {
    this.samples = [];
    this.last = null;
    this.charts = CHARTS.map(([id, options]) => new LineChart(byId(id), options));
  }

  update(snapshot) {
    if (this.samples.length && snapshot.now_s < this.samples[this.samples.length - 1].t)
      this.forget();
    if (snapshot.history?.length) this.samples = snapshot.history.map(sample);
    const { last } = this;
    const passed = last ? snapshot.now_s - last.now_s : 0;
    const since = (name) =>
      passed > 0 ? Math.max(0, snapshot.totals[name] - last.totals[name]) / passed : null;
    const { ttft, tpot } = snapshot.windows[0].latency;
    this.samples.push({
      t: snapshot.now_s,
      output: since("generation_tokens"),
      input: since("prompt_tokens"),
      running: snapshot.now.num_running,
      waiting: snapshot.now.num_waiting,
      kv: snapshot.now.kv_usage,
      ttft50: ttft.p50,
      ttft99: ttft.p99,
      tpot50: tpot.p50,
      tpot99: tpot.p99,
    });
    this.last = snapshot;
    while (this.samples[0].t < snapshot.now_s - SPAN_S) this.samples.shift();
    for (const chart of this.charts) chart.update(this.samples, snapshot.now_s);
  }

  /** Whether the next snapshot should include the history. */
  get isBlank() {
    return this.last === null;
  }

  /** Break the lines here: the server was away, or another one answers. */
  interrupt() {
    if (this.last) this.samples.push({ t: this.last.now_s });
    this.last = null;
  }

  forget() {
    this.samples = [];
    this.last = null;
  }
}

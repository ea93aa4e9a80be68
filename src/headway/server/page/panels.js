// The middle of the page: goodput by class, latency, memory, steps and cost. Figures are a table by
// section of [name, label, what to say of (snapshot, window)]; lists keep rows from tick to tick.

import { Rows, byId, make, mark, show, term, write, writeFigure } from "./dom.js";
import { bytes, count, digits, dollars, rate, said, seconds, share, tokens } from "./format.js";

const judged = (window, field) => window.classes.reduce((sum, one) => sum + one[field], 0);
const attainment = (window) =>
  judged(window, "num_judged") ? judged(window, "num_met") / judged(window, "num_judged") : null;

const FIGURES = {
  goodput: [
    ["goodput", "Goodput", (_, w) => rate(w.goodput_per_s, "req/s")],
    ["attainment", "SLO met", (_, w) => share(attainment(w))],
    ["finished", "Finished", (_, w) => rate(w.finished_per_s, "req/s")],
    ["failed", "Failed", (_, w) => count(w.num_failed)],
  ],
  load: [
    ["output", "Output", (_, w) => rate(w.output_tokens_per_s, "tok/s")],
    ["input", "Input", (_, w) => rate(w.input_tokens_per_s, "tok/s")],
    ["arrivals", "Arrivals", (_, w) => rate(w.arrivals_per_s, "req/s")],
    ["prompt-length", "Prompt", (_, w) => tokens(w.lengths.prompt.p50)],
    ["output-length", "Answer", (_, w) => tokens(w.lengths.output.p50)],
  ],
  memory: [
    ["kv", "KV in use now", (s) => share(s.now.kv_usage)],
    ["hits", "Cache hit rate", (_, w) => share(w.cache_hit_rate)],
    ["preemptions", "Preemptions", (_, w) => count(w.steps.num_preemptions)],
  ],
  steps: [
    ["step", "Step, mean", (_, w) => seconds(w.steps.mean?.duration_s)],
    ["busy", "Busy", (_, w) => share(w.steps.busy_share)],
    ["gap", "Gaps", (_, w) => share(w.steps.gap_share)],
    ["mbu", "MBU, decode", (_, w) => share(w.decode?.mbu)],
    ["mfu", "MFU, prefill", (_, w) => share(w.prefill?.mfu)],
  ],
  cost: [
    ["usd-output", "Per million out", (_, w) => dollars(w.cost?.usd_per_million_output)],
    ["usd-input", "Per million in", (_, w) => dollars(w.cost?.usd_per_million_input)],
    ["usd-request", "Per request", (_, w) => dollars(w.cost?.usd_per_request)],
    ["usd-met", "Per request in SLO", (_, w) => dollars(w.cost?.usd_per_met_request)],
    ["usd-total", "Since the start", (s) => dollars(s.totals.usd)],
  ],
};

export class Figures {
  constructor() {
    this.places = Object.entries(FIGURES).flatMap(([group, rows]) => {
      const list = document.querySelector(`[data-figures="${group}"]`);
      return rows.map(([name, label, value]) => {
        const place = make("dd", { "data-figure": name });
        const title = make("dt", {}, term(name.replaceAll("-", "_"), label));
        list.append(make("div", {}, title, place));
        return [place, value];
      });
    });
  }

  update(snapshot, window) {
    for (const [node, value] of this.places) writeFigure(node, value(snapshot, window));
    document.querySelector('[data-figure="failed"]').classList.toggle("bad", window.num_failed > 0);
    show(byId("no-price"), snapshot.price_per_hour === null);
    show(byId("cost"), snapshot.price_per_hour !== null);
  }
}

const LATENCIES = [
  ["ttft", "TTFT", "main"],
  ["tpot", "TPOT", "main"],
  ["itl", "ITL", ""],
  ["queue", "Queue", ""],
  ["prefill", "Prefill", ""],
  ["e2e", "e2e", ""],
];
const PERCENTILES = ["p50", "p90", "p95", "p99"];

export class LatencyTable {
  constructor() {
    this.rows = LATENCIES.map(([name, label, style]) => {
      const cells = PERCENTILES.map(() => make("td"));
      byId("percentiles").append(
        make("tr", { class: style }, make("th", { scope: "row" }, term(name, label)), ...cells),
      );
      return [name, cells];
    });
  }

  update(_, window) {
    for (const [name, cells] of this.rows)
      cells.forEach((cell, i) =>
        write(cell, seconds(window.latency[name]?.[PERCENTILES[i]]).join(" ").trim()),
      );
  }
}

/** A bar of a share of 1, with a mark where `target` is. */
function meter(target) {
  const fill = make("i"),
    node = make("div", { class: "meter", "aria-hidden": "true" }, fill);
  const line = target === undefined ? null : node.appendChild(make("u"));
  return {
    node,
    set(value, kind, at) {
      const width = `${Math.max(0, Math.min(1, value ?? 0)) * 100}%`;
      if (fill.style.width !== width) fill.style.width = width;
      if (line) line.style.left = `calc(${at * 100}% - 1px)`;
      mark(node, "class", `meter ${kind}`);
    },
  };
}

const missedWords = (missed) =>
  Object.entries(missed)
    .map(([which, number]) => `${NAMES[which] ?? which} ${number}×`)
    .join(", ");

const budget = (left) =>
  left === null
    ? "–"
    : left < -0.005
      ? `overspent by ${said(share(-left))}`
      : `${said(share(Math.max(0, left)))} left`;

/** ttft=500ms,tpot=50ms → TTFT ≤ 500 ms, TPOT ≤ 50 ms. */
const objectives = (text) =>
  text
    .split(/,\s*/)
    .map((one) =>
      one
        .replace(/^(itl_p99|\w+)=/, (_, name) => `${NAMES[name] ?? name} ≤ `)
        .replace(/([\d.]+)(us|ms|s|m)\b/, "$1\u00a0$2"),
    )
    .join(", ");
const NAMES = { ttft: "TTFT", tpot: "TPOT", itl_p99: "ITL p99", e2e: "e2e" };

export class ClassList {
  constructor() {
    this.rows = new Rows(byId("classes"), (one) => this.create(one));
  }

  create() {
    const row = {
      name: make("b"),
      objectives: make("span", { class: "quiet" }),
      met: meter(1),
      left: meter(),
    };
    for (const part of ["goodput", "good", "attained", "missed", "budget", "burn"])
      row[part] = make("span");
    for (const part of ["good", "missed", "burn"]) row[part].className = "quiet";
    row.node = make(
      "li",
      {},
      make("div", {}, row.name, row.objectives),
      make("div", {}, row.goodput, row.good),
      make("div", {}, row.attained, row.met.node, row.missed),
      make("div", {}, term("budget", "Budget"), " ", row.budget, row.left.node, row.burn),
    );
    return row;
  }

  update(snapshot, window) {
    const target = snapshot.slo_target;
    show(byId("no-classes"), window.classes.length === 0);
    this.rows.update(
      window.classes,
      (one) => one.name,
      (row, one) => {
        const fine = one.attainment === null ? "" : one.attainment >= target ? "good" : "bad";
        write(row.name, one.name);
        write(row.objectives, one.objectives ? objectives(one.objectives) : "no objectives");
        row.objectives.title = one.why;
        write(row.goodput, `${said(rate(one.goodput_per_s, "req/s"))} good`);
        write(row.good, `${said(rate(one.token_goodput_per_s, "tok/s"))} in them`);
        write(row.attained, `${said(share(one.attainment))} met, target ${said(share(target))}`);
        row.met.set(one.attainment, fine, target);
        const misses = missedWords(one.missed);
        write(
          row.missed,
          `${one.num_met} of ${one.num_judged}${misses ? `; missed: ${misses}` : ""}`,
        );
        write(row.budget, budget(one.budget_left));
        row.left.set(one.budget_left, fine);
        write(row.burn, one.burn_rate === null ? "" : `burns ${said(rate(one.burn_rate, ""))}×`);
      },
    );
  }
}

const groupName = ({ kind, window, num_layers: layers }) =>
  `${kind}${window ? ` attention, last ${said(count(window))} tokens` : " attention"}, ${layers} layers`;

export class GroupList {
  constructor() {
    this.rows = new Rows(byId("groups"), () => {
      const row = {
        name: make("span"),
        used: make("span"),
        size: make("span", { class: "quiet" }),
        bar: meter(),
      };
      row.node = make(
        "li",
        {},
        make("div", { class: "row" }, row.name, row.used),
        row.bar.node,
        row.size,
      );
      return row;
    });
  }

  update({ now, limits }) {
    const named = now.kv_groups.map((group, i) => ({ ...group, i }));
    this.rows.update(
      named,
      (group) => group.i,
      (row, group) => {
        const used = group.blocks_total ? group.blocks_used / group.blocks_total : null;
        const size = group.bytes_per_token * limits.block_size;
        write(row.name, groupName(group));
        write(
          row.used,
          `${said(count(group.blocks_used))} of ${said(count(group.blocks_total, "blocks"))}`,
        );
        row.bar.set(used, used > 0.9 ? "bad" : "");
        write(
          row.size,
          `${said(bytes(group.blocks_used * size))} of ${said(bytes(group.blocks_total * size))}, blocks of ${limits.block_size} tokens`,
        );
      },
    );
  }
}

const PARTS = ["schedule", "prepare", "forward", "sample", "update", "other"];

/** {drafts_per_step: 3.1, acceptance: 0.62, …} → 62% of 3.1 a step kept, 2.92 tokens a step … */
export function draftsSaid(drafts) {
  const failed = drafts.failure ? `; the drafter failed: ${drafts.failure}` : "";
  const forced = drafts.jump_forward_tokens ? `${said(count(drafts.jump_forward_tokens))} tokens forced by grammars; ` : "";
  if (!drafts.draft_tokens)
    return `${forced}none in this window (${Object.keys(drafts.by_source).join(", ")})${failed}`;
  const { acceptance, drafts_per_step, tokens_per_step } = drafts;
  const kept = `${said(share(acceptance))} of ${digits(drafts_per_step)} a step kept`;
  const cost = said(share(drafts.draft_share + drafts.verify_share));
  const sources = Object.entries(drafts.by_source)
    .filter(([, one]) => one.draft_tokens)
    .map(([name, one]) => `${name} ${said(share(one.accepted_tokens / one.draft_tokens))}`);
  const gained = `${digits(tokens_per_step)} tokens a step for ${cost} of its time`;
  return `${forced}${kept}, ${gained} (${sources.join(", ")})${failed}`;
}

export class DraftsLine {
  update(_, { drafts }) {
    show(byId("drafts"), drafts !== null);
    if (drafts !== null) write(byId("drafts-text"), draftsSaid(drafts));
  }
}

export class StepParts {
  constructor() {
    this.parts = PARTS.map((name, i) => {
      const bar = make("i", { class: `part-${i}` }),
        text = make("li", { class: `part-${i}` });
      byId("parts-bar").append(bar);
      byId("parts-list").append(text);
      return { name, bar, text };
    });
  }

  update(_, { steps: { mean } }) {
    show(byId("parts"), mean !== null);
    if (mean === null) return;
    const whole = PARTS.reduce((sum, name) => sum + mean[`${name}_s`], 0) || 1;
    for (const { name, bar, text } of this.parts) {
      const value = mean[`${name}_s`];
      bar.style.width = `${(value / whole) * 100}%`;
      write(text, `${name} ${said(seconds(value))}`);
    }
  }
}

// The verdict: what limits the server, in one sentence with its figures.

import { Rows, byId, make, show, write } from "./dom.js";
import { bandwidth, digits, flops, said, share } from "./format.js";
import { Roofline } from "./roofline.js";

const KINDS = {
  contention: "Cores in use by others",
  compute: "Compute-bound",
  bandwidth: "Bandwidth-bound",
  capacity: "Capacity-bound",
  host: "Host-bound",
  "under-loaded": "Under-loaded",
  unknown: "No verdict yet",
};
const BELOW = new Set(["roofline", "probe_share"]); // these limit when they are low
const NUMBERS = new Set(["waiting", "run_queue"]); // no shares

/** Steps with or without prefill, whichever took more time: ["decode", its utilization]. */
function main(used) {
  const parts = ["decode", "prefill"].filter((name) => used[name]);
  const name = parts.reduce(
    (best, one) => (!best || used[one].time_s > used[best].time_s ? one : best),
    null,
  );
  return name ? [name, used[name]] : [null, null];
}

/** "decode reads 38 of 41 GB/s": the work and its ceiling. */
function working(kind, used, machine) {
  const [name, part] = main(used);
  if (!part) return null;
  if (kind === "bandwidth" && machine.bandwidth_bytes_per_s)
    return `${name} reads ${said(bandwidth(part.bytes_per_s))} of ${said(bandwidth(machine.bandwidth_bytes_per_s))}`;
  if (kind === "compute" && machine.flops_per_s)
    return `${name} computes ${said(flops(part.flops_per_s))} of ${said(flops(machine.flops_per_s))}`;
  return null;
}

/** Whether a figure is on the side of its threshold that supports the verdict. */
const counts = ({ name, value, threshold }) =>
  BELOW.has(name) ? value < threshold : value > threshold;

const threshold = ({ name, threshold: value }) =>
  `counts ${BELOW.has(name) ? "below" : "above"} ${NUMBERS.has(name) ? digits(value) : said(share(value))}` +
  (name === "roofline" ? " of the roofline" : "");

export class VerdictCard {
  constructor() {
    this.roofline = new Roofline(byId("roofline"));
    this.evidence = new Rows(byId("evidence"), () => {
      const text = make("b"),
        note = make("span");
      return { node: make("li", {}, text, note), text, note };
    });
    write(byId("try-url"), new URL("v1", location.href).href);
    write(
      byId("try-bench"),
      `headway bench ${new URL(".", location.href).href.replace(/\/$/, "")}`,
    );
  }

  update(snapshot, window) {
    const { verdict } = window;
    const fresh = snapshot.totals.requests === 0;
    write(byId("verdict-head"), fresh ? this.greeting(snapshot) : this.sentence(snapshot, window));
    write(byId("verdict-text"), fresh ? "" : this.lead(verdict));
    this.evidence.update(
      fresh ? [] : verdict.evidence,
      (one) => one.name,
      (row, one) => {
        write(row.text, one.text);
        write(row.note, threshold(one));
        row.node.classList.toggle("counts", counts(one));
      },
    );
    show(byId("try"), fresh);
    this.tellChange(fresh ? "" : KINDS[verdict.kind]);
    this.roofline.update(snapshot.machine, window);
    write(byId("roofline-note"), this.note(snapshot.machine, window));
  }

  greeting({ status }) {
    return status === "ready" ? "Ready, and nothing to do yet" : "Not ready yet";
  }

  /** "Bandwidth-bound: decode reads 38 of 41 GB/s": the kind, and the figure that decided it. */
  sentence({ machine }, window) {
    const { kind, evidence } = window.verdict;
    const decisive = evidence.find(counts) ?? evidence[0];
    const why = working(kind, window, machine) ?? decisive?.text;
    return why ? `${KINDS[kind] ?? kind}: ${why}` : (KINDS[kind] ?? kind);
  }

  lead({ kind, text, near_ceiling: near }) {
    if (kind !== "compute" && kind !== "bandwidth") return text;
    return near
      ? `${text} Faster needs less work or another machine.`
      : `${text} The kernels leave some of the machine.`;
  }

  /** Announce a new verdict to screen readers: its kind alone, as its figures change each second. */
  tellChange(title) {
    if (title && this.title && title !== this.title) write(byId("announce"), `Verdict: ${title}`);
    this.title = title;
  }

  note(machine, used) {
    if (!machine.bandwidth_bytes_per_s || !machine.flops_per_s)
      return "The machine's ceilings are not measured yet.";
    const measured = `with measured ceilings: ${said(bandwidth(machine.bandwidth_bytes_per_s))}, ${said(flops(machine.flops_per_s))} ${machine.flops_dtype}.`;
    const above = ["decode", "prefill"].some((name) => used[name]?.above_ceiling)
      ? " A point lies above a ceiling: the probe was too low."
      : "";
    return (
      measured +
      (machine.cache_resident
        ? " The weights fit the cache, so memory does not bound decoding."
        : "") +
      above
    );
  }
}

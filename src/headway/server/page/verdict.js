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
    const address = new URL(".", location.href).href.replace(/\/$/, "");
    write(byId("try-url"), `${address}/v1`);
    write(byId("try-bench"), `headway bench ${address}`);
    for (const id of ["try-doctor", "doctor-command"]) write(byId(id), `headway doctor ${address}`);
  }

  update(snapshot, window) {
    const { verdict } = window;
    const isFresh = snapshot.totals.requests === 0;
    const isIdle = isFresh || (!window.decode && !window.prefill && !snapshot.now.num_requests);
    write(byId("verdict-head"), isIdle ? this.greeting(snapshot, isFresh) : this.sentence(snapshot, window));
    write(byId("verdict-text"), isIdle ? "" : this.lead(verdict));
    byId("figures").classList.toggle("fresh", isFresh);
    this.evidence.update(
      isIdle ? [] : verdict.evidence,
      (one) => one.name,
      (row, one) => {
        write(row.text, one.text);
        write(row.note, threshold(one));
        row.node.classList.toggle("counts", counts(one));
      },
    );
    show(byId("try"), isFresh);
    show(byId("roofline-figure"), !isFresh);
    this.tellChange(isIdle ? "" : KINDS[verdict.kind]);
    this.roofline.update(snapshot.machine, window);
    write(byId("roofline-note"), this.note(snapshot.machine));
  }

  greeting({ status }, isFresh) {
    if (status !== "ready") return "Not ready yet";
    return isFresh ? "Ready: no requests yet" : "Ready: no work in this window";
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

  note(machine) {
    const { bandwidth_bytes_per_s: slope, flops_per_s: peak, flops_dtype: type } = machine;
    if (!slope || !peak) return "The machine's ceilings are measured when the server is idle.";
    const compute = `${said(flops(peak))} ${type}`;
    const roof = machine.cache_resident
      ? `measured ceiling ${compute}; memory is no ceiling, for the weights fit the cache.`
      : `measured ceilings ${said(bandwidth(slope))} and ${compute}.`;
    const stale = this.roofline.ceilings()?.isStale;
    return stale ? `${roof} Dashed: work was faster than that, so the measurement is stale; it is repeated when the server is idle.` : roof;
  }
}

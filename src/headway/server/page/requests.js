// The table of requests that run or wait; a row stays the same element while its request lives.

import { Rows, byId, make, mark, write } from "./dom.js";
import { age, count, said, seconds } from "./format.js";

const number = (value) => (value < 1000 ? String(value) : said(count(value)));
const CELLS = [
  ["", (one) => one.state + (one.num_preemptions ? ` ×${one.num_preemptions}` : "")],
  ["wide", (one) => one.class],
  ["", (one) => (one.age_s < 10 ? `${one.age_s.toFixed(1)} s` : age(one.age_s))],
  ["", (one) => number(one.prompt_tokens)],
  ["wide", (one) => number(one.cached_tokens)],
  ["wide", (one) => number(one.computed_tokens)],
  ["", (one) => number(one.generated_tokens)],
  ["", (one) => said(seconds(one.ttft_s))],
  ["wide", (one) => (one.num_sequences > 1 ? `${one.id} (${one.num_sequences})` : one.id)],
];

export class RequestTable {
  constructor() {
    this.rows = new Rows(byId("requests"), () => {
      const cells = CELLS.map(([style]) => make("td", style ? { class: style } : {}));
      return { node: make("tr", {}, ...cells), cells };
    });
  }

  update({ now }) {
    this.rows.update(
      now.requests,
      (one) => one.id,
      (row, one) => {
        mark(row.node, "data-state", one.state);
        CELLS.forEach(([, words], i) => write(row.cells[i], words(one)));
      },
    );
    write(byId("requests-note"), this.note(now));
  }

  note({ num_requests: all, num_running: run, num_waiting: wait, requests }) {
    if (!all) return "None runs and none waits.";
    const shown = requests.length < all ? ` The oldest ${requests.length} are listed.` : "";
    const oldest = requests.length ? `; the oldest came ${age(requests[0].age_s)} ago` : "";
    return `${number(all)} requests: ${number(run)} sequences run, ${number(wait)} wait${oldest}.${shown}`;
  }
}

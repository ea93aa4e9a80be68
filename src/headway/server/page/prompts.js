// What prompts could do without: a row for what stands twice, tools, documents and examples, each with
// the tokens of a mean prompt, the seconds of its prefill and the dollars of an hour.

import { Rows, byId, make, show, write } from "./dom.js";
import { count, dollars, said, seconds, share } from "./format.js";

const BYTES_PER_TOKEN = 4;
const LITTLE = 0.5;
/** Fewer tokens a prompt are not shown. */

/** 3 of 4 documents used: "by place 100%, 50%" tells how many documents are worth their tokens. */
const byPlace = (places) => places.map(({ used, shown }) => said(share(used / shown))).join(", ");

/** [key, what, tokens in the mean of all prompts, where that was seen] of all that was found. */
export function savingsOf(prompts) {
  if (!prompts) return [];
  const inMean = (each, requests) => each * Math.min(1, requests / Math.max(1, prompts.seen));
  const rows = [
    [
      "twice",
      "Said twice in one prompt",
      prompts.prompts ? prompts.twice_tokens / prompts.prompts : 0,
      `the last ${said(count(prompts.prompts))} prompts`,
    ],
  ];
  for (const tool of prompts.tools)
    rows.push([
      `tool ${tool.name}`,
      `Tool ${tool.name}, never called`,
      inMean(tool.num_bytes / BYTES_PER_TOKEN, tool.requests),
      `${said(count(tool.requests))} requests that offer it`,
    ]);
  const { documents, examples } = prompts;
  if (documents) {
    const never = documents.idle ? `; ${said(count(documents.idle))} never used` : "";
    rows.push([
      "documents",
      `Documents not used, ${said(count(documents.shown - documents.used))} of ${said(count(documents.shown))}${never}`,
      inMean(documents.unused_tokens / documents.answers, documents.requests),
      `${said(count(documents.answers))} of ${said(count(documents.requests))} answers; used by place ${byPlace(documents.places)}`,
    ]);
  }
  if (examples)
    rows.push([
      "examples",
      "Examples, where they do not help",
      inMean(examples.tokens, examples.requests),
      `${said(count(examples.requests))} of ${said(count(examples.chats))} chats`,
    ]);
  return rows.filter((row) => row[2] >= LITTLE);
}

export class SavingsTable {
  constructor() {
    this.rows = new Rows(byId("savings-rows"), () => {
      const row = { what: make("td"), tokens: make("td"), seconds: make("td") };
      row.usd = make("td", { class: "wide" });
      row.seen = make("td", { class: "wide" });
      row.node = make("tr", {}, row.what, row.tokens, row.seconds, row.usd, row.seen);
      return row;
    });
  }

  update({ prompts }, window) {
    const found = savingsOf(prompts);
    show(byId("no-savings"), found.length === 0);
    show(byId("savings"), found.length > 0);
    const price = window.cost?.usd_per_million_input ?? null;
    const perHour = price === null ? null : (price / 1e6) * window.finished_per_s * 3600;
    this.rows.update(
      found,
      ([key]) => key,
      (row, [, what, each, seen]) => {
        write(row.what, what);
        write(row.tokens, said(count(Math.round(each))));
        write(row.seconds, said(seconds(each * prompts.token_s)));
        write(row.usd, perHour === null ? "–" : said(dollars(each * perHour)));
        write(row.seen, seen);
      },
    );
  }
}

// What each figure means, in the words of docs/telemetry.md, and the tooltip that says it: on hover,
// on focus, and on a tap; Escape hides it.

import { byId, write } from "./dom.js";

export const TERMS = {
  verdict:
    "What bounds this server over the window: others on its cores, compute, memory bandwidth, capacity (KV blocks or rows), the host between steps, or nothing but too little load. Below it are the figures it stands on.",
  roofline:
    "FLOP/s that the work reaches, over the FLOPs it does for each byte it must read. The line is the least of what compute and memory allow, both measured on this machine. Nearer to the line is better.",
  goodput:
    "Requests per second that met all of their objectives. A failed or refused request never counts.",
  attainment: "Share of judged requests that met all of their objectives (SLO), over all classes.",
  finished: "Requests per second that ended, however they ended.",
  failed: "Requests of the window that failed or were refused for load.",
  budget:
    "What is left of the misses that the SLO target allows: 100% is untouched, below 0 is overspent.",
  burn: "Share of requests that missed ÷ share that may miss. 1 spends exactly the budget.",
  ttft: "Time to first token: the first token with content leaves − the request arrived.",
  tpot: "Time per output token of one request: (e2e − TTFT) ÷ (output tokens − 1).",
  itl: "Inter-token latency: each gap between two consecutive tokens of one request.",
  e2e: "The last token leaves − the request arrived.",
  queue: "First scheduled − arrived: how long requests wait before any work is done for them.",
  prefill: "From first scheduled to the first token: the prompt's own work.",
  output: "Output tokens that left, per second, all requests together.",
  input:
    "Prompt tokens per second, of requests whose first token left; cached tokens are included.",
  arrivals: "Requests that arrived, per second.",
  prompt_length: "Tokens of a prompt, median of the window.",
  output_length: "Tokens of an answer, median of the window.",
  running: "Sequences the engine advances, and sequences that wait for it.",
  kv: "Share of the KV cache's blocks that sequences hold now.",
  hits: "Share of prompt tokens whose KV was in the cache already.",
  preemptions: "Sequences sent back to wait because blocks ran out; their KV is computed again.",
  step: "One step of the engine: schedule, forward, sample, update. The mean of the window.",
  busy: "Share of wall time spent inside steps.",
  gap: "Share of wall time between steps while there was work.",
  mbu: "Model bandwidth utilization of steps without prefill: bytes that had to be read (weights once, KV of every row) ÷ time ÷ the measured bandwidth. None where the weights fit the cache.",
  mfu: "Model FLOPs utilization of steps with prefill: FLOPs needed ÷ time ÷ the measured dense peak.",
  drafts:
    "Speculation: tokens that are guessed for each sequence that decodes and verified together in its step. Those that are right are kept, with the token that comes anyway; the answer is the same. What it costs is of the time in steps.",
  parts: "Means over the window's steps. Forward is the model; everything else is the host.",
  timeline:
    "The last 200 steps: prompt tokens computed (prefill) and sequences advanced by one token (decode). Empty space between bars is time in no step.",
  usd_output:
    "Dollars for a million output tokens: the time of steps is split by the work they did, idle time included.",
  usd_input: "Dollars for a million prompt tokens.",
  usd_request: "All spend of the window ÷ requests that ended.",
  usd_met: "All spend of the window ÷ requests that met their objectives.",
  usd_total: "Price per hour × the time this server has run.",
  state:
    "Waiting for its first step, prefill (its prompt is computed), decode (its answer is), or preempted (sent back to wait).",
  age: "Time since the request arrived.",
  prompt_tokens: "Tokens of the request's prompt or prompts.",
  cached: "Prompt tokens whose KV was in the cache already.",
  computed: "Tokens of the request whose KV is in place.",
  generated: "Output tokens so far, all its sequences together.",
  chat: "Measured in this browser: TTFT from sending to the first text; the time, and tok/s of it, from sending to the last text.",
};

const MARGIN = 8;

function place(tip, anchor) {
  const box = anchor.getBoundingClientRect();
  const width = tip.offsetWidth;
  const left = Math.min(
    Math.max(MARGIN, box.left),
    document.documentElement.clientWidth - width - MARGIN,
  );
  const below = box.bottom + MARGIN + tip.offsetHeight < window.innerHeight;
  const top = below ? box.bottom + MARGIN : box.top - MARGIN - tip.offsetHeight;
  tip.style.left = `${Math.max(0, left) + window.scrollX}px`;
  tip.style.top = `${top + window.scrollY}px`;
}

/** Show definitions for everything with `data-term`, now and later. */
export function explainTerms() {
  const tip = byId("tip");
  let anchor = null;

  const hide = () => {
    anchor?.removeAttribute("aria-describedby");
    anchor = null;
    tip.hidden = true;
  };
  const reveal = (event) => {
    const found = event.target.closest?.("[data-term]");
    if (!found || !TERMS[found.dataset.term]) return;
    hide();
    anchor = found;
    write(tip, TERMS[found.dataset.term]);
    tip.hidden = false;
    found.setAttribute("aria-describedby", "tip");
    place(tip, found);
  };
  const leave = (event) => {
    if (anchor && event.target === anchor && document.activeElement !== anchor) hide();
  };
  document.addEventListener("pointerover", reveal);
  document.addEventListener("focusin", reveal);
  document.addEventListener("click", reveal);
  document.addEventListener("pointerout", leave);
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
}

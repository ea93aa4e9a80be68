// What the gateway's page shows of /stats: a row of TABLES is a table, a column says what it holds.

import { NONE, count, digits, dollars, said, seconds, share } from "./format.js";

const text = (value) => (value === null || value === undefined || value === "" ? "–" : `${value}`);
const list = (values) => (values.length ? values.join(", ") : "–");
const ratio = ([part, all]) => (all ? `${part} of ${all}` : "–");
const plain = (value) => (value === null || value === undefined ? NONE : [digits(value), ""]);

const STATE_WORDS = {
  closed: "healthy",
  "half open": "failed, tried again now",
  open: "failed, rests",
  down: "down: health checks fail",
};
const STATE_TONES = { closed: "good", "half open": "warn", open: "bad", down: "bad" };
const ROLLOUT_TONES = { promoted: "good", "rolled back": "bad", held: "warn" };

const words = (label, value, more = {}) => ({ label, kind: "text", value, ...more });
const figure = (label, value, more = {}) => ({ label, value: (item) => said(value(item)), ...more });

/** The large figures: the group of all tasks. */
export function totalsOf({ tasks }) {
  const all = tasks.find((each) => each.dimension === "all");
  return [
    ["Spent", dollars(all?.dollars ?? 0)],
    ["Requests", count(all?.requests ?? 0)],
    ["Tasks that succeeded", count(all?.succeeded ?? 0)],
    ["Tasks that failed", count(all?.failed ?? 0)],
    ["Cost per success", dollars(all?.cost_per_success)],
  ];
}

/** Why no evidence of a cascade holds. */
export const voidsOf = ({ routes }) =>
  routes
    .filter((each) => each.cascade?.void)
    .map((each) => `${each.model}: no evidence holds, all is asked of the dear route: ${each.cascade.void}.`);

const taskRows = ({ routes }) =>
  routes.flatMap(({ model, cascade }) =>
    (cascade?.tasks ?? []).map((task) => ({ ...task, model, cheap: cascade.cheap, void: cascade.void })),
  );

const interval = (task) =>
  `${said(share(task.lost / task.asked))} (${said(share(task.loss_low))} … ${said(share(task.loss_high))})`;

const verdict = (task) => {
  if (task.void) return "void";
  return task.use ? `cheap first: ${task.cheap}` : `dear: ${task.why}`;
};

const check = ({ check: name, least }) =>
  name ? `${name} ≥ ${least === null ? "any" : digits(least)}` : "valid, whole";

const guardRows = ({ rollouts }) =>
  rollouts.flatMap((rollout) =>
    Object.entries(rollout.guards).map(([guard, told]) => ({ rollout: rollout.name, guard, ...told })),
  );

const DIMENSIONS = ["key", "task", "route"];

export const TABLES = [
  {
    id: "spend",
    rows: ({ tasks }) => DIMENSIONS.flatMap((name) => tasks.filter((each) => each.dimension === name)),
    keyOf: (item) => `${item.dimension} ${item.name}`,
    columns: [
      words("by", (item) => `${item.dimension} ${item.name || "(none)"}`),
      figure("requests", (item) => count(item.requests)),
      figure("spent", (item) => dollars(item.dollars)),
      figure("succeeded", (item) => count(item.succeeded)),
      figure("failed", (item) => count(item.failed)),
      figure("cost per success", (item) => dollars(item.cost_per_success)),
    ],
  },
  {
    id: "budgets",
    rows: ({ budgets }) => budgets ?? [],
    keyOf: (item) => `${item.kind} ${item.name}`,
    columns: [
      words("budget of", (item) => `${item.kind} ${item.name}`),
      figure("left", (item) => dollars(item.left)),
      figure("spent", (item) => dollars(item.spent)),
      figure("held by running requests", (item) => dollars(item.held)),
      figure("allowed", (item) => dollars(item.dollars)),
      words("per", (item) => item.per),
    ],
  },
  {
    id: "refusals",
    rows: ({ refusals }) => refusals ?? [],
    keyOf: (item) => `${item.key} ${item.code}`,
    columns: [
      words("key", (item) => item.key || "(none)"),
      words("refused for", (item) => item.code),
      figure("requests", (item) => count(item.requests)),
    ],
  },
  {
    id: "upstreams",
    rows: ({ upstreams }) => upstreams,
    keyOf: (item) => item.name,
    columns: [
      words("name", (item) => item.name),
      words("state", (item) => STATE_WORDS[item.state] ?? item.state, { tone: (item) => STATE_TONES[item.state] }),
      words("kind", (item) => item.kind),
      words("models", (item) => list(item.models)),
      figure("requests, 5 min", (item) => count(item.recent.attempts)),
      figure("failed, 5 min", (item) => share(item.recent.error_rate), {
        tone: (item) => (item.recent.error_rate > 0.05 ? "bad" : ""),
      }),
      figure("TTFT p50, 5 min", (item) => seconds(item.recent.ttft_p50_s)),
      figure("in flight now", (item) => count(item.in_flight)),
      figure("queue now", (item) => seconds(item.queue_s)),
      figure("a prompt token", (item) => seconds(item.token_s)),
      figure("an answer token", (item) => seconds(item.answer_s)),
      figure("context", (item) => count(item.context || null)),
      figure("breaker opened", (item) => count(item.opened)),
    ],
  },
  {
    id: "routes",
    rows: ({ routes }) => routes,
    keyOf: (item) => item.model,
    columns: [
      words("model", (item) => item.model),
      words("policy", (item) => item.policy),
      words("upstreams", (item) => list(item.upstreams)),
      words("then", (item) => list(item.fallbacks)),
      words("cheap first", (item) => text(item.cascade?.cheap)),
    ],
  },
  {
    id: "cascades",
    rows: taskRows,
    keyOf: (item) => `${item.model} ${item.task}`,
    columns: [
      words("task", (item) => `${item.model}: ${item.task}`),
      words("way", verdict, { tone: (item) => (item.void ? "warn" : item.use ? "good" : "") }),
      words("check", check),
      figure("asked", (item) => count(item.asked)),
      figure("cheap right", (item) => share(item.cheap_right / item.asked)),
      figure("dear right", (item) => share(item.dear_right / item.asked)),
      { label: "lost, 95%", value: interval },
      figure("cost of dear", (item) => (item.dear_cost ? share(item.cost / item.dear_cost) : NONE)),
      figure("accepted", (item) => count(item.accepted_now)),
      figure("rejected", (item) => count(item.rejected)),
    ],
  },
  {
    id: "holds",
    rows: ({ holds }) => holds ?? [],
    keyOf: (item) => item.route,
    columns: [
      words("route", (item) => item.route),
      words("held by", (item) => item.by),
      figure("answers", (item) => count(item.answers)),
      figure("stopped", (item) => count(item.stopped)),
      figure("late", (item) => count(item.late)),
      figure("to publish, mean", (item) => seconds(item.mean_s)),
      figure("p50 below", (item) => seconds(item.p50_s)),
      figure("p99 below", (item) => seconds(item.p99_s)),
    ],
  },
  {
    id: "rollouts",
    rows: ({ rollouts }) => rollouts,
    keyOf: (item) => item.name,
    columns: [
      words("rollout", (item) => `${item.name}, version ${item.version}`),
      words("model", (item) => item.model),
      words("canary", (item) => list(item.canary)),
      words("state", (item) => STATE_WORDS[item.state] ?? item.state, { tone: (item) => ROLLOUT_TONES[item.state] }),
      figure("share", (item) => share(item.share)),
      words("waits for", (item) => list(item.waits_for)),
      { label: "why", kind: "text long", value: (item) => text(item.reason) },
    ],
  },
  {
    id: "guards",
    rows: guardRows,
    keyOf: (item) => `${item.rollout} ${item.guard}`,
    columns: [
      words("guard", (item) => `${item.rollout}: ${item.guard}`),
      { label: "canary bad", value: (item) => ratio(item.canary) },
      { label: "control bad", value: (item) => ratio(item.control) },
      figure("evidence", (item) => plain(item.evidence), {
        tone: (item) => (item.evidence >= item.bound ? "bad" : item.evidence > 5 ? "warn" : ""),
      }),
      figure("rolls back at", (item) => plain(item.bound)),
    ],
  },
  {
    id: "drift",
    rows: ({ drift }) => drift,
    keyOf: (item) => `${item.model} ${item.first} ${item.second}`,
    columns: [
      words("pair", (item) => `${item.model}: ${item.second} beside ${item.first}`),
      words("verdict", (item) => (item.alarm ? item.suspect : "alike"), {
        tone: (item) => (item.alarm ? "bad" : "good"),
      }),
      figure("probes", (item) => count(item.probes)),
      figure("changed", (item) => count(item.changed)),
      figure("control", (item) => count(item.changed_control)),
      figure("nats a token", (item) => plain(item.kl)),
    ],
  },
];

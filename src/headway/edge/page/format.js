// Numbers with units. Each function gives [number, unit] as text; `said` joins them.
// null and undefined are "not measured here" and become a dash, never a zero.

export const NONE = ["–", ""];
const DECIMAL_STEPS = [
  ["", 1],
  ["k", 1e3],
  ["M", 1e6],
  ["G", 1e9],
  ["T", 1e12],
  ["P", 1e15],
];
const BINARY_STEPS = [
  ["B", 1],
  ["KiB", 2 ** 10],
  ["MiB", 2 ** 20],
  ["GiB", 2 ** 30],
  ["TiB", 2 ** 40],
];
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

const missing = (value) => value === null || value === undefined || Number.isNaN(value);

/** Three significant digits, and none lost before the point: 0.123, 1.23, 12.3, 123, 1,234. */
export function digits(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 100) return grouped.format(value);
  const places = size >= 10 ? 1 : size >= 1 ? 2 : size >= 0.1 ? 3 : 4;
  return String(Number(value.toFixed(places)));
}

const atStep = (value, steps) => {
  const row = steps.findLast(([, size]) => Math.abs(value) >= size) ?? steps[0];
  return [digits(value / row[1]), row[0]];
};

/** 0.0000042 → 4.2 µs, 0.034 → 34 ms, 1.234 → 1.23 s, 200 → 3 min 20 s. */
export function seconds(value) {
  if (missing(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return ["0", "ms"];
  if (size < 1e-4) return [digits(value * 1e6), "µs"];
  if (size < 0.9995) return [digits(value * 1e3), "ms"];
  if (size < 100) return [digits(value), "s"];
  return [age(value), ""];
}

/** A length of time for people: 42 s, 3 min 20 s, 2 h 5 min, 3 d 4 h. */
export function age(value) {
  if (missing(value)) return "–";
  const whole = Math.floor(value);
  const parts = [
    ["d", 86400],
    ["h", 3600],
    ["min", 60],
    ["s", 1],
  ];
  const first = parts.findIndex(([, size]) => whole >= size);
  if (first < 0) return "0 s";
  const [unit, size] = parts[first];
  const rest = parts[first + 1];
  const head = `${Math.floor(whole / size)} ${unit}`;
  const tail = rest ? Math.floor((whole % size) / rest[1]) : 0;
  return tail ? `${head} ${tail} ${rest[0]}` : head;
}

export const count = (value, unit = "") => (missing(value) ? NONE : [grouped.format(value), unit]);
export const rate = (value, unit) => (missing(value) ? NONE : [digits(value), unit]);
export const tokens = (value) => (missing(value) ? NONE : [digits(value), "tokens"]);
export const share = (value) =>
  missing(value)
    ? NONE
    : [value > 0 && value < 0.01 ? digits(value * 100) : String(Math.round(value * 100)), "%"];
export const bytes = (value) => (missing(value) ? NONE : atStep(value, BINARY_STEPS));

const decimal = (value, unit) => {
  if (missing(value)) return NONE;
  const [number, step] = atStep(value, DECIMAL_STEPS);
  return [number, step + unit];
};
export const bandwidth = (value) => decimal(value, "B/s");
export const flops = (value) => decimal(value, "FLOP/s");
export const plainSteps = (value) => decimal(value, "");

/** Dollars with the digits that matter: $5.56, $0.0031. */
export function dollars(value) {
  if (missing(value)) return NONE;
  if (value === 0) return ["$0", ""];
  const places = value >= 0.995 ? 2 : Math.min(8, 1 - Math.floor(Math.log10(value)));
  return [`$${value >= 1000 ? grouped.format(value) : value.toFixed(places)}`, ""];
}

/** [number, unit] as one text: "34 ms", "92%". */
export const said = ([number, unit]) =>
  unit === "%" || !unit ? number + unit : `${number}\u00a0${unit}`;

// Times and tokens of one answer, by this browser's clock.

import { digits, said, seconds } from "./format.js";

export class Stopwatch {
  constructor() {
    this.startMs = performance.now();
    this.firstMs = this.lastMs = null;
    this.numChunks = 0;
    this.numTokens = null;
  }

  arrived() {
    this.lastMs = performance.now();
    this.firstMs ??= this.lastMs;
    this.numChunks += 1;
  }

  /**
   * "TTFT 34 ms · 45 tokens in 0.41 s, 110 tok/s", as the reader saw it: from sending to the last
   * text. "about", from the chunks, where usage did not come.
   */
  words() {
    if (this.firstMs === null) return "";
    const tokens = this.numTokens ?? this.numChunks;
    const exact = this.numTokens === null ? "about " : "";
    const parts = [`TTFT ${said(seconds((this.firstMs - this.startMs) / 1e3))}`];
    const wholeS = (this.lastMs - this.startMs) / 1e3;
    const speed = tokens > 1 && wholeS > 0 ? `, ${digits(tokens / wholeS)} tok/s` : "";
    const unit = tokens === 1 ? "token" : "tokens";
    parts.push(`${exact}${tokens} ${unit} in ${said(seconds(wholeS))}${speed}`);
    return parts.join(" · ");
  }
}

"""Does the controller of guesses choose well? `python benchmarks/speculation_control.py FOLDER`.

    regret:4:chats  tokens a second of `auto` beside the best fixed choice: no guesses, or always
                    2, 4 or 8 of one source; at 4 streams of chats

All choices answer the same requests in one engine, side by side (`lanes.py`): each step is one of
the choice that has the fewest tokens so far, so what the machine does beside slows all alike. Each
has a cost model of its own, which knows what the engine learned at its start, and a memory of its
own of what was kept. Prompts are computed before: they are in the prefix cache. After a quarter of
the time the three best fixed choices go on alone. Intervals are of 95%, over twentieths of the run
drawn again. The tokens are compared: they must be the same.

    python benchmarks/speculation_control.py WIDE --draft DRAFT --json cells.jsonl --seconds 100 \\
        --only regret:1:chats

A cell that the file has is not run again. For a model of few parameters widen it first
(`widen.py`), for there a step takes as long as Python does.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from common import markdown
from headway import LLM
from headway.config.speculation_config import SpeculationConfig
from headway.engine.speculation.adaptive import AdaptiveSpeculator, DraftCandidate
from headway.engine.speculation.backoff import NoBackoff
from headway.engine.speculation.controller import PlainStep
from headway.perf.model import StepModel
from judged import Data, interval, say
from lanes import Lane, Mark, Track, prompts_of

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("HEADWAY_SHARED") or ROOT / ".." / "shared")
KINDS = ("copies", "chats", "books")
STREAMS = (1, 4, 16, 32)
FIXED = (2, 4, 8)
PARTS = 20
SCREENED, REMAINING = 0.25, 3
"""After this share of the time so many fixed choices go on."""


# ── choices ─────────────────────────────────────────────────────────────────────────────────


def all_of(values: Sequence[Sequence[float]], budget: int) -> list[int]:
    """Every guess there is, as far as they fit."""
    counts = []
    for chances in values:
        counts.append(min(len(chances), budget))
        budget -= counts[-1]
    return counts


class Always(AdaptiveSpeculator):
    """Verifies and drafts as many draft tokens as it may, whatever they bring."""

    def __init__(self, config: SpeculationConfig, cost: StepModel) -> None:
        super().__init__(config, cost)
        self.backoff = NoBackoff()

    def _choose(self, candidates: list[DraftCandidate], plain: PlainStep) -> list[int]:
        return all_of([candidate.probabilities for candidate in candidates], plain.budget)

    def _choose_to_draft(self, values: list[list[float]], plain: PlainStep) -> list[int]:
        return all_of(values, plain.budget)


def makers(
    llm: LLM, fixed: Sequence[int]
) -> dict[str, Callable[[StepModel], AdaptiveSpeculator] | None]:
    """By name who makes the speculator of a choice; "off" has none."""
    config = llm.settings.speculation
    found: dict[str, Callable[[StepModel], AdaptiveSpeculator] | None] = {"off": None}
    found["auto"] = lambda cost: AdaptiveSpeculator(config, cost)
    for source in [name for name in config.sources if name != "forced"]:
        for most in fixed:
            only = replace(config, sources=(source,), num_speculative_tokens=most)
            found[f"{source} {most}"] = lambda cost, only=only: Always(only, cost)
    return found


# ── cells ───────────────────────────────────────────────────────────────────────────────────


def track_of(llm: LLM, kind: str, given: argparse.Namespace) -> Track:
    """All choices beside each other, with endless prompts of this kind."""
    track = Track(llm, prompts_of(llm, kind, given.text))
    config = llm.settings.speculation
    if config.drafter:
        asking = replace(config, sources=(config.drafter,))
        track.asking = Always(asking, track.known)
    for name, make in makers(llm, given.fixed).items():
        if not given.choices or name in ("off", "auto", *given.choices):
            track.add(name, make)
    return track


def regret(llm: LLM, streams: int, kind: str, given: argparse.Namespace) -> Data:
    """All choices for `--seconds`; seconds by twentieths of the tokens that all had."""
    track = track_of(llm, kind, given)
    begun_s, screened = time.monotonic(), False
    while (spent_s := time.monotonic() - begun_s) < given.seconds:
        if spent_s > SCREENED * given.seconds and not screened:
            screen(track)
            screened = True
        lane = track.next_lane()
        track.fill(lane, streams)
        track.step(lane)
    track.end()
    most = min(lane.tokens for lane in track.lanes if not lane.is_over)
    off, lanes = track.lanes[0], {}
    for lane in track.lanes:
        far = min(most, lane.tokens)
        seconds = [at_tokens(each.marks, np.array([far]))[0] for each in (off, lane)]
        lanes[lane.name] = lane_data(lane, far) | {"x_off": seconds[0] / seconds[1]}
    return {"tokens": most, "same": track.same(), "lanes": lanes}


def screen(track: Track) -> None:
    """End the fixed choices that are not among the best so far."""
    fixed = [lane for lane in track.lanes if lane.name not in ("off", "auto")]
    fixed.sort(key=lambda lane: sum(mark.seconds for mark in lane.marks) / max(lane.tokens, 1))
    for lane in fixed[REMAINING:]:
        track.drop(lane)
        lane.is_over = True


def lane_data(lane: Lane, most: int) -> Data:
    """Of the first `most` tokens: seconds by part, and guesses a sequence and step."""
    rows = sum(mark.rows for mark in lane.marks)
    return {
        "seconds": np.diff(at_tokens(lane.marks, np.linspace(0, most, PARTS + 1))).tolist(),
        "tokens_a_step": sum(mark.tokens for mark in lane.marks) / max(rows, 1),
        "tokens": most,
        "guessed": sum(mark.guessed for mark in lane.marks),
        "kept": sum(mark.kept for mark in lane.marks),
        "rows": rows,
        "drafting": sum(m.draft_s for m in lane.marks) / sum(m.seconds for m in lane.marks),
    }


def at_tokens(marks: Sequence[Mark], tokens: np.ndarray) -> np.ndarray:
    """Seconds that had passed when so many tokens were there; steps are straight lines."""
    seconds = np.cumsum([0.0, *(mark.seconds for mark in marks)])
    return np.interp(tokens, np.cumsum([0, *(mark.tokens for mark in marks)]), seconds)


# ── tables ──────────────────────────────────────────────────────────────────────────────────


def regret_table(cells: Sequence[Data]) -> str:
    """For each cell the rates, the best fixed choice, and what auto lost against it."""
    rows = []
    for cell in cells:
        lanes = {name: np.array(lane["seconds"]) for name, lane in cell["lanes"].items()}
        whole = [n for n, lane in cell["lanes"].items() if lane["tokens"] == cell["tokens"]]
        best = min((n for n in whole if n != "auto"), key=lambda name: lanes[name].sum())
        low, high = interval(regrets(lanes["auto"], lanes[best]))
        lost = 1 - lanes[best].sum() / lanes["auto"].sum()
        first = 1 - lanes[best][:2].sum() / lanes["auto"][:2].sum()
        auto = cell["lanes"]["auto"]
        rows.append(
            [
                cell["streams"],
                cell["kind"],
                f"{cell['tokens'] / lanes['off'].sum():.1f}",
                f"{lanes['off'].sum() / lanes['auto'].sum():.2f}",
                f"{best}: {lanes['off'].sum() / lanes[best].sum():.2f}",
                f"{100 * lost:+.1f}% ({100 * low:+.1f} to {100 * high:+.1f})",
                f"{100 * first:+.0f}%",
                f"{auto['guessed'] / auto['rows']:.2f}, "
                f"{auto['kept'] / max(auto['guessed'], 1):.0%}",
                "yes" if cell["same"] else "NO",
            ]
        )
    columns = ["streams", "kind", "tok/s off", "x auto", "x best fixed", "regret", "first tenth"]
    return markdown([*columns, "guesses a step, kept", "same"], rows)


def regrets(auto: np.ndarray, best: np.ndarray) -> np.ndarray:
    """Regret of drawn twentieths of the run."""
    drawn = np.random.default_rng(0).integers(0, len(auto), (2000, len(auto)))
    return 1 - best[drawn].sum(axis=1) / auto[drawn].sum(axis=1)


def rates_table(cells: Sequence[Data]) -> str:
    """Times off of every choice, both over the tokens that it had."""
    names = list(dict.fromkeys(name for cell in cells for name in cell["lanes"]))
    rows = []
    for cell in cells:
        lanes = cell["lanes"]
        ratios = [f"{lanes[n]['x_off']:.2f}" if n in lanes else "–" for n in names[1:]]
        rows.append([cell["streams"], cell["kind"], *ratios])
    return markdown(["streams", "kind", *names[1:]], rows)


# ── a script ────────────────────────────────────────────────────────────────────────────────


def options_of(given: argparse.Namespace) -> dict[str, object]:
    """The engine, with room for all lanes at once."""
    drafting = {"draft_model": str(given.draft)} if given.draft else {}
    return drafting | {
        "speculative_method": "auto",
        "quantization": given.quantization,
        "max_model_len": 512,
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 2048,
        "kv_memory": given.kv_memory,
        "policy": "fcfs",
    }


def measure(given: argparse.Namespace, cells: dict[str, Data]) -> None:
    """Run what is missing, and keep each cell as soon as it is there."""
    llm = None
    for name in given.only:
        if name in cells or given.folder is None:
            continue
        _, streams, kind = name.split(":")
        llm = llm or LLM(given.folder, **options_of(given))
        cell = regret(llm, int(streams), kind, given) | {"streams": int(streams), "kind": kind}
        cells[name] = cell | {"name": name}
        say(name)
        if given.json:
            with given.json.open("a") as file:
                file.write(json.dumps(cells[name]) + "\n")


def read_cells(path: Path | None) -> dict[str, Data]:
    """By name what was measured before."""
    if path is None or not path.exists():
        return {}
    return {cell["name"]: cell for cell in map(json.loads, path.read_text().splitlines())}


def main() -> None:
    """Run the cells that are missing, and print the tables of all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [f"regret:{streams}:{kind}" for streams in STREAMS for kind in KINDS]
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--draft", type=Path, help="drafting model")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--kv-memory", default="3GiB")
    parser.add_argument("--text", type=Path, default=SHARED / "data" / "text" / "val.txt")
    parser.add_argument("--seconds", type=float, default=100.0, help="of each cell of regret")
    parser.add_argument("--fixed", type=int, nargs="+", default=FIXED)
    parser.add_argument("--choices", nargs="+", help="of the fixed ones, beside off and auto")
    parser.add_argument("--only", nargs="+", default=every, help="cells")
    parser.add_argument("--json", type=Path, help="one cell a line; those there are not run again")
    given = parser.parse_args()
    cells = read_cells(given.json)
    measure(given, cells)
    found = list(cells.values())
    print(regret_table(found), rates_table(found), sep="\n\n")


if __name__ == "__main__":
    main()

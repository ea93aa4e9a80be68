"""What long prompts cost the chats beside them: `python benchmarks/long_prompts.py FOLDER`.

Chats of about 150 tokens in and 80 out arrive at random (Poisson, 0.5 a second) at a server that
has nothing else to do, and at one that always has ten prompts of 8,000 tokens in flight: ten
workers send the next when the last was answered. The same chats come at the same times in both and
under each policy; each turn has a fresh server. Told are TTFT's percentiles and their ratio.

    python benchmarks/long_prompts.py FOLDER --flags "--quantization int8" --chats 200 \\
        --json long_prompts.json --plot docs/images/long_prompts.svg
"""

import argparse
from collections.abc import Sequence

import numpy as np

from common import markdown
from headway.core.slo import Slo
from headway.measure.chart import Panel
from judged import (
    Data,
    Row,
    client_line,
    common_options,
    interval,
    keep,
    ratio_of,
    resampled,
    row_of,
    run_script,
    say,
)
from served import (
    CHAT,
    Kind,
    Server,
    Stream,
    contender_options,
    contenders,
    conversations,
    drive,
    patience_s,
    poisson_times,
    warm_up,
)

LONG = Kind(name="long", share=1.0, prompt="8000", output="16", slo=Slo(ttft_s=600.0, tpot_s=0.12))
TURNS = ("alone", "beside")
GRACE_S = 0.3
TIMES = 2.0
"""What is asked: a p99 of at most twice, or 0.3 s more than, its value without long prompts."""


def measure(given: argparse.Namespace, data: Data) -> None:
    """Each server alone and beside long prompts, in blocks whose order turns round."""
    chat = CHAT.scaled(given.length_scale, given.slo_scale)
    long = LONG.scaled(given.length_scale, given.slo_scale)
    turns = [(server, turn) for server in contenders(given, (chat, long)) for turn in TURNS]
    for block in range(given.blocks):
        for server, turn in turns if block % 2 == 0 else turns[::-1]:
            one_turn(given, data, server, turn, block, chat, long)
            keep(given, data)


def one_turn(
    given: argparse.Namespace,
    data: Data,
    server: Server,
    turn: str,
    block: int,
    chat: Kind,
    long: Kind,
) -> None:
    """The chats of one block, alone or beside."""
    seed = 100 * given.seed + block + 1
    count = max(1, round(given.chats / given.blocks))
    begin_s = given.settle if turn == "beside" else 0.0
    times = poisson_times(given.rate, count, seed, begin_s)
    streams = [Stream(conversations=conversations([chat], times, seed))]
    if turn == "beside":
        talks = conversations([long], [0.0] * given.pool, seed)
        streams.append(Stream(conversations=talks, concurrency=given.in_flight))
    with server.running() as url:
        warm_up(url, [chat], given.warmup, seed=seed + 50)
        found = drive(url, streams, seed=seed, drain_s=given.drain or 10 * patience_s([chat]))
    label: Row = {"contender": server.name, "turn": turn, "block": block}
    slos = {chat.name: chat.slo, long.name: long.slo}
    rows = [label | row_of(x, slos[x.service_class]) for xs in found.exchanges for x in xs]
    data["rows"] += rows
    data["clients"].append(found.client)
    ttfts = [r["ttft_s"] for r in rows if r["kind"] == "chat" and r["ttft_s"] is not None]
    done = sum(r["kind"] == "long" and not r["error"] for r in rows)
    p99 = np.percentile(ttfts, 99) if ttfts else float("nan")
    say(f"{server.name} {turn}, block {block}: {len(ttfts)} of {count} chats, "
        f"TTFT p99 {p99:.3f} s, {done} long prompts answered")  # fmt: skip


def ttfts_of(data: Data, contender: str, turn: str) -> list[float]:
    """Seconds of each chat; one that was never answered waited until it was given up."""
    found = [
        (row["block"], row["scheduled_s"], row["ttft_s"])
        for row in data["rows"]
        if (row["contender"], row["turn"], row["kind"]) == (contender, turn, "chat")
    ]
    worst = max((ttft for _, _, ttft in found if ttft is not None), default=float("nan"))
    return [worst if ttft is None else ttft for _, _, ttft in sorted(found, key=lambda f: f[:2])]


def names_of(data: Data) -> list[str]:
    return list(dict.fromkeys(row["contender"] for row in data["rows"]))


def tables(data: Data) -> str:
    """TTFT without and beside long prompts, and the ratio of each percentile."""
    rows = []
    for name in names_of(data):
        alone, beside = (ttfts_of(data, name, turn) for turn in TURNS)
        if not alone or not beside:
            continue
        more_s = np.percentile(beside, 99) - np.percentile(alone, 99)
        ratio = np.percentile(beside, 99) / np.percentile(alone, 99)
        long = [r for r in data["rows"] if r["contender"] == name and r["kind"] == "long"]
        rows.append(
            [
                name,
                f"{len(alone)} and {len(beside)}",
                *(seconds_text(values) for values in (alone, beside)),
                ratio_text(alone, beside, 50),
                ratio_text(alone, beside, 99),
                f"{more_s * 1e3:+.0f} ms",
                "yes" if ratio <= TIMES or more_s <= GRACE_S else "no",
                sum(not r["error"] for r in long),
                failed(data, name),
            ]
        )
    columns = ["", "chats", "TTFT alone, p50 / p99", "beside", "p50 ratio", "p99 ratio"]
    columns += ["p99 more", "≤ 2x or + 300 ms", "8k prompts answered", "chats failed"]
    return f"{markdown(columns, rows)}\n\n{client_line(data['clients'])}"


def failed(data: Data, name: str) -> int:
    return sum(
        r["contender"] == name and r["kind"] == "chat" and bool(r["error"]) for r in data["rows"]
    )


def seconds_text(values: Sequence[float]) -> str:
    middle, late = np.percentile(values, [50, 99])
    return f"{middle:.2f} / {late:.2f} s"


def ratio_text(alone: Sequence[float], beside: Sequence[float], p: int) -> str:
    """1.4 (1.2 to 1.7): 95% of bootstrapped ratios."""
    top, bottom = (np.percentile(resampled(v), p, axis=1) for v in (beside, alone))
    low, high = interval(ratio_of(top, bottom))
    whole = np.percentile(beside, p) / np.percentile(alone, p)
    return f"{whole:.2f} ({low:.2f} to {high:.2f})"


def panels(data: Data) -> list[Panel]:
    """The share of chats whose first token came within a time."""
    made = []
    for turn, title in zip(TURNS, ("Chats alone", "Beside ten long prompts"), strict=True):
        lines = {}
        for name in names_of(data):
            values = sorted(ttfts_of(data, name, turn))
            lines[name] = [(s, 100 * (i + 1) / len(values)) for i, s in enumerate(values)]
        made.append(Panel(title=title, x="TTFT, s", y="% of chats within", lines=lines, log_x=True))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_options(parser)
    parser.add_argument("--rate", type=float, default=0.5, help="chats a second")
    parser.add_argument("--chats", type=int, default=200, help="of each turn, over all blocks")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--in-flight", type=int, default=10, help="long prompts at once")
    parser.add_argument("--pool", type=int, default=400, help="long prompts unlike each other")
    parser.add_argument("--settle", type=float, default=10.0, help="long ones alone before chats")
    parser.add_argument("--drain", type=float, help="seconds the last chats may take")
    contender_options(parser)
    run_script(parser.parse_args(), measure, tables, panels)


if __name__ == "__main__":
    main()

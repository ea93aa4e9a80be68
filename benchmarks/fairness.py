"""Who gets what when one user asks for too much: `python benchmarks/fairness.py [FOLDER]`.

Nine users send at one rate each, a tenth twenty times as much, so that together they want `--load`
times what the server can do (measured under the first policy with a queue that is never empty).
Each of the nine is also alone on the server with the very same requests, for the first
`--solo-seconds` of them: its solo goodput. Every user has a key of its own. Then all users of
`--weights` have more waiting than the server takes, for 300 s, and the tokens each was served,
prompt and answer, are set beside its weight, which its service class has; they are counted after
the first tenth of the time.

    python benchmarks/fairness.py --json fairness.json

The default is the embedded model, so that two cores serve enough requests to count.
"""

import argparse
import hashlib
import json
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from common import markdown
from headway.bench.timeline import tokens_in
from headway.measure.record import Exchange
from judged import (
    Data,
    Row,
    client_line,
    common_options,
    interval,
    keep,
    resampled,
    row_of,
    run_script,
    say,
    share_text,
    yes,
)
from served import (
    CHAT,
    Kind,
    Stream,
    contender_flags,
    contender_options,
    conversations,
    drive,
    headway,
    patience_s,
    poisson_times,
    warm_up,
)

HEAVY = 20.0
ASKED_SHARE, ASKED_BAND = 0.95, 0.05
POOL = 2000
STEP_S = 1.0
"""How fine the tokens served are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A key and the weight of its class."""

    name: str
    key: str
    weight: float = 1.0

    @property
    def service_class(self) -> str:
        return f"weight-{self.weight:g}"


def users_of(weights: Sequence[float]) -> list[User]:
    return [
        User(name=f"user {i}", key=f"hw-{secrets.token_urlsafe(32)}", weight=weight)
        for i, weight in enumerate(weights, 1)
    ]


@contextmanager
def key_flags(users: Sequence[User], chat: Kind) -> Iterator[str]:
    """The flags that tell a server its users: a key file, and the classes with their weights."""
    with tempfile.TemporaryDirectory() as folder:
        keys = [
            {
                "name": user.name,
                "sha256": hashlib.sha256(user.key.encode()).hexdigest(),
                "class": user.service_class,
            }
            for user in users
        ]
        classes = {u.service_class: {"slo": str(chat.slo), "weight": u.weight} for u in users}
        files = {"keys": {"keys": keys}, "classes": classes}
        for name, content in files.items():  # JSON is YAML too
            Path(folder, f"{name}.yaml").write_text(json.dumps(content))
        yield f"--key-file {folder}/keys.yaml --classes {folder}/classes.yaml"


# ── the turns ───────────────────────────────────────────────────────────────────────────────


def measure(given: argparse.Namespace, data: Data) -> None:
    """Each policy: the capacity, solo and beside the heavy user, and the shares."""
    data["shares"], data["rates"] = [], {}
    chat = CHAT.scaled(given.length_scale, given.slo_scale)
    for name, own in contender_flags(given):
        for part in (crowd, backlog):
            if part.__name__ in given.parts:
                part(given, data, name, own, chat)
                keep(given, data)


def crowd(given: argparse.Namespace, data: Data, name: str, own: str, chat: Kind) -> None:
    """One heavy user and `--light` others, and each of the others alone."""
    users = users_of([1.0] * (given.light + 1))
    heavy, light = users[0], users[1:]
    with key_flags(users, chat) as flags:
        server = headway(name, given.folder, f"{given.flags} {flags} {own}")
        with server.running() as url:
            warm_up(url, [chat], given.warmup, seed=given.seed + 1, api_key=heavy.key)
            capacity = given.capacity or requests_per_s(given, url, heavy, chat)
            given.capacity = capacity  # the next policies get the same load
            rate = given.load * capacity / (HEAVY + given.light)
            data["rates"][name] = {"capacity": capacity, "rate": rate}
            say(f"{name}: {capacity:.1f} requests/s at most, {rate:.2f}/s of each, {HEAVY:g}x one")
            for number, user in enumerate(light, 1):
                alone = [stream_of(given, user, chat, rate, number, given.solo_seconds)]
                taken(given, data, url, alone, [user], chat, {"policy": name, "turn": "solo"})
            streams = [
                stream_of(given, user, chat, rate * (HEAVY if user is heavy else 1), number)
                for number, user in enumerate(users)
            ]
            taken(given, data, url, streams, users, chat, {"policy": name, "turn": "beside"})


def requests_per_s(given: argparse.Namespace, url: str, user: User, chat: Kind) -> float:
    """What the server does with a queue that is never empty."""
    talks = conversations([replace(chat, name="default")], [0.0] * POOL, given.seed + 2)
    stream = Stream(conversations=talks, api_key=user.key, concurrency=given.concurrency)
    seconds = given.capacity_seconds
    found = drive(url, [stream], seed=given.seed + 2, seconds=seconds)
    ends = [x.ended_s for x in found.exchanges[0] if x.ok and x.ended_s is not None]
    return sum(seconds / 4 <= end_s <= seconds for end_s in ends) / (seconds * 3 / 4)


def stream_of(
    given: argparse.Namespace,
    user: User,
    chat: Kind,
    rate: float,
    number: int,
    seconds: float | None = None,
) -> Stream:
    """A user's requests; the same ones whether it is alone or not."""
    seed = given.seed + 100 + number
    count = max(1, round(rate * given.seconds))
    times = [t for t in poisson_times(rate, count, seed) if t <= (seconds or given.seconds)]
    talks = conversations([replace(chat, name="default")], times, seed)
    return Stream(conversations=talks, api_key=user.key)


def taken(
    given: argparse.Namespace,
    data: Data,
    url: str,
    streams: Sequence[Stream],
    users: Sequence[User],
    chat: Kind,
    label: Row,
) -> None:
    """Drive the streams and keep a row a request."""
    seed = given.seed + (7 if label["turn"] == "solo" else 8)
    found = drive(url, streams, seed=seed, drain_s=patience_s([chat]))
    for user, exchanges in zip(users, found.exchanges, strict=True):
        mine = label | {"user": user.name}
        data["rows"] += [mine | row_of(x, chat.slo) for x in exchanges]
    data["clients"].append(found.client)


def backlog(given: argparse.Namespace, data: Data, name: str, own: str, chat: Kind) -> None:
    """All users have `--concurrency` requests waiting or running, all the time."""
    users = users_of(given.weights)
    talks = [
        conversations([replace(chat, name="default")], [0.0] * POOL, given.seed + 300 + i)
        for i in range(len(users))
    ]
    streams = [
        Stream(conversations=mine, api_key=user.key, concurrency=given.concurrency)
        for user, mine in zip(users, talks, strict=True)
    ]
    with key_flags(users, chat) as flags:
        few = f"--max-num-seqs {given.max_num_seqs}"
        server = headway(name, given.folder, f"{given.flags} {flags} {own} {few}")
        with server.running() as url:
            warm_up(url, [chat], given.warmup, seed=given.seed + 1, api_key=users[0].key)
            seconds = given.share_seconds
            found = drive(url, streams, seed=given.seed + 9, seconds=seconds)
    data["clients"].append(found.client)
    for user, exchanges in zip(users, found.exchanges, strict=True):
        answered = [x for x in exchanges if x.ok]
        data["shares"].append(
            {
                "policy": name,
                "user": user.name,
                "weight": user.weight,
                "answered": len(answered),
                "refused": sum(x.status in (429, 503) for x in exchanges),
                "request_tokens": max((x.num_prompt + x.num_output for x in answered), default=0),
                "tokens": tokens_by_step(exchanges, seconds),
            }
        )


def tokens_by_step(exchanges: Sequence[Exchange], seconds: float) -> list[float]:
    """Tokens served in each second: the prompt with the first token, and those of the answer."""
    edges = np.arange(0.0, seconds, STEP_S)
    served = [x for x in exchanges if x.chunk_s]
    prompts, _ = np.histogram(
        [x.chunk_s[0] for x in served],
        [*edges, seconds],
        weights=[float(x.num_prompt) for x in served],
    )
    answers = [sum(tokens_in(x, a, a + STEP_S - 1e-9) for x in served) for a in edges]
    return [round(float(p + a), 1) for p, a in zip(prompts, answers, strict=True)]


# ── what it means ───────────────────────────────────────────────────────────────────────────


def met_of(data: Data, policy: str, turn: str, user: str) -> list[float]:
    return [
        float(row["met"])
        for row in data["rows"]
        if (row["policy"], row["turn"], row["user"]) == (policy, turn, user)
    ]


def tables(data: Data) -> str:
    """The nine beside the heavy one, then the shares."""
    parts = []
    if data["rates"]:
        parts.append(crowd_table(data))
    if data["shares"]:
        parts.append(share_table(data))
    return "\n\n".join([*parts, client_line(data["clients"])])


def crowd_table(data: Data) -> str:
    """A line a policy: the nine together, the worst of them, and the heavy one."""
    rows = []
    for policy, rates in data["rates"].items():
        users = list(dict.fromkeys(r["user"] for r in data["rows"] if r["policy"] == policy))
        light = [user for user in users if met_of(data, policy, "solo", user)]
        heavy = next(user for user in users if user not in light)
        solo = [m for user in light for m in met_of(data, policy, "solo", user)]
        beside = [m for user in light for m in met_of(data, policy, "beside", user)]
        each = {user: kept_of(data, policy, user) for user in light}
        worst = min(each, key=lambda user: each[user])
        whole = np.mean(beside) / np.mean(solo) if sum(solo) else float("nan")
        rows.append(
            [
                policy,
                f"{rates['rate']:.2f}",
                share_text(solo),
                share_text(beside),
                f"{whole:.1%}",
                f"{each[worst]:.1%} ({worst})",
                yes(bool(whole >= ASKED_SHARE)),
                share_text(met_of(data, policy, "beside", heavy)),
            ]
        )
    columns = ["", "requests/s of each", "good, alone", "good, beside", "of solo goodput"]
    columns += ["the worst of them", "≥ 95%", "the heavy user's good"]
    return markdown(columns, rows)


def kept_of(data: Data, policy: str, user: str) -> float:
    """Goodput beside the heavy user over goodput alone: both offered the same a second."""
    solo = met_of(data, policy, "solo", user)
    beside = met_of(data, policy, "beside", user)
    return float(np.mean(beside) / np.mean(solo)) if sum(solo) and beside else float("nan")


def share_table(data: Data) -> str:
    """A line a policy and user: tokens served beside those its weight stands for."""
    rows = []
    for policy in dict.fromkeys(share["policy"] for share in data["shares"]):
        mine = [share for share in data["shares"] if share["policy"] == policy]
        series = np.array([counted(share) for share in mine])
        total, weights = series.sum(), sum(share["weight"] for share in mine)
        for share, tokens in zip(mine, series, strict=True):
            due = total * share["weight"] / weights
            samples = resampled(tokens).mean(axis=1) * len(tokens) / due
            low, high = interval(samples)
            off = abs(tokens.sum() - due)
            kept = off <= max(ASKED_BAND * due, 2 * share["request_tokens"])
            rows.append(
                [
                    policy,
                    share["user"],
                    f"{share['weight']:g}",
                    share["answered"],
                    share["refused"],
                    f"{tokens.sum():,.0f}",
                    f"{tokens.sum() / total:.1%}",
                    f"{share['weight'] / weights:.1%}",
                    f"{tokens.sum() / due:.3f} ({low:.3f} to {high:.3f})",
                    yes(bool(kept)),
                ]
            )
    columns = ["", "", "weight", "answered", "refused", "tokens", "share", "due"]
    columns += ["share / due", "within 5% or two requests"]
    return markdown(columns, rows)


def counted(share: Row) -> list[float]:
    """Tokens by second without the first tenth of the time."""
    tokens: list[float] = share["tokens"]
    return tokens[len(tokens) // 10 :]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_options(parser, folder="headway-tiny")
    parser.add_argument("--parts", type=lambda t: t.split(","), default=["crowd", "backlog"])
    parser.add_argument("--light", type=int, default=9, help="users beside the heavy one")
    parser.add_argument("--load", type=float, default=1.8, help="of what the server can do")
    parser.add_argument("--seconds", type=float, default=120.0, help="with the heavy user")
    parser.add_argument("--solo-seconds", type=float, default=40.0, help="of each of the nine")
    parser.add_argument("--capacity", type=float, help="requests a second; else it is measured")
    parser.add_argument("--capacity-seconds", type=float, default=20.0)
    parser.add_argument(
        "--weights", type=lambda t: [float(w) for w in t.split(",")], default=[1.0, 1.0, 2.0, 4.0]
    )
    parser.add_argument("--share-seconds", type=float, default=300.0)
    parser.add_argument("--concurrency", type=int, default=32, help="of each backlogged user")
    parser.add_argument("--max-num-seqs", type=int, default=8, help="rows they compete for")
    contender_options(parser, peers=False)
    run_script(parser.parse_args(), measure, tables)


if __name__ == "__main__":
    main()

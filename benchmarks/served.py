"""Servers, mixes of requests and loads for the benchmarks that need a running server.

A script starts a `Server`, ours or a peer's, and drives it with `Stream`s of the project's own load
generator, which runs in the script's process and goes before the servers on the machine's cores.
What is made of the exchanges is `judged`'s.
"""

import argparse
import asyncio
import math
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np

from common import START_S, free_port, serve_command, stop, wait_until_ready
from headway.bench.lengths import parse_length
from headway.bench.load import LoadGenerator, LoopMonitor, quiet_gc
from headway.bench.percentiles import distribution
from headway.bench.probe import ProbeSpec, find_dialect
from headway.bench.prompts import GeneratedPiece
from headway.bench.talk import PATHS
from headway.bench.workload import Conversation, Turn
from headway.core.clock import SystemClock
from headway.core.slo import DEFAULT_CLASS, Slo
from headway.measure.client import Client, model_name, open_session
from headway.measure.record import ClientCost, Exchange

SERVER_NICE = 5
"""Servers give way to the load generator, which needs little and must not be late."""
POLICIES = ("fcfs", "fair", "slo")


# ── servers ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server by name: a command with {port} in it, or the URL of one that runs already."""

    name: str
    command: str = ""
    url: str = ""

    @contextmanager
    def running(self) -> Iterator[str]:
        """The URL of the server, ready; it is stopped afterwards."""
        if self.url:
            yield self.url
            return
        port = free_port()
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                ["nice", "-n", str(SERVER_NICE), *shlex.split(self.command.format(port=port))],
                stdout=log,
                stderr=log,
            )
            url = f"http://127.0.0.1:{port}"
            try:
                wait_until_ready(url, process)
                yield url
            except ChildProcessError as error:
                log.seek(0)
                raise SystemExit(f"{self.name}: {error}\n{log.read()[-2000:].decode()}") from None
            finally:
                stop(process)


def headway(name: str, folder: str, flags: str) -> Server:
    """`headway serve` for a folder with more flags."""
    serve = shlex.join(serve_command(folder))
    return Server(name=name, command=f"{serve} --port {{port}} {flags}")


def named(text: str) -> tuple[str, str]:
    """NAME=REST, as --contender and --peer are written."""
    name, equals, rest = text.partition("=")
    if not name or not equals:
        raise SystemExit(f"{text!r}: write NAME=FLAGS or NAME=COMMAND.")
    return name, rest


def peer(text: str) -> Server:
    """A --peer: NAME=http://… or NAME=COMMAND with {port}."""
    name, rest = named(text)
    if rest.startswith("http"):
        return Server(name=name, url=rest.rstrip("/").removesuffix("/v1"))
    if "{port}" not in rest:
        raise SystemExit(f"--peer {name}: the command has no {{port}}.")
    return Server(name=name, command=rest)


def contender_options(parser: argparse.ArgumentParser, peers: bool = True) -> None:
    """Which servers take turns."""
    parser.add_argument(
        "--policies", type=names, default=list(POLICIES), help="slo+shed: with --late shed"
    )
    parser.add_argument(
        "--contender", action="append", default=[], help="NAME=FLAGS, instead of --policies"
    )
    if peers:
        parser.add_argument("--peer", action="append", default=[], help="NAME=URL or NAME=COMMAND")


def names(text: str) -> list[str]:
    return text.split(",")


def contender_flags(given: argparse.Namespace) -> list[tuple[str, str]]:
    """Name and flags of each server of ours: slo+shed is --policy slo --late shed."""
    pairs = [named(text) for text in given.contender]
    return pairs or [(name, policy_flags(*name.split("+"))) for name in given.policies]


def policy_flags(policy: str, late: str = "serve") -> str:
    return f"--policy {policy} --late {late}"


def contenders(given: argparse.Namespace, mix: Sequence["Kind"], told: str = "") -> list[Server]:
    """Our server under each policy, told what each kind was promised, and the peers."""
    flags = f"{given.flags} {told or objectives(mix)}"
    ours = [headway(name, given.folder, f"{flags} {own}") for name, own in contender_flags(given)]
    return ours + [peer(text) for text in given.peer]


# ── requests ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of request: its share, its lengths, and what it was promised."""

    name: str
    share: float
    prompt: str
    output: str
    slo: Slo
    prefix: int = 0

    def scaled(self, lengths: float, times: float) -> "Kind":
        """Lengths and objectives multiplied: a smaller context, a slower machine."""
        slo = Slo(ttft_s=(self.slo.ttft_s or 0) * times, tpot_s=(self.slo.tpot_s or 0) * times)
        return replace(
            self,
            prompt=scaled_length(self.prompt, lengths),
            output=scaled_length(self.output, lengths),
            prefix=round(self.prefix * lengths),
            slo=slo,
        )


CHAT = Kind(
    name="chat",
    share=0.8,
    prompt="uniform:100-200",
    output="uniform:60-100",
    slo=Slo(ttft_s=1.5, tpot_s=0.12),
)
MIX = (
    CHAT,
    replace(CHAT, name="shared", share=0.15, prefix=1500),
    replace(CHAT, name="long", share=0.05, prompt="4000", slo=Slo(ttft_s=10.0, tpot_s=0.12)),
)
"""A fifth of all requests holds two thirds of the tokens, a twentieth more than half."""


def scaled_length(text: str, factor: float) -> str:
    """uniform:100-200 by 0.25 → uniform:25-50; at least 2 tokens."""
    kind, colon, numbers = text.rpartition(":")
    return kind + colon + "-".join(str(max(2, round(int(n) * factor))) for n in numbers.split("-"))


def conversations(mix: Sequence[Kind], times: Sequence[float], seed: int) -> list[Conversation]:
    """One request at each time: kinds in exact proportion, their order and lengths drawn."""
    rng = np.random.default_rng(seed)
    shares = np.cumsum([0.0, *(kind.share for kind in mix)])
    counts = np.diff(np.round(shares / shares[-1] * len(times)))
    kinds = rng.permutation(np.repeat(np.arange(len(mix)), counts.astype(int)))
    made = []
    for i, (at_s, k) in enumerate(zip(times, kinds, strict=True)):
        kind = mix[k]
        prefix = (GeneratedPiece(f"prefix of {kind.name}", kind.prefix),) if kind.prefix else ()
        prompt = GeneratedPiece(
            f"{kind.name} {i}", int(parse_length(kind.prompt, "prompt").draw(rng, 1)[0])
        )
        turn = Turn(
            system=prefix,
            prompt=(prompt,),
            output_tokens=int(parse_length(kind.output, "output").draw(rng, 1)[0]),
        )
        made.append(Conversation(at_s=float(at_s), service_class=kind.name, turns=(turn,)))
    return made


def poisson_times(rate: float, count: int, seed: int, from_s: float = 0.0) -> list[float]:
    """`count` arrivals of a Poisson process, in seconds."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return [from_s + float(at_s) for at_s in np.cumsum(gaps)]


def objectives(mix: Sequence[Kind]) -> str:
    """The server's flags that tell it what each kind was promised."""
    return " ".join(f"--slo {kind.name}:{kind.slo}" for kind in mix)


def patience_s(mix: Sequence[Kind]) -> float:
    """How long after the last request an answer may still meet its objectives, and 5 s."""
    most = [int(kind.output.rpartition(":")[2].split("-")[-1]) for kind in mix]
    bounds = [(k.slo.ttft_s or 0) + (k.slo.tpot_s or 0) * n for k, n in zip(mix, most)]
    return max(bounds) + 5


# ── load ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Requests of one user: at their own times, or, with `concurrency`, so many at once."""

    conversations: list[Conversation]
    api_key: str = ""
    concurrency: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Driven:
    """The exchanges of each stream, and what they cost the load generator."""

    exchanges: list[list[Exchange]]
    client: dict[str, float]


def drive(
    url: str,
    streams: Sequence[Stream],
    *,
    seed: int,
    seconds: float | None = None,
    drain_s: float | None = None,
) -> Driven:
    """Put all streams on at once. Closed ones end with the open ones, or after `seconds`."""
    return asyncio.run(driven(url, streams, seed, seconds, drain_s))


async def driven(
    url: str, streams: Sequence[Stream], seed: int, seconds: float | None, drain_s: float | None
) -> Driven:
    clock = RunClock()
    async with AsyncExitStack() as stack:
        loads = []
        for stream in streams:
            session = await stack.enter_async_context(open_session(stream.api_key))
            client = Client(session, url + PATHS["completions"], clock.now_s, START_S)
            model = await model_name(session, url)
            load = LoadGenerator(client, await find_dialect(client, wanted(stream, model, seed)))
            if stream.concurrency is None:
                load.write_ahead(stream.conversations)
            loads.append(load)
        with quiet_gc():
            clock.start()
            async with LoopMonitor(clock) as pulse:
                await put_on(loads, streams, seconds, drain_s)
                cost = pulse.cost()
    exchanges = [load.exchanges for load in loads]
    return Driven(exchanges=exchanges, client=cost_of(cost, exchanges))


class RunClock(SystemClock):
    """Seconds since `start` was called."""

    def __init__(self) -> None:
        super().__init__()
        self._began_s = 0.0

    def start(self) -> None:
        self._began_s = super().now_s()

    def now_s(self) -> float:
        return super().now_s() - self._began_s


def wanted(stream: Stream, model: str, seed: int) -> ProbeSpec:
    """Prompts as ids where the server takes them, and the kind's name where there are kinds."""
    kinds = dict.fromkeys(talk.service_class for talk in stream.conversations)
    return ProbeSpec(
        endpoint="completions",
        model=model,
        prompt_format="auto",
        needs_text=False,
        seed=seed,
        vocabulary=0,
        ignore_eos=True,
        temperature=0.0,
        service_classes=tuple(name for name in kinds if name != DEFAULT_CLASS),
    )


def cost_of(cost: ClientCost, exchanges: Sequence[Sequence[Exchange]]) -> dict[str, float]:
    """Whether the load generator was late or short of a core."""
    lags = distribution(
        x.sent_s - x.scheduled_s for xs in exchanges for x in xs if x.sent_s is not None
    )
    late = distribution(cost.late_s)
    return {
        "cpu_share": cost.cpu_s / max(cost.wall_s, 1e-9),
        "lag_p99_s": lags.p99 if lags else 0.0,
        "loop_late_p99_s": late.p99 if late else 0.0,
    }


async def put_on(
    loads: Sequence[LoadGenerator],
    streams: Sequence[Stream],
    seconds: float | None,
    drain_s: float | None,
) -> None:
    """Open streams to their ends, closed ones beside them."""
    endless = [
        asyncio.create_task(load.closed_loop(s.conversations, s.concurrency, math.inf))
        for load, s in zip(loads, streams, strict=True)
        if s.concurrency is not None
    ]
    ending = [
        load.open_loop(s.conversations, drain_s)
        for load, s in zip(loads, streams, strict=True)
        if s.concurrency is None
    ]
    if ending:
        await asyncio.gather(*ending)
    else:
        await asyncio.sleep(seconds or 0.0)
    for task in endless:
        task.cancel()
    await asyncio.gather(*endless, return_exceptions=True)


def warm_up(url: str, mix: Sequence[Kind], seconds: float, *, seed: int, api_key: str = "") -> None:
    """Four requests at a time of the mix for so long, their prompts unlike all that follow."""
    talks = conversations(mix, [0.0] * 400, seed)
    stream = Stream(conversations=talks, concurrency=4, api_key=api_key)
    drive(url, [stream], seed=seed, seconds=seconds)

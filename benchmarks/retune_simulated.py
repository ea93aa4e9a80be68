"""`--retune` on a virtual clock: the traffic changes its mix three times, and settings follow.

    python benchmarks/retune_simulated.py [--minutes 10] [--seed 7] [--steady] [--json FILE]

A server of 64 rows whose step takes 20 ms, 3 ms a token and 10% more or less by chance (about
Qwen2.5-0.5B in int8 on two cores without VNNI): its own engine, scheduler and admission, and the
controller, the questions and the simulations of `--retune` as they run beside a server; only the
clock is virtual. The same requests come to each fixed setting of a grid. Told is, by phase, the
share of requests in their objectives from five minutes after the change: the best fixed one, the
one that is best over all, what the server starts with, and `--retune`. `--steady` lasts the first
phase for all of the time: what is changed where nothing changes.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np

from common import markdown
from headway.advise.retune.controller import Controller
from headway.advise.retune.question import Answer, Question
from headway.advise.retune.trial import answer
from headway.advise.simulate.front import NO_FRONT
from headway.advise.simulate.loop import Clients, World
from headway.advise.simulate.replica import Replica, Served, Stepped
from headway.advise.simulate.truth import Reach
from headway.advise.what_if.compare import missed
from headway.bench.latency import latency
from headway.bench.prompts import IdWriter, Made
from headway.bench.workload import Conversation, Turn
from headway.core.cache_config import CacheConfig
from headway.core.embedded import model_folder
from headway.core.live_settings import Changes, with_changes
from headway.core.model_spec import read_model_spec
from headway.core.plan import Description
from headway.core.resolve import Settings
from headway.core.scheduler_config import SchedulerConfig
from headway.core.service import Alone, service_classes
from headway.engine.cost import Work
from headway.engine.live import change_settings
from headway.measure.record import Exchange
from headway.telemetry.calibration import Calibration, HostCost, columns, fingerprint
from headway.telemetry.lately import Judged
from headway.telemetry.records import StepRecord
from headway.telemetry.traffic import Followed, Origin, Stretch

STEP_S, TOKEN_S, ATTENDED_S, NOISE = 0.020, 3.0e-3, 0.7e-6, 0.1
TICK_S, ANSWERED_AFTER_S, STEPS_S = 5.0, 10.0, 300.0
AFTER_S = 300.0
"""From a change to what is told."""
SLOS = [
    "talk:ttft=2s,tpot=60ms",
    "draft:ttft=4s,tpot=230ms",
    "search:ttft=1500ms,tpot=400ms",
]


@dataclass(frozen=True)
class Kind:
    """Requests of one class: how many a second, and the medians of their lengths."""

    name: str
    per_s: float
    prompt: int
    answer: int


PHASES = (
    (Kind("talk", 2.6, 40, 60),),
    (Kind("draft", 1.5, 60, 160),),
    (Kind("search", 1.2, 150, 16), Kind("talk", 0.5, 40, 40)),
    (Kind("talk", 2.2, 60, 70), Kind("draft", 0.1, 60, 120)),
)


class Steps:
    """The seconds of that machine."""

    label = "formula"

    def __init__(self, seed: int) -> None:
        self.reach = Reach((sys.maxsize,) * 4)
        self._rng = np.random.default_rng(seed)

    def seconds(self, work: Work) -> float:
        tokens, _, attended, _ = work
        if not tokens:
            return 1e-4
        plain_s = STEP_S + TOKEN_S * tokens + ATTENDED_S * attended
        return plain_s * float(self._rng.lognormal(0.0, NOISE))


def served(rows: int = 64) -> Served:
    """The server as it starts."""
    spec = replace(read_model_spec(model_folder(None)), eos_token_ids=())
    settings = Settings(
        device="none",
        dtype="float32",
        load_format="dummy",
        attention_backend="none",
        max_model_len=4096,
        max_num_seqs=rows,
        max_num_batched_tokens=512,
        cache=CacheConfig(num_blocks=(10_000,), dtype="float32"),
        threads=1,
        seed=0,
        scheduler=SchedulerConfig(),
    )
    return Served(
        spec=spec,
        settings=settings,
        description=Description(device="cpu"),
        classes=service_classes(SLOS),
    )


def traffic(phases: tuple[tuple[Kind, ...], ...], seconds: float, seed: int) -> list[Conversation]:
    """Poisson arrivals of each kind, lognormal lengths, each phase so long."""
    rng, found = np.random.default_rng(seed), []
    for number, kinds in enumerate(phases):
        for kind in kinds:
            at_s = number * seconds
            while (at_s := at_s + float(rng.exponential(1 / kind.per_s))) < (number + 1) * seconds:
                prompt, length = (
                    max(int(middle * rng.lognormal(0, 0.4)), 4)
                    for middle in (kind.prompt, kind.answer)
                )
                turn = Turn(prompt=(Made(f"{at_s:.6f}", prompt),), output_tokens=length)
                found.append(Conversation(at_s=at_s, turns=(turn,), service_class=kind.name))
    return sorted(found, key=lambda talk: talk.at_s)


class VirtualServer(World):
    """A simulated server that a controller sees and changes, as `LiveSight` does a real one."""

    def __init__(self, wanted: Served, truth: Steps, *, retunes: bool, cpu_s=lambda: 0.0) -> None:
        self.replica = Replica(wanted, truth)
        super().__init__([self.replica], NO_FRONT, IdWriter(0), Clients(), seed=1)
        self.records: list[StepRecord] = []
        self.time_s = 0.0
        self._known: dict[int, Judged] = {}
        self._cpu_s = cpu_s
        self.controller = Controller(self, wanted.settings) if retunes else None
        self.until_s = 0.0

    def run(self, conversations: list[Conversation]) -> list[Exchange]:
        self.until_s = conversations[-1].at_s
        if self.controller is not None:
            self.at(TICK_S, self._tick, TICK_S)
        return super().run(conversations)

    def _ended(self, replica: Replica, stepped: Stepped) -> None:
        if stepped.record is not None:
            self.records.append(stepped.record)
        super()._ended(replica, stepped)

    # ── who looks ───────────────────────────────────────────────────────────────────────────

    def _tick(self, now_s: float) -> None:
        self.time_s = now_s
        assert self.controller is not None
        asked = self.controller.tick()
        if asked is not None:
            at_s = now_s + ANSWERED_AFTER_S
            self.at(at_s, self._take, at_s, self.answered(asked))
        if now_s + TICK_S < self.until_s:
            self.at(now_s + TICK_S, self._tick, now_s + TICK_S)

    def answered(self, asked: Question) -> Answer:
        """What the process beside the server says; a test plants other answers."""
        return answer(asked, self._cpu_s)

    def _take(self, now_s: float, found: Answer) -> None:
        self.time_s = now_s
        assert self.controller is not None
        self.controller.take(found)

    # ── what it sees ────────────────────────────────────────────────────────────────────────

    def now_s(self) -> float:
        return self.time_s

    def settings(self) -> Settings:
        return self.door.served.settings

    def since(self, since_s: float) -> list[Exchange]:
        """The requests that have come since then."""
        found = []
        for x in reversed(self.exchanges):
            if x.scheduled_s < since_s:
                break
            found.append(x)
        return found[::-1]

    def judged(self, since_s: float) -> list[Judged]:
        return [each for x in self.since(since_s) if (each := self.judge(x)) is not None]

    def judge(self, x: Exchange) -> Judged | None:
        """What is known of it by now."""
        if x.id in self._known:
            return self._known[x.id]
        if x.ended_s is None or x.ended_s > self.time_s:
            terms = self.door.class_of(x.service_class).objectives(x.asked_prompt_tokens)
            waits_s = self.time_s - x.scheduled_s
            late = not x.chunk_s and terms.missed(waits_s, None, None, waits_s)
            return Judged(x.scheduled_s, False, x.service_class) if late else None
        times = latency(x)
        self._known[x.id] = found = Judged(
            x.scheduled_s,
            not missed(x, self.door.classes),
            x.service_class,
            x.asked_prompt_tokens if times else 0,
            x.output_tokens or 0,
            times.ttft_s if times else None,
            times.tpot_s if times else None,
        )
        return found

    def calibration(self) -> Calibration:
        settings = self.settings()
        began_s = self.replica.started_s + self.time_s - STEPS_S
        return Calibration(
            headway="1",
            model="virtual",
            fingerprint=fingerprint(self.door.served.spec),
            description=self.door.served.description,
            settings=settings.told(),
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            block_size=settings.cache.block_size,
            group_blocks=[count - 1 for count in settings.cache.num_blocks],
            vocab_size=self.door.served.spec.vocab_size,
            alone=Alone(),
            steps=columns([r for r in self.records[-8192:] if r.started_s >= began_s]),
            host=HostCost(in_s=0.0, out_s=0.0, door_s=0.0),
            origin=Origin(spec=self.door.served.spec, settings=settings, classes=self.door.classes),
        )

    def stretch(self, since_s: float) -> Stretch:
        found = [self.follow(x, since_s) for x in self.exchanges if self.lasted(x, since_s)]
        return Stretch(
            requests=found,
            from_s=0.0,
            until_s=self.time_s - since_s,
            clock_s=self.replica.started_s + since_s,
        )

    def lasted(self, x: Exchange, since_s: float) -> bool:
        """Whether it had come by now, and was not over then."""
        return x.scheduled_s < self.time_s and (x.ended_s is None or x.ended_s > since_s)

    def follow(self, x: Exchange, since_s: float) -> Followed:
        """What became of it by now."""
        chunks = zip(x.chunk_s, x.chunk_tokens or (), strict=True)
        told = [(at_s, count) for at_s, count in chunks if at_s <= self.time_s]
        is_over = x.ended_s is not None and x.ended_s <= self.time_s
        count, age_s = sum(count for _, count in told), self.time_s - x.scheduled_s
        ttft_s = told[0][0] - x.scheduled_s if told else None
        tpot_s = (told[-1][0] - told[0][0]) / (count - 1) if count > 1 else None
        slo = self.door.class_of(x.service_class).objectives(x.asked_prompt_tokens)
        known = self.judge(x)
        return Followed(
            at_s=x.scheduled_s - since_s,
            prompt=x.asked_prompt_tokens,
            cached=0,
            answer=count or None,
            service_class=x.service_class,
            ttft_s=ttft_s,
            took_s=x.ended_s - x.scheduled_s if is_over else None,
            met=known.met if known else not slo.missed(ttft_s or age_s, tpot_s, None, age_s),
        )

    def change(self, changes: Changes) -> None:
        change_settings(self.replica.engine, changes)
        settings = with_changes(self.settings(), changes, self.replica.engine.started_with)
        self.door.served = replace(self.door.served, settings=settings)
        self.door.admission.follow(settings.scheduler)


# ── the comparison ──────────────────────────────────────────────────────────────────────────


def shares(server: VirtualServer, found: list[Exchange], seconds: float, phases: int):
    """In SLO, by phase, of the requests from five minutes after its beginning on."""
    told = []
    for number in range(phases):
        begin = number * seconds + min(AFTER_S, seconds / 2)
        late = [x for x in found if begin <= x.scheduled_s < (number + 1) * seconds]
        told.append(sum(not missed(x, server.door.classes) for x in late) / max(len(late), 1))
    return told


def fixed(wanted: Served, changes: Changes, talks, seconds: float, phases: int, seed: int):
    """The shares of one fixed setting."""
    settings = with_changes(wanted.settings, changes, wanted.settings)
    server = VirtualServer(replace(wanted, settings=settings), Steps(seed), retunes=False)
    return shares(server, server.run(talks), seconds, phases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10, help="of each phase")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--rows", default="4,6,8,12,24,64")
    parser.add_argument("--lanes", default="0.1")
    parser.add_argument("--steady", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    seconds, phases = 60 * given.minutes, PHASES[:1] * len(PHASES) if given.steady else PHASES
    talks, wanted, count = traffic(phases, seconds, given.seed), served(), len(phases)
    grid: dict[str, list[float]] = {}
    for rows, lane in product(given.rows.split(","), given.lanes.split(",")):
        changes: Changes = {"max_num_seqs": int(rows), "lane_share": float(lane)}
        name = f"{rows} rows, lane {lane}"
        grid[name] = fixed(wanted, changes, talks, seconds, count, given.seed)
        print(f"{name:>24}", *(f"{share:6.1%}" for share in grid[name]), flush=True)
    began_s = time.process_time()
    server = VirtualServer(wanted, Steps(given.seed), retunes=True)
    own = shares(server, server.run(talks), seconds, count)
    took_s = time.process_time() - began_s
    all_over = max(grid, key=lambda name: sum(grid[name]))
    start = fixed(wanted, {}, talks, seconds, count, given.seed)
    rows = []
    for number in range(count):
        best = max(grid, key=lambda name: grid[name][number])
        share = grid[best][number]
        rows.append(
            [
                " + ".join(f"{k.per_s}/s {k.name}" for k in phases[number]),
                f"{share:.1%} ({best})",
                f"{grid[all_over][number]:.1%}",
                f"{start[number]:.1%}",
                f"{own[number]:.1%}",
                f"{own[number] / share:.1%}" if share else "",
            ]
        )
    names = ["traffic", "best fixed", f"{all_over}", "64 rows", "--retune", "of the best"]
    print(markdown(names, rows))
    assert server.controller is not None
    told = server.controller.told
    for change in told.changes:
        print(
            f"{change.at_s:6.0f} s {change.changes} for {change.was}: {change.outcome} "
            f"({change.why})"
        )
    asked = [each for each in told.asked if each.seen is not None]
    off = [abs(each.seen - each.simulated) for each in asked]
    print(f"{told.num_simulated} simulations; {took_s:.0f} s of CPU in all")
    print(f"of the last {len(off)} simulated shares half are off by {median(off):.1%} at most")
    if given.json:
        given.json.write_text(json.dumps({"grid": grid, "retune": own, "start": start}))


if __name__ == "__main__":
    main()

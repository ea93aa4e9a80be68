"""A running server and its recent traffic, as it tells of itself: what a what-if begins with."""

from dataclasses import dataclass, replace
from statistics import median

import msgspec
import numpy as np

from headway.advise.simulate.loop import Clients, World
from headway.advise.simulate.machine import Machinery, calibrated
from headway.advise.simulate.replica import Served, fleet
from headway.bench.prompts import IdWriter, Made
from headway.bench.workload import Conversation, Turn
from headway.config.resolve import Settings
from headway.core.errors import UsageError
from headway.core.service import ServiceClass
from headway.measure.record import Exchange
from headway.spec import ModelSpec
from headway.telemetry.calibration import MachineCalibration
from headway.telemetry.traffic import TrafficRequest

LEAST_STEPS, LEAST_REQUESTS = 50, 20
"""Fewer tell too little of a machine, and of its traffic."""
MOST_TOKENS = 50_000
"""Of answers: each of some 25 simulations of them takes less than a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All that a simulation of it needs; a change makes another."""

    calibration: MachineCalibration
    spec: ModelSpec
    settings: Settings
    classes: dict[str, ServiceClass]
    traffic: tuple[TrafficRequest, ...]
    replicas: int = 1
    apart: bool = False
    """Whether replicas have machines of their own; else they share the one that was calibrated."""
    max_queue: int | None = None
    max_queue_wait_s: float | None = None

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        return self.traffic[-1].at_s

    def machinery(self) -> Machinery:
        """Truth and belief of these settings; other formats than the measured are transferred."""
        return calibrated(self.calibration.model, self.spec, self.settings, self.calibration)


def case_of(calibration: MachineCalibration) -> Case:
    """The case that a server tells, with the last of its traffic; UsageError where it is too
    little."""
    origin = calibration.origin
    if origin is None:
        raise UsageError(
            "The server does not tell what it was started with.", "It takes a Headway of this age."
        )
    if len(calibration.steps) < LEAST_STEPS or len(calibration.traffic) < LEAST_REQUESTS:
        raise UsageError(
            f"It has run {len(calibration.steps)} steps and answered {len(calibration.traffic)} "
            f"requests lately; a simulation needs {LEAST_STEPS} and {LEAST_REQUESTS}.",
            "Ask again under load.",
        )
    if not any(asked.prompt and asked.answer for asked in calibration.traffic):
        raise UsageError("No request of it came to its end lately.", "Ask again later.")
    settings = origin.settings
    if settings.cache.disk_folder:  # a simulated engine has no disk
        settings = replace(settings, cache=replace(settings.cache, disk_folder="", disk_bytes=0))
    return Case(
        calibration=calibration,
        spec=origin.spec,
        settings=settings,
        classes=origin.classes,
        traffic=tuple(lately(filled(calibration.traffic))),
        replicas=origin.replicas,
        max_queue=origin.max_queue,
        max_queue_wait_s=origin.max_queue_wait_s,
    )


def filled(traffic: list[TrafficRequest]) -> list[TrafficRequest]:
    """Those refused have the median lengths of the others: nobody knows their own."""
    known = [asked for asked in traffic if asked.prompt and asked.answer]
    prompt = round(median(asked.prompt for asked in known))
    answer = round(median(asked.answer or 0 for asked in known))
    return [
        asked
        if asked.prompt and asked.answer
        else TrafficRequest(
            asked.at_s,
            asked.prompt or prompt,
            asked.cached,
            asked.answer or answer,
            asked.n,
            asked.limit,
            asked.service_class,
        )
        for asked in traffic
    ]


def lately(traffic: list[TrafficRequest]) -> list[TrafficRequest]:
    """The last of them whose answers are so many tokens together, from the first of these on."""
    left, begin = MOST_TOKENS, len(traffic)
    while begin and (left > 0 or len(traffic) - begin < LEAST_REQUESTS):
        begin -= 1
        left -= (traffic[begin].answer or 0) * max(traffic[begin].n, 1)
    if not begin:
        return traffic
    kept = traffic[begin:]
    return [msgspec.structs.replace(asked, at_s=asked.at_s - kept[0].at_s) for asked in kept]


def talks_of(case: Case) -> list[Conversation]:
    """The requests, each of one turn: what it found in the cache is the beginning that all share,
    the rest its own; of `n` answers each is a request with the same prompt."""
    most = case.settings.max_model_len
    return [
        talk
        for number, asked in enumerate(case.traffic)
        for talk in [talk_of(asked, f"request {number}", most)] * max(asked.n, 1)
    ]


def talk_of(asked: TrafficRequest, name: str, most: int) -> Conversation:
    """A request as a conversation of one turn; prompts of other names are others."""
    shared = min(asked.cached, asked.prompt - 1, most - 2)
    own = min(max(asked.prompt - shared, 1), most - shared - 1)
    turn = Turn(
        system=(Made("shared", shared),) if shared else (),
        prompt=(Made(name, own),),
        output_tokens=min(max(asked.answer or 1, 1), most - shared - own),
    )
    return Conversation(at_s=asked.at_s, turns=(turn,), service_class=asked.service_class)


def run(case: Case, machinery: Machinery, seed: int, scale: float) -> list[Exchange]:
    """One simulation: the machine's good and bad moments drawn by `seed`, all of them `scale`
    times as long."""
    served = served_of(case, machinery)
    replicas = fleet(served, lambda s: machinery.truth(s, scale), case.replicas, seed)
    writer = IdWriter(0, case.spec.vocab_size)
    clients = Clients(answer_limit=limit_of(case))
    front = machinery.front.scaled(scale)
    world = World(replicas, front, writer, clients, seed, apart=case.apart)
    return world.run(talks_of(case))


def served_of(case: Case, machinery: Machinery) -> Served:
    """The server of the case."""
    return Served(
        spec=case.spec,
        settings=case.settings,
        description=machinery.description,
        classes=case.classes,
        max_queue=case.max_queue,
        max_queue_wait_s=case.max_queue_wait_s,
        acceptance=machinery.acceptance,
        belief=machinery.belief,
    )


def limit_of(case: Case) -> int | None:
    """The max_tokens that most clients send; None where they say nothing."""
    limits = [asked.limit for asked in case.traffic if asked.limit is not None]
    return int(np.median(limits)) if limits else None

"""The case that a what-if starts from: a running server and its recent traffic."""

from dataclasses import dataclass, replace
from statistics import median

import msgspec
import numpy as np

from headway.advise.simulate.loop import Clients, World
from headway.advise.simulate.machine import SimulatedMachine, calibrated_machine
from headway.advise.simulate.replica import ServerSetup, build_replicas
from headway.bench.prompts import GeneratedPiece, IdWriter
from headway.bench.workload import Conversation, Turn
from headway.config.resolve import Settings
from headway.core.errors import UsageError
from headway.core.service import ServiceClass
from headway.measure.record import Exchange
from headway.spec import ModelSpec
from headway.telemetry.calibration import MachineCalibration
from headway.telemetry.traffic import TrafficRequest

MIN_STEPS, MIN_REQUESTS = 50, 20
"""Fewer steps say too little about a machine, fewer requests too little about its traffic."""
MAX_ANSWER_TOKENS = 50_000
"""Answer tokens of the simulated traffic: each of about 25 simulations takes less than a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfCase:
    """The inputs of a simulation; a change makes another case."""

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
        """Return the seconds from the first arrival to the last."""
        return self.traffic[-1].at_s

    def machinery(self) -> SimulatedMachine:
        """Return the machine with these settings; formats other than the measured are
        transferred."""
        return calibrated_machine(
            self.calibration.model, self.spec, self.settings, self.calibration
        )


def case_of(calibration: MachineCalibration) -> WhatIfCase:
    """Return the case of a server's calibration; UsageError where it has too few steps or
    requests."""
    origin = calibration.origin
    if origin is None:
        raise UsageError(
            "The server's calibration does not have its settings.", "Use a server of this version."
        )
    if len(calibration.steps) < MIN_STEPS or len(calibration.traffic) < MIN_REQUESTS:
        raise UsageError(
            f"It has run {len(calibration.steps)} steps and answered {len(calibration.traffic)} "
            f"requests lately; a simulation needs {MIN_STEPS} and {MIN_REQUESTS}.",
            "Ask again under load.",
        )
    if not any(request.prompt and request.answer for request in calibration.traffic):
        raise UsageError("None of its recent requests has ended.", "Ask again later.")
    settings = origin.settings
    if settings.cache.disk_folder:  # a simulated engine has no disk
        settings = replace(settings, cache=replace(settings.cache, disk_folder="", disk_bytes=0))
    return WhatIfCase(
        calibration=calibration,
        spec=origin.spec,
        settings=settings,
        classes=origin.classes,
        traffic=tuple(recent_traffic(fill_lengths(calibration.traffic))),
        replicas=origin.replicas,
        max_queue=origin.max_queue,
        max_queue_wait_s=origin.max_queue_wait_s,
    )


def fill_lengths(traffic: list[TrafficRequest]) -> list[TrafficRequest]:
    """Give requests without known lengths (refused ones) the median lengths of the others."""
    known = [request for request in traffic if request.prompt and request.answer]
    prompt = round(median(request.prompt for request in known))
    answer = round(median(request.answer or 0 for request in known))
    return [
        request
        if request.prompt and request.answer
        else TrafficRequest(
            request.at_s,
            request.prompt or prompt,
            request.cached,
            request.answer or answer,
            request.n,
            request.limit,
            request.service_class,
        )
        for request in traffic
    ]


def recent_traffic(traffic: list[TrafficRequest]) -> list[TrafficRequest]:
    """Return the last requests, with `MAX_ANSWER_TOKENS` answer tokens in all; the first is at
    0."""
    remaining_tokens, begin = MAX_ANSWER_TOKENS, len(traffic)
    while begin and (remaining_tokens > 0 or len(traffic) - begin < MIN_REQUESTS):
        begin -= 1
        remaining_tokens -= (traffic[begin].answer or 0) * max(traffic[begin].n, 1)
    if not begin:
        return traffic
    recent = traffic[begin:]
    return [
        msgspec.structs.replace(request, at_s=request.at_s - recent[0].at_s) for request in recent
    ]


def conversations_of(case: WhatIfCase) -> list[Conversation]:
    """Return the requests as conversations of one turn.

    Its cached tokens are a prefix that all share, the rest is its own; of `n` answers each is a
    request with the same prompt.
    """
    most = case.settings.max_model_len
    return [
        talk
        for number, request in enumerate(case.traffic)
        for talk in [conversation_of(request, f"request {number}", most)] * max(request.n, 1)
    ]


def conversation_of(request: TrafficRequest, name: str, most: int) -> Conversation:
    """Return a request as a conversation of one turn; prompts of different names differ."""
    shared = min(request.cached, request.prompt - 1, most - 2)
    own = min(max(request.prompt - shared, 1), most - shared - 1)
    turn = Turn(
        system=(GeneratedPiece("shared", shared),) if shared else (),
        prompt=(GeneratedPiece(name, own),),
        output_tokens=min(max(request.answer or 1, 1), most - shared - own),
    )
    return Conversation(at_s=request.at_s, turns=(turn,), service_class=request.service_class)


def run(case: WhatIfCase, machinery: SimulatedMachine, seed: int, scale: float) -> list[Exchange]:
    """Simulate the case: the machine's pace is drawn by `seed`, all step times are scaled by
    `scale`."""
    served = served_of(case, machinery)
    replicas = build_replicas(served, lambda s: machinery.truth(s, scale), case.replicas, seed)
    writer = IdWriter(0, case.spec.vocab_size)
    clients = Clients(answer_limit=limit_of(case))
    front = machinery.front.scaled(scale)
    world = World(replicas, front, writer, clients, seed, apart=case.apart)
    return world.run(conversations_of(case))


def served_of(case: WhatIfCase, machinery: SimulatedMachine) -> ServerSetup:
    """Return the setup of the case's server."""
    return ServerSetup(
        spec=case.spec,
        settings=case.settings,
        description=machinery.description,
        classes=case.classes,
        max_queue=case.max_queue,
        max_queue_wait_s=case.max_queue_wait_s,
        acceptance=machinery.acceptance,
        belief=machinery.belief,
    )


def limit_of(case: WhatIfCase) -> int | None:
    """Return the median max_tokens of the clients; None where none sends it."""
    limits = [request.limit for request in case.traffic if request.limit is not None]
    return int(np.median(limits)) if limits else None

"""Traffic of late once more, from the state in which the server was when it began.

Who had come then and was not over is there at once: those that ran hold rows, with the tokens that
they had as prompt and what was left of their answers before them; those that waited have waited as
long as they really had. Worked example, 160 requests a second, of which 64 rows take half:

    10 s ago     64 run, of 40 tokens each has 20 on average; 30 wait since up to 0.3 s
    until now    1,600 come; a simulation that begins empty has rows for the first 64 at once

It is stopped where the traffic ends, now, and what stands then is what is told, of server and
simulation alike: a request that has missed nothing so far counts as met. So nobody comes out better
for the quiet after the last request. A simulation may go on where it was stopped.
"""

from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import median

import msgspec
import numpy as np

from headway.advise.retune.pace import InTime, Steps
from headway.advise.retune.question import Begun
from headway.advise.simulate.loop import Clients, World
from headway.advise.simulate.machine import Machinery
from headway.advise.simulate.replica import Replica, fleet
from headway.advise.simulate.truth import Truth
from headway.advise.what_if.case import Case, limit_of, served_of, talk_of
from headway.advise.what_if.compare import missed
from headway.bench.latency import latency
from headway.bench.prompts import IdWriter
from headway.core.live_settings import Changes, difference, with_changes
from headway.core.resolve import Settings
from headway.engine.cost import Work
from headway.engine.live import change_settings
from headway.measure.record import Exchange
from headway.telemetry.lately import middle
from headway.telemetry.traffic import Asked, Followed

HEAD_S = 1.0
"""Of the simulated clock, in which those that ran come in."""
FILLS, STILL_S = 32, 1e-6
"""Steps at most until all of them have rows, and what each of these takes."""
ANY_QUEUE = 10**9


@dataclass(slots=True)
class Seen:
    """What the clients of one simulated run saw, in the order in which they asked; `at_s` from its
    beginning."""

    at_s: list[float]
    met: np.ndarray
    classes: list[str]
    ttft_s: float | None
    tpot_s: float | None

    @property
    def share(self) -> float:
        return float(self.met.mean()) if len(self.met) else 0.0

    def differs(self, other: "Seen") -> bool:
        """Whether anything of it is another."""
        mine, theirs = (self.ttft_s, self.tpot_s), (other.ttft_s, other.tpot_s)
        return mine != theirs or not np.array_equal(self.met, other.met)


class Paused:
    """A truth that may stand still: a step takes no time then."""

    def __init__(self, truth: Truth) -> None:
        self.truth, self.is_still = truth, False
        self.label, self.reach = truth.label, truth.reach

    def seconds(self, work: Work) -> float:
        return STILL_S if self.is_still else self.truth.seconds(work)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What all simulations of a question begin with: the `case` as it is, its traffic from
    `from_s` on, who was under way then, and what the server `started` with."""

    case: Case
    machinery: Machinery
    started: Settings
    from_s: float
    begun: list[Begun]
    steps: Steps | None = None
    """Those of the same time, from `from_s` on. None: the machine's pace is drawn from all."""

    def truth(self, seed: int, scale: float) -> Truth:
        """The seconds of simulated steps."""
        fit = self.machinery.fit
        if fit is None or self.steps is None:
            return self.machinery.truth(seed, scale)
        return InTime(fit, *self.steps, scale)

    def replay(self, changes: Changes, pair: tuple[int, float]) -> "Replay":
        """One simulation, with these changes from `from_s` on."""
        return Replay(self, changes, *pair)


class Replay(World):
    """One simulated server from a state of the real one."""

    def __init__(self, scene: Scene, changes: Changes, seed: int, scale: float) -> None:
        case, machinery = scene.case, scene.machinery
        back = difference(case.settings, scene.started)
        settings = with_changes(case.settings, back, scene.started)
        self._truths: list[Paused] = []
        super().__init__(
            fleet(
                served_of(replace(case, settings=settings), machinery),
                lambda s: self._paused(scene.truth(s, scale)),
                case.replicas,
                seed,
            ),
            machinery.front.scaled(scale),
            IdWriter(0, case.spec.vocab_size),
            Clients(answer_limit=limit_of(case)),
            seed,
            apart=case.apart,
        )
        for paused, replica in zip(self._truths, self.replicas, strict=True):
            if isinstance(paused.truth, InTime):
                paused.truth.now_s = partial(self._age_s, replica)
        self.classes = case.classes
        self._belief, self._changes = machinery.belief, changes
        self.change(difference(settings, case.settings))
        self._rules = self.door.admission.rules
        self._set_out(scene)

    def _paused(self, truth: Truth) -> Paused:
        self._truths.append(Paused(truth))
        return self._truths[-1]

    def _age_s(self, replica: Replica) -> float:
        """How long ago it began, at an engine."""
        return replica.clock.now_s() - replica.started_s - self.from_s

    def change(self, changes: Changes) -> None:
        """Put other settings in force, as at a running server."""
        for replica in self.replicas:
            change_settings(replica.engine, changes)
        started = self.replicas[0].served.settings
        settings = with_changes(self.door.served.settings, changes, started)
        self.door.served = replace(self.door.served, settings=settings)
        self.door.admission.follow(settings.scheduler)

    # ── how it begins ───────────────────────────────────────────────────────────────────────

    def _set_out(self, scene: Scene) -> None:
        """Those that ran come first; the engines hold still until all that waited have come."""
        waited_s = max((b.age_s for b in scene.begun if not b.runs), default=0.0)
        self.from_s = from_s = HEAD_S + waited_s
        most, talks = scene.case.settings.max_model_len, []
        for number, begun in enumerate(scene.begun):
            at_s = 0.0 if begun.runs else from_s - begun.age_s
            asked = Asked(
                *(at_s, begun.prompt, begun.cached, begun.answer),
                *(begun.n, None, begun.service_class),
            )
            talks += [talk_of(asked, f"begun {number}", most)] * begun.n
        for number, each in enumerate(scene.case.traffic):
            if each.at_s >= scene.from_s:
                asked = msgspec.structs.replace(each, at_s=from_s + each.at_s - scene.from_s)
                talks += [talk_of(asked, f"request {number}", most)] * max(each.n, 1)
        talks.sort(key=lambda talk: talk.at_s)
        self.door.admission.rules = replace(self._rules, max_queue=ANY_QUEUE, max_queue_wait_s=inf)
        for replica in self.replicas:
            replica.is_stepping = True  # as if in a step until it may go on
        self.at(HEAD_S / 2, self._fill)
        self.at(from_s, self._open)
        self.expect(talks)

    def _fill(self) -> None:
        """Give rows to those that ran, in steps that take no time and that nobody learns from."""
        for truth in self._truths:
            truth.is_still = True
        for replica in self.replicas:
            replica.is_stepping = False
            scheduler = replica.engine.scheduler
            budget = scheduler.max_num_batched_tokens
            prompts = [len(job.request.prompt_token_ids) for job in replica.jobs.values()]
            scheduler.max_num_batched_tokens = max(budget, sum(prompts))
            cost = replica.engine.cost
            cost.take_parts(
                np.zeros(len(cost.parts))
            )  # no prompt is cut for the time that it takes
            for _ in range(FILLS):
                if all(job.chunk_s for job in replica.jobs.values()):
                    break
                stepped = replica.step(self.from_s)
                if stepped is None:
                    break
                replica.finish(stepped, [self.from_s] * len(stepped.updates))
            scheduler.max_num_batched_tokens = budget
            if self._belief is not None:
                cost.believe(self._belief)
            replica.is_stepping = True
        for truth in self._truths:
            truth.is_still = False

    def _open(self) -> None:
        """From now on it is the server, with its changes."""
        rules, own = self.door.admission.rules, self._rules
        self.door.admission.rules = replace(
            rules, max_queue=own.max_queue, max_queue_wait_s=own.max_queue_wait_s
        )
        self.change(self._changes)
        for replica in self.replicas:
            replica.is_stepping = False
            self._step(replica, self.from_s)

    # ── what it says ────────────────────────────────────────────────────────────────────────

    def seen(self, seconds: float, counted_s: float) -> Seen:
        """What stands so many seconds after its beginning, of those that came in the first
        `counted_s` of them; to be asked with ever more seconds."""
        self.go_on(self.from_s + seconds)
        end_s = self.from_s + counted_s
        found = [x for x in self.exchanges if self.from_s <= x.scheduled_s < end_s]
        times = [latency(x) if x.ended_s is not None else None for x in found]
        return Seen(
            at_s=[x.scheduled_s - self.from_s for x in found],
            met=np.array([self._met(x, self.from_s + seconds) for x in found], dtype=float),
            classes=[x.service_class for x in found],
            ttft_s=middle([each.ttft_s if each else None for each in times]),
            tpot_s=middle([each.tpot_s if each else None for each in times]),
        )

    def _met(self, x: Exchange, now_s: float) -> bool:
        """Whether a request has missed nothing by now."""
        if x.ended_s is not None:
            return not missed(x, self.classes)
        age_s, tpot_s, count = now_s - x.scheduled_s, None, sum(x.chunk_tokens or ())
        if count > 1:
            tpot_s = (x.chunk_s[-1] - x.chunk_s[0]) / (count - 1)
        ttft_s = x.chunk_s[0] - x.scheduled_s if x.chunk_s else age_s
        slo = self.door.class_of(x.service_class).objectives(x.asked_prompt_tokens)
        return not slo.missed(ttft_s, tpot_s, None, age_s)


# ── who was there ───────────────────────────────────────────────────────────────────────────


def completed(requests: list[Followed], until_s: float) -> list[Followed]:
    """The requests with what is not known of them guessed: lengths as those of the median, an
    answer that is under way as long as that or as it is already, at its own pace."""
    known = [r for r in requests if r.prompt and r.answer]
    ended = [r for r in known if r.took_s is not None] or known
    prompt = round(median([r.prompt for r in ended])) if ended else 1
    answer = round(median([r.answer or 0 for r in ended])) if ended else 1
    found = []
    for r in requests:
        length, took_s = r.answer or answer, r.took_s
        if took_s is None and r.ttft_s is not None:
            has = r.answer or 1
            length = max(min(answer, r.limit or answer), has + 1)
            took_s = r.ttft_s + (until_s - r.at_s - r.ttft_s) * length / has
        found.append(
            msgspec.structs.replace(r, prompt=r.prompt or prompt, answer=length, took_s=took_s)
        )
    return found


def begun_at(requests: list[Followed], at_s: float) -> list[Begun]:
    """Those of them, completed, that had come then and were not over.

    Of an answer of 41 tokens that began 1 s before and lasted 4 s, 11 are there and 30 are left.
    """
    found = []
    for r in requests:
        if r.at_s >= at_s or (r.took_s is not None and r.at_s + r.took_s <= at_s):
            continue
        has, answer = 0, r.answer or 1
        if r.ttft_s is not None and r.took_s is not None and r.at_s + r.ttft_s <= at_s:
            part = (at_s - r.at_s - r.ttft_s) / max(r.took_s - r.ttft_s, 1e-9)
            has = min(1 + int(part * (answer - 1)), answer - 1)
        found.append(
            Begun(
                age_s=at_s - r.at_s,
                runs=has > 0,
                prompt=r.prompt + has,
                cached=r.cached,
                answer=answer - has,
                n=max(r.n, 1),
                service_class=r.service_class,
            )
        )
    return found

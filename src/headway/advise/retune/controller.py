"""When to ask for better settings, when to take them, and when to go back.

Three things it may be doing, looked at every few seconds:

    looks     waits for other traffic, or for more of it, while some requests miss their objectives
    asks      the process beside the server simulates
    watches   a change is in force: what it did is held against what was expected without it

Expected without it is what was seen before, moved by as much as the simulation of the *old*
settings moves from the traffic before to the traffic since. So neither easier traffic nor a
simulation that is always too hopeful speaks for a change:

    seen before 70% │ simulated before 90%, since 80% │ expected 60% │ seen since 62%: kept
    seen before 70% │ simulated before 90%, since 90% │ expected 70% │ seen since 40%: back

What a simulation of the present settings says is held against what was seen of the same requests;
where the two are far apart nothing is proposed. It asks 40 s after the traffic has changed, then
ever more rarely, at most every 10 minutes, and not at all while nearly all are in their objectives;
it simulates for 2% of a core at most, and 12 s, and changes something 12 times an hour at most.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headway.advise.retune.question import Answer, Question
from headway.core.live_settings import Changes, difference, live_values, with_changes
from headway.core.resolve import Settings
from headway.telemetry.calibration import Calibration
from headway.telemetry.lately import Judged, Kept, Shape, kept_of, shape_of
from headway.telemetry.retuning import KEPT, ROLLED_BACK, UNPROVED, AskedOf, Retune, Retuning
from headway.telemetry.traffic import Stretch

log = logging.getLogger(__name__)

RECENT_S, WINDOW_S = 30.0, 120.0
"""By which other traffic is noticed, and how much of the present traffic is simulated."""
FIRST_S, MOST_PAUSE_S = 40.0, 600.0
"""From other traffic to the first question, and between later ones at most."""
LEAST_RECENT, LEAST_REQUESTS = 12, 20
ENOUGH = 0.97
"""With so many in their objectives there is nothing to gain."""
CPU_SHARE, CPU_SAVED_S = 0.02, 12.0
"""Of one core, and how much of it is there at the start: a question is not asked where the last one
tells that it would take more."""
MOST_AN_HOUR, HOUR_S = 12, 3600.0
SETTLES_S, FIRST_LOOK_S, LOOKS_EVERY_S, WATCH_S, GIVES_UP_S = 15.0, 40.0, 20.0, 120.0, 170.0
"""From a change to the first request that is counted (those before meet the rows and the queue of
the old settings), to the first look, between looks, to the verdict, and to the end of waiting for
requests to judge by."""
CLEAR, CLEAR_LOSS = 2.0, 0.05
"""Standard errors, and points, below which a change is undone at once."""
NOT_BORNE_OUT, SMALL_LOSS = 0.5, 0.02
"""The same at the verdict."""
SLOWER = 1.5
"""So many times what was expected of a median, where no more requests are in their objectives."""
FELL, FELL_CLEARLY = 0.75, 0.5
"""Of the requests that met their objectives a second before: below the first at the verdict, or the
second at once, it is undone. Who asks again when he is answered asks less of a slower server."""
SHOWN = 20


class Sight(Protocol):
    """What it sees of a server, and how it acts."""

    def now_s(self) -> float: ...

    def judged(self, since_s: float) -> list[Judged]:
        """The requests that have come since then and whose fate is known."""
        ...

    def settings(self) -> Settings | None:
        """Those in force; None while no engine is ready."""
        ...

    def calibration(self) -> Calibration | None:
        """Steps of late."""
        ...

    def stretch(self, since_s: float) -> Stretch:
        """The traffic since then."""
        ...

    def change(self, changes: Changes) -> None:
        """Put these settings in force."""
        ...


@dataclass(slots=True)
class Watched:
    """A change in force whose worth is not known yet."""

    told: Retune
    changed_s: float
    before: Kept
    shape: Shape
    simulated: Answer
    """What the question that led to it was answered."""
    next_s: float


class Controller:
    """One server's settings; `tick` and `take` are called by who has a clock and a process."""

    def __init__(
        self,
        sight: Sight,
        started: Settings,
        on_verdict: Callable[[Retune], None] = lambda told: None,
    ) -> None:
        self.sight, self.started, self.on_verdict = sight, started, on_verdict
        self.told = Retuning(settings=live_values(started), started=live_values(started))
        self.watched: Watched | None = None
        self._began_s = self._changed_s = sight.now_s()
        self._shape: Shape | None = None
        self._pause_s, self._next_s = FIRST_S, self._began_s
        self._asked: Question | None = None
        self._asked_s = self._settled_s = 0.0
        """When it asked last, and from when on the present settings alone are seen."""
        self._question_cpu_s = 0.0
        """What the last question took."""
        self._left_alone: deque[tuple[float, Changes]] = deque()
        self._changes_s: deque[float] = deque()

    def tick(self) -> Question | None:
        """A question to ask now, where there is one."""
        now_s = self.sight.now_s()
        settings = self.sight.settings()
        if self._asked is not None or settings is None:
            return None
        self.told.settings = live_values(settings)
        question = self._watch(now_s) if self.watched else self._look(now_s)
        self._asked, self._asked_s = question, now_s
        return question

    def take(self, answer: Answer) -> None:
        """The answer to the last question."""
        asked, self._asked = self._asked, None
        self.told.num_simulated += answer.num_simulated
        self.told.cpu_s += answer.cpu_s
        self.told.asked = [*self.told.asked, told_of(answer, self._asked_s)][-SHOWN:]
        now_s = self.sight.now_s()
        if asked is None or self.sight.settings() is None:
            return
        if self.watched is not None:
            self._judge(answer, now_s)
            return
        self._question_cpu_s = answer.cpu_s
        changed_s = self._changed_s
        self._notice(now_s)  # beside a busy engine an answer may take minutes
        if self._changed_s != changed_s:
            self.told.state = "the traffic is other than when it was asked"
            return
        if answer.changes and self._apply(answer, now_s):
            return
        self._rest(f"nothing to gain: {answer.why}" if answer.is_trusted else answer.why, now_s)

    def gave_up(self, why: str) -> None:
        """No answer comes to the last question."""
        self._asked = None
        self._rest(why, self.sight.now_s())

    # ── look ────────────────────────────────────────────────────────────────────────────────

    def _look(self, now_s: float) -> Question | None:
        """Ask where the traffic is other than before, or there is more of it."""
        self._notice(now_s)
        since_s = max(self._changed_s, self._settled_s, now_s - WINDOW_S)
        if now_s < self._next_s or now_s - since_s < FIRST_S:
            return None
        kept = kept_of(self.sight.judged(since_s))
        if kept.num < LEAST_REQUESTS:
            self.told.state = f"waits for traffic: {kept.num} requests in {now_s - since_s:.0f} s"
            return None
        if kept.share >= ENOUGH:
            self.told.state = f"nothing to gain: {kept.share:.0%} of the requests are in SLO"
            return None
        spent_s = self.told.cpu_s + self._question_cpu_s - CPU_SHARE * (now_s - self._began_s)
        while self._changes_s and self._changes_s[0] < now_s - HOUR_S:
            self._changes_s.popleft()
        if spent_s > CPU_SAVED_S or len(self._changes_s) >= MOST_AN_HOUR:
            why = "simulations" if spent_s > CPU_SAVED_S else "changes"
            self.told.state = f"waits: it has had its share of {why} for now"
            return None
        calibration = self.sight.calibration()
        if calibration is None:
            return None
        self.told.state = f"simulates: {kept.share:.0%} of {kept.num} requests are in SLO"
        while self._left_alone and self._left_alone[0][0] < now_s - HOUR_S:
            self._left_alone.popleft()
        return Question(
            kind="propose",
            calibration=calibration,
            stretch=self.sight.stretch(since_s),
            started=self.started,
            left_alone=[changes for _, changes in self._left_alone],
        )

    def _notice(self, now_s: float) -> None:
        """Other traffic than that of the last answer begins a new look."""
        covered_s = min(RECENT_S, now_s - self._began_s)
        if covered_s < RECENT_S:
            return
        shape = shape_of(self.sight.judged(now_s - RECENT_S), RECENT_S)
        if shape.num < LEAST_RECENT:
            return
        if self._shape is None or shape.differs(self._shape):
            self._shape, self._changed_s = shape, now_s - RECENT_S
            self._pause_s, self._next_s = FIRST_S, now_s

    def _rest(self, state: str, now_s: float) -> None:
        """Ask again later, ever later while the traffic stays what it is."""
        self.told.state = state
        self._next_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, MOST_PAUSE_S)

    def _apply(self, answer: Answer, now_s: float) -> bool:
        """Put what was proposed in force, and remember what it was like before; False where the
        engine has changed meanwhile, so that it is no change any more."""
        settings = self.sight.settings()
        assert settings is not None, "it was there a moment ago"
        then = with_changes(settings, answer.changes, self.started)
        if then == settings:
            return False
        since_s = max(self._changed_s, self._settled_s, self._asked_s - WINDOW_S)
        requests = self.sight.judged(since_s)
        before, shape = kept_of(requests), shape_of(requests, max(now_s - since_s, 1e-9))
        told = Retune(
            at_s=round(now_s, 3),
            changes=answer.changes,
            was=difference(then, settings),
            predicted_gain=answer.gain,
            gain_interval=answer.gain_interval,
            before=round(before.share, 4),
            why=answer.why,
        )
        self.sight.change(answer.changes)
        self._settled_s = now_s + SETTLES_S
        self._changes_s.append(now_s)
        self.told.changes = [*self.told.changes, told][-SHOWN:]
        self.told.state = f"watches {said(answer.changes)}"
        self.watched = Watched(told, now_s, before, shape, answer, now_s + FIRST_LOOK_S)
        log.info(
            "retuned: %s for %s (%+.0f%% goodput by simulation, %+.0f to %+.0f%%; %s)",
            *(said(answer.changes), said(told.was), 100 * answer.gain),
            *(100 * end for end in answer.gain_interval),
            answer.why,
        )
        return True

    # ── watch ───────────────────────────────────────────────────────────────────────────────

    def _watch(self, now_s: float) -> Question | None:
        """Ask what the traffic since the change would have had without it, where that matters.

        While at least as many are in their objectives as before it does not, until the verdict.
        """
        watched = self.watched
        assert watched is not None
        if now_s < watched.next_s:
            return None
        watched.next_s = now_s + LOOKS_EVERY_S
        requests = self.sight.judged(self._settled_s)
        after, age_s = kept_of(requests), now_s - watched.changed_s
        if after.num < LEAST_REQUESTS:
            if age_s >= GIVES_UP_S:
                self._undo(f"only {after.num} requests came since", now_s, UNPROVED)
            return None
        limit = FELL if age_s >= WATCH_S else FELL_CLEARLY
        if fell := fallen(watched, after, age_s - SETTLES_S, limit):
            self._undo(fell, now_s)
            return None
        if age_s < WATCH_S and after.share >= watched.before.share:
            return None
        calibration = self.sight.calibration()
        if calibration is None:
            return None
        return Question(
            kind="judge",
            calibration=calibration,
            stretch=self.sight.stretch(self._settled_s),
            begun=watched.simulated.begun,
            started=self.started,
            changes=watched.told.was,
        )

    def _judge(self, answer: Answer, now_s: float) -> None:
        """Keep the change, undo it, or look at it for longer."""
        watched = self.watched
        assert watched is not None
        after = kept_of(self.sight.judged(self._settled_s))
        before, told, is_last = watched.before, watched.told, now_s - watched.changed_s >= WATCH_S
        moved = answer.then - watched.simulated.now if answer.changes else 0.0
        expected = min(max(before.share + moved, 0.0), 1.0)
        error = (before.error**2 + after.error**2) ** 0.5
        told.expected, told.after = round(expected, 4), round(after.share, 4)
        told.num_requests = after.num
        seen = f"{after.share:.0%} in SLO where {expected:.0%} were expected without it"
        lost = expected - after.share
        clear, doubtful = max(CLEAR * error, CLEAR_LOSS), max(NOT_BORNE_OUT * error, SMALL_LOSS)
        if lost > (doubtful if is_last else clear):
            self._undo(seen, now_s)
        elif is_last and lost >= 0 and (slow := slower(watched, after, answer)):
            self._undo(f"{seen}, and {slow}", now_s)
        elif is_last:
            self._keep(seen, now_s)

    def _undo(self, why: str, now_s: float, outcome: str = ROLLED_BACK) -> None:
        """Back to what was; a change that was worse is left alone for an hour."""
        watched, self.watched = self.watched, None
        assert watched is not None
        self.sight.change(watched.told.was)
        self._settled_s = now_s + SETTLES_S
        if outcome == ROLLED_BACK:
            self._left_alone.append((now_s, watched.told.changes))
        watched.told.outcome, watched.told.why = outcome, why
        self.on_verdict(watched.told)
        log.warning("rolled back: %s is %s again: %s", *named(watched.told), why)
        self._pause_s = FIRST_S
        self._rest(f"rolled back {said(watched.told.changes)}: {why}", now_s)

    def _keep(self, why: str, now_s: float) -> None:
        """It stays; the next question is about what is in force now."""
        watched, self.watched = self.watched, None
        assert watched is not None
        watched.told.outcome, watched.told.why = KEPT, why
        self.on_verdict(watched.told)
        log.info("kept: %s (%s)", said(watched.told.changes), why)
        self.told.state = f"kept {said(watched.told.changes)}: {why}"
        self._pause_s, self._next_s = FIRST_S, now_s


def fallen(watched: Watched, after: Kept, seconds: float, limit: float) -> str:
    """Whether far fewer requests come, and meet their objectives, than chance makes of it; "" else.

    20 a second before and 4 since, of 12 clients who ask again when they are answered: the share of
    those that met may have grown, and a fifth is answered.
    """
    before = watched.before.share * watched.shape.per_s
    come, expected = watched.shape.per_s * seconds, before * seconds
    met = after.share * after.num
    if after.num >= limit * come or met >= limit * expected or come - after.num < 3 * come**0.5:
        return ""
    return f"{met / seconds:.1f} requests a second met their objectives, {before:.1f} before"


def slower(watched: Watched, after: Kept, answer: Answer) -> str:
    """Which median is far longer than was expected without the change, the other no shorter; "".

    A TTFT of 1 s before, which the old settings' simulation moves by 1.2, is expected at 1.2 s.
    """
    before, simulated = watched.before, watched.simulated
    ttft = grown(before.ttft_s, simulated.now_ttft_s, answer.then_ttft_s, after.ttft_s)
    tpot = grown(before.tpot_s, simulated.now_tpot_s, answer.then_tpot_s, after.tpot_s)
    if min(ttft, tpot) < 0.9:
        return ""
    if ttft > SLOWER:
        return f"TTFT is {ttft:.1f} times what was expected"
    return f"TPOT is {tpot:.1f} times what was expected" if tpot > SLOWER else ""


def grown(
    before: float | None, first: float | None, then: float | None, after: float | None
) -> float:
    """What is seen after, over what was expected: before, moved as the simulation moves."""
    if not before or not after:
        return 1.0
    moved = then / first if first and then else 1.0
    return after / (before * moved)


def told_of(answer: Answer, at_s: float) -> AskedOf:
    """A question that was answered, as `/stats` has it."""
    return AskedOf(
        at_s=round(at_s, 3),
        seen=None if answer.seen is None else round(answer.seen, 4),
        simulated=round(answer.then if answer.seen is None else answer.now, 4),
        seconds=round(answer.seconds, 1),
        num_requests=answer.num_requests,
        cpu_s=round(answer.cpu_s, 3),
        why=answer.why,
    )


def said(changes: Changes) -> str:
    """`max_num_seqs=16 lane_share=0.3`."""
    return " ".join(f"{name}={value}" for name, value in changes.items())


def named(told: Retune) -> tuple[str, str]:
    """(the names of what was changed, what they are again)."""
    return " ".join(told.changes), " ".join(str(value) for value in told.was.values())

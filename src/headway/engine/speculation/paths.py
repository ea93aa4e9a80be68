"""Other guesses of the same tokens, verified beside the first: a path of its own for each.

Where two sources disagree, both may ride. The second counts where the first is wrong:

    lookup    a b c     chances 0.6 0.5 0.4 of being reached and kept
    suffixes  a d e     a is shared; d is reached where a is kept and b is wrong: 0.6 - 0.5 = 0.1

How often it is right there is learned of that case alone, for guesses that compete are not
independent of each other: `Acceptance` has it by source as any other, under a name of its own.
A path computes the last known token and what it shares again, in a row that reads the whole
context, and a block is copied for it; so it rides only where its few tokens pay for all of that.
"""

from typing import NamedTuple

from headway.engine.cost import StepCost
from headway.engine.speculation.acceptance import Acceptance, Own
from headway.engine.speculation.controller import PlainStep
from headway.engine.speculation.drafts import Drafts, num_alike
from headway.engine.speculation.lookup import Match

COPY_S = 1e-4
"""Of a block in all layers: of 24, called from Python, 0.09 ms were measured."""
LEAST = 0.02
"""A rival that is less likely to be right is not worth looking at."""


class Rival(NamedTuple):
    """Guesses that differ from the first behind `shared` of them; `chances` are those that each one
    behind these is reached, all before it wrong in the first, and kept."""

    drafts: Drafts
    shared: int
    chances: list[float]


def instead(source: str) -> str:
    """The name of what `source` guesses where the first is wrong."""
    return f"{source} instead"


def behind(match: Match, shared: int) -> Match:
    """What is known of the worth of guesses behind the first `shared`."""
    if isinstance(match, tuple):
        return match[shared:]
    return match + shared if match else 0


def find_rival(
    first: Drafts, chances: list[float], others: list[Drafts], acceptance: Acceptance, own: Own
) -> Rival | None:
    """Of `others` the one that promises most where `first`, kept with `chances`, is wrong."""
    best, worth = None, LEAST
    for other in others:
        shared = num_alike(other.token_ids, first.token_ids)
        count = len(other.token_ids) - shared
        if not count or shared == len(first.token_ids):
            continue
        wrong = (chances[shared - 1] if shared else 1.0) - chances[shared]
        found = acceptance.chances(instead(other.source), behind(other.match, shared), count, own)
        if wrong * sum(found) > worth:
            best = Rival(other, shared, [wrong * chance for chance in found])
            worth = wrong * sum(found)
    return best


def observe(rival: Rival, first: Drafts, came: list[int], acceptance: Acceptance, own: Own) -> None:
    """Learn how right it was, if `came` tells: its own guesses were reached, and `first` wrong."""
    (drafts, shared, _), guesses = rival, rival.drafts.token_ids[rival.shared :]
    if num_alike(first.token_ids, came) != shared or len(came) == shared:
        return
    if drafts.token_ids[:shared] == came[:shared]:
        right = num_alike(guesses, came[shared:])
        seen = min(len(guesses), len(came) - shared)
        acceptance.observe(instead(drafts.source), behind(drafts.match, shared), seen, right, own)


class Riding:
    """What rides in a step so far: the tokens that are expected of its decodes, and its seconds."""

    def __init__(
        self, values: list[list[float]], counts: list[int], plain: PlainStep, cost: StepCost
    ) -> None:
        self.cost, self.work = cost, cost.with_guesses(plain.work, plain.starts, counts)
        pairs = zip(values, counts, strict=True)
        self.tokens = len(counts) + sum([sum(chances[:count]) for chances, count in pairs])
        self.step_s = cost.seconds(self.work)
        self.seconds = cost.seconds(plain.decodes) + self.step_s - cost.seconds(plain.work)
        self.room, self.room_s = plain.budget - sum(counts), plain.most_s - self.step_s

    def take(self, rival: Rival, start: int) -> int:
        """How many guesses of `rival` raise the tokens a second most; with these it rides."""
        rate, best = self.tokens / self.seconds, (0, self.work, 0.0, 0.0)
        gained = 0.0
        for count, chance in enumerate(rival.chances[: max(self.room - rival.shared - 1, 0)], 1):
            gained += chance
            work = self.cost.with_path(self.work, start, rival.shared + count)
            more_s = self.cost.seconds(work) - self.step_s + COPY_S
            if more_s <= self.room_s and self.tokens + gained > rate * (self.seconds + more_s):
                rate = (self.tokens + gained) / (self.seconds + more_s)
                best = count, work, gained, more_s
        count, self.work, gained, more_s = best
        self.tokens += gained
        self.seconds += more_s
        self.step_s += more_s
        self.room_s -= more_s
        self.room -= rival.shared + 1 + count if count else 0
        return count


def choose_rivals(
    rivals: list[Rival | None],
    values: list[list[float]],
    counts: list[int],
    plain: PlainStep,
    cost: StepCost,
) -> list[int]:
    """How many guesses of each rival are verified beside `counts[i]` of the first of decode i.

    As `controller.choose`, but one rival after the other, the likeliest first: each rides where it
    raises the expected tokens a second of the step with all that rides already. `values[i]` are the
    chances of the first.
    """
    taken = [0] * len(rivals)
    worthy = [
        (sum(rival.chances), index, rival)
        for index, rival in enumerate(rivals)
        if rival is not None and counts[index] > rival.shared
    ]
    if worthy:
        riding = Riding(values, counts, plain, cost)
        for _, index, rival in sorted(worthy, reverse=True):
            taken[index] = riding.take(rival, plain.starts[index])
    return taken

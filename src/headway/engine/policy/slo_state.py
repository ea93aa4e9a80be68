"""What `policy.slo` knows of one sequence: what it keeps of it, and what follows from that."""

from dataclasses import dataclass
from math import inf

import msgspec

from headway.engine.sequence import WAITING, Sequence

GAINED_FOLLOWS = 0.1
"""How far the tokens of one step move what steps are taken to bring of a sequence."""
UNHURRIED = 0.6
"""Tighter TPOT share when the prompt is already late: it must not slow decodes to their limit."""


@dataclass(slots=True)
class SloState:
    """What the policy keeps of a sequence from its arrival on.

    `matched` of its tokens were in memory when it was last looked up, while it waits. Of prompts
    that came later `overtaken` tokens were computed while it was behind. `missed` says whether its
    first token came too late; None before that was asked. A step brings `gained` of its tokens in
    the mean: more than 1 where guesses come. `pace_s` is the objective for each token that it is
    held to, 0 where there is none or its first came too late; None before its first is there, which
    came at `first_s`. No step that is shorter than `unhurried_s` hurries it: infinite without such
    an objective, 0 until its first token is there.
    """

    matched: int
    overtaken: int = 0
    missed: bool | None = None
    gained: float = 1.0
    pace_s: float | None = None
    first_s: float = 0.0
    unhurried_s: float = 0.0

    def decoded(self) -> None:
        """A step brings its next token."""
        self._gain(GAINED_FOLLOWS * (1 - self.gained))

    def kept(self, num_tokens: int) -> None:
        """The same step brought so many more."""
        self._gain(GAINED_FOLLOWS * num_tokens)

    def _gain(self, more: float) -> None:
        self.gained += more
        if self.pace_s:
            self.unhurried_s = self.gained * self.pace_s * UNHURRIED


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """Who is behind, in the order of their turns."""

    aged: list[Sequence]
    ahead: list[Sequence]
    late: list[Sequence]
    lane: list[Sequence]
    idle: list[Sequence]


class Ranked(msgspec.Struct, kw_only=True):
    """Those in time in their order, those late by the rank of their users, least served first.

    The last in time ends at `end_s`; all of them could begin `spare_s` later.
    """

    in_time: list[Sequence] = []
    late: list[list[Sequence]] = []
    end_s: float
    spare_s: float = inf


def state(sequence: Sequence) -> SloState:
    """What `Slo.arrived` attached to `sequence`."""
    kept: SloState = sequence.policy_state
    return kept


def is_lost(sequence: Sequence) -> bool:
    """Whether it has missed its first token's objective for good."""
    if sequence.first_token_s is None:
        return False
    kept = state(sequence)
    if kept.missed is None:
        uncached = sequence.num_prompt - sequence.num_cached
        given_s = sequence.request.terms.first_token_s(uncached)
        kept.missed = sequence.first_token_s - sequence.arrived_s > given_s
    return kept.missed


def find_pace_s(sequence: Sequence) -> float:
    """`SloState.pace_s`, and keep it once the first token is there."""
    if sequence.first_token_s is None:
        return 0.0
    kept = state(sequence)
    kept.first_s = sequence.first_token_s
    kept.pace_s = 0.0 if is_lost(sequence) else sequence.request.terms.tpot_s or 0.0
    kept.unhurried_s = kept.gained * kept.pace_s * UNHURRIED if kept.pace_s else inf
    return kept.pace_s


def deadline_s(sequence: Sequence) -> float:
    """When its next token is due: the first, or after a preemption the one that follows."""
    terms = sequence.request.terms
    if sequence.first_token_s is None:
        uncached = sequence.num_prompt - max(sequence.num_cached, state(sequence).matched)
        return sequence.arrived_s + terms.first_token_s(uncached)
    if terms.tpot_s is None or is_lost(sequence):
        return inf if terms.tpot_s is None else -inf
    return sequence.first_token_s + sequence.num_generated * terms.tpot_s


def halfway_s(first_s: float, steps: float, bears_s: float, decode_s: float) -> float:
    """How long a step may last where decodes take most of what they may: half-way between the two.

    `steps` after its first token, `first_s` from now, a sequence may have had as many such steps
    and no more. Objective 10.5 ms, decodes 9.5 ms: 10 ms, and 0.5 ms of each step for prompts,
    where the eight tenths that are aimed at else (8.4 ms) would leave none.
    """
    if decode_s >= bears_s:
        return 0.0
    half_s = (bears_s + decode_s) / 2
    return min(half_s, first_s + steps * half_s)


def takes_s(sequence: Sequence, token_s: float, row_s: float) -> float:
    """Seconds until it is computed; one that waits first needs a row, and one comes in `row_s`."""
    seconds = token_s * missing(sequence)
    return max(seconds, row_s) if sequence.state == WAITING else seconds


def missing(sequence: Sequence) -> int:
    """Tokens that are known and neither computed nor in memory."""
    return len(sequence.tokens) - (sequence.computed or state(sequence).matched)


def arrival(sequence: Sequence) -> int:
    """Ids are given in the order of arrival."""
    return sequence.sequence_id

"""The classes of `policy.slo` for sequences that lack more than a token, and the order of each."""

from enum import IntEnum
from itertools import chain
from math import inf

import msgspec

from headway.engine.policy.on_time import Due
from headway.engine.policy.slo_state import arrival_order, num_uncomputed, remaining_prefill_s
from headway.engine.sequence import Sequence

LATE_SHARE_OF_SLACK = 0.5
"""Fraction of the slack of on-time requests that may be spent on late ones."""

Job = tuple[Due, Sequence]


class PrefillClass(IntEnum):
    """Class of a sequence that lacks more than a token."""

    AGED = 0
    SHORT = 1
    LONG = 2
    IDLE = 3


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences that lack more than a token, by class, each in the order of their turns."""

    aged: list[Sequence]
    on_time: list[Sequence]
    late: list[Sequence]
    long: list[Sequence]
    idle: list[Sequence]


class Ranked(msgspec.Struct, kw_only=True):
    """Sequences on time in order, and late ones by the rank of their users, least served first.

    The last one on time ends at `end_s`; all could begin `slack_s` later.
    """

    on_time: list[Sequence] = []
    late: list[list[Sequence]] = []
    end_s: float
    slack_s: float = inf


def order_aged(jobs: list[Job]) -> list[Sequence]:
    """Return aged sequences by arrival."""
    return sorted([sequence for _, sequence in jobs], key=arrival_order)


def order_short(
    short: Ranked, token_s: float, slot_s: float
) -> tuple[list[Sequence], list[Sequence]]:
    """Return short sequences: (those to serve first, late ones), the late by arrival.

    Late ones of the least served users go before those on time while they fit into
    `LATE_SHARE_OF_SLACK` of the slack. A prompt token takes `token_s`, a slot is free in `slot_s`.
    """
    for late in short.late:
        late.sort(key=arrival_order)
    num_fitting, slack_s = 0, short.slack_s
    for sequence in short.late[0] if short.on_time else ():
        slack_s -= remaining_prefill_s(sequence, token_s, slot_s) / LATE_SHARE_OF_SLACK
        if slack_s < 0:
            break
        num_fitting += 1
    late = list(chain.from_iterable(short.late))
    return late[:num_fitting] + short.on_time, late[num_fitting:]


def order_long(long: Ranked) -> list[Sequence]:
    """Return long sequences: those on time by deadline, then the shortest first."""
    for late in long.late:
        late.sort(key=num_uncomputed)
    return long.on_time + list(chain.from_iterable(long.late))

"""The state that `policy.slo` keeps of one sequence, and what follows from it."""

from dataclasses import dataclass
from math import inf

from headway.engine.sequence import WAITING, Sequence

TOKENS_PER_STEP_DECAY = 0.1
"""Weight of the newest step in the mean number of tokens that a step brings."""
LONG_TPOT_SHARE = 0.6
"""Share of the TPOT objective that a step aims at when only long and idle prompts extend it."""


@dataclass(slots=True)
class SloState:
    """What the policy keeps of a sequence.

    `num_matched`: tokens in the prefix cache at the last look-up, while it waits.
    `num_overtaken`: tokens of later requests that were computed while its prompt was not.
    `missed_ttft`: whether its first token was late; None while that is unknown.
    `tokens_per_step`: mean tokens of a step, above 1 with accepted draft tokens.
    `tpot_s`: the TPOT objective that it is held to, 0 without one or after a late first token; None
    before the first token, which came at `first_token_s`.
    `long_step_s`: shorter steps need not look at its TPOT; infinite without an objective, 0 before
    the first token.
    """

    num_matched: int
    num_overtaken: int = 0
    missed_ttft: bool | None = None
    tokens_per_step: float = 1.0
    tpot_s: float | None = None
    first_token_s: float = 0.0
    long_step_s: float = 0.0

    def count_step(self) -> None:
        """Count a step that computes its next token."""
        self._add_tokens(TOKENS_PER_STEP_DECAY * (1 - self.tokens_per_step))

    def count_accepted(self, num_tokens: int) -> None:
        """Count draft tokens that were accepted in the step counted last."""
        self._add_tokens(TOKENS_PER_STEP_DECAY * num_tokens)

    def _add_tokens(self, more: float) -> None:
        self.tokens_per_step += more
        if self.tpot_s:
            self.long_step_s = self.tokens_per_step * self.tpot_s * LONG_TPOT_SHARE


def slo_state(sequence: Sequence) -> SloState:
    """Return what `SloPolicy.add` attached to `sequence`."""
    state: SloState = sequence.policy_state
    return state


def missed_ttft(sequence: Sequence) -> bool:
    """Return whether its first token came after the objective; False before the first token."""
    if sequence.first_token_s is None:
        return False
    state = slo_state(sequence)
    if state.missed_ttft is None:
        uncached = sequence.num_prompt - sequence.num_cached
        objective_s = sequence.request.terms.first_token_s(uncached)
        state.missed_ttft = sequence.first_token_s - sequence.arrived_s > objective_s
    return state.missed_ttft


def effective_tpot_s(sequence: Sequence) -> float:
    """Return the TPOT objective that it is held to, 0 for none; keep it after the first token."""
    if sequence.first_token_s is None:
        return 0.0
    state = slo_state(sequence)
    state.first_token_s = sequence.first_token_s
    state.tpot_s = 0.0 if missed_ttft(sequence) else sequence.request.terms.tpot_s or 0.0
    step_s = state.tokens_per_step * state.tpot_s * LONG_TPOT_SHARE
    state.long_step_s = step_s if state.tpot_s else inf
    return state.tpot_s


def deadline_s(sequence: Sequence) -> float:
    """Return when its next token is due: the first, or the next one of a preempted answer."""
    terms = sequence.request.terms
    if sequence.first_token_s is None:
        uncached = sequence.num_prompt - max(sequence.num_cached, slo_state(sequence).num_matched)
        return sequence.arrived_s + terms.first_token_s(uncached)
    if terms.tpot_s is None or missed_ttft(sequence):
        return inf if terms.tpot_s is None else -inf
    return sequence.first_token_s + sequence.num_generated * terms.tpot_s


def misses_objectives(sequence: Sequence, from_s: float, decode_s: float) -> bool:
    """Return whether it misses an objective even if it goes on alone at `from_s`.

    A step of its decodes takes `decode_s`.
    """
    tpot_s = sequence.request.terms.tpot_s
    if sequence.first_token_s is None:
        return from_s > deadline_s(sequence)
    if tpot_s is None or missed_ttft(sequence):
        return missed_ttft(sequence)
    late_s = from_s - sequence.first_token_s - sequence.num_generated * tpot_s
    num_remaining = sequence.max_len - len(sequence.tokens)
    token_s = decode_s / slo_state(sequence).tokens_per_step
    return late_s > num_remaining * max(tpot_s - token_s, 0.0)


def halfway_step_s(first_s: float, steps: float, limit_s: float, decode_s: float) -> float:
    """Return the length of a step that gives prompts half of what decodes leave of `limit_s`.

    It matters where decodes take most of the limit. The answer has had `steps` steps since its
    first token, `first_s` from now (negative), and may have had as many of this length. Example: a
    limit of 10.5 ms, decodes of 9.5 ms: 10 ms, so prompts get 0.5 ms of each step, where the target
    of eight tenths (8.4 ms) would leave none.
    """
    if decode_s >= limit_s:
        return 0.0
    half_s = (limit_s + decode_s) / 2
    return min(half_s, first_s + steps * half_s)


def remaining_prefill_s(sequence: Sequence, token_s: float, slot_s: float) -> float:
    """Return the seconds until it is computed; a waiting one needs a slot, free in `slot_s`."""
    seconds = token_s * num_uncomputed(sequence)
    return max(seconds, slot_s) if sequence.state == WAITING else seconds


def num_uncomputed(sequence: Sequence) -> int:
    """Return how many known tokens are neither computed nor in the prefix cache."""
    return len(sequence.tokens) - (sequence.computed or slo_state(sequence).num_matched)


def arrival_order(sequence: Sequence) -> int:
    """Return the sort key of arrival: ids are given in that order."""
    return sequence.sequence_id

"""What `policy.slo` knows of one sequence: what it keeps of it, and what follows from that."""

from dataclasses import dataclass

from headway.engine.sequence import WAITING, Sequence


@dataclass(slots=True)
class SloState:
    """What the policy keeps of a sequence from its arrival on.

    `matched` of its tokens were in memory when it was last looked up, while it waits. Of prompts
    that came later `overtaken` tokens were computed while it was behind. `missed` says whether its
    first token came too late; None before that was asked.
    """

    matched: int
    overtaken: int = 0
    missed: bool | None = None


def state(sequence: Sequence) -> SloState:
    """What `Slo.arrived` attached to `sequence`."""
    kept: SloState = sequence.policy_state
    return kept


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

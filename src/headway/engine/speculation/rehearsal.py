"""Guesses before anybody needs them, so that it is known what they and the drafter take."""

from collections.abc import Sequence as TypingSequence

from headway.core.plan import Sample, StepResult
from headway.engine.cost import Work
from headway.engine.sequence import Sequence
from headway.engine.speculation.asking import Asking
from headway.engine.speculation.drafts import Drafts
from headway.telemetry.records import StepRecord


class Rehearsal:
    """A speculator that asks the drafter in each step for `depth` guesses of every sequence, and
    verifies `num_guesses` of nobody's."""

    jumps, failure, drafting_s = False, "", 0.0

    def __init__(self, asking: Asking | None = None, depth: int = 0, num_guesses: int = 0) -> None:
        self.asking, self._depth, self.num_guesses = asking, depth, num_guesses

    def looks(self, num_decodes: int) -> bool:
        return True

    def rested(self, sequences: TypingSequence[Sequence]) -> None:
        pass

    def plan(
        self,
        decodes: TypingSequence[Sequence],
        beside: Work,
        budget: int,
        most_s: float,
        *,
        prompts_wait: bool = False,
    ) -> dict[int, Drafts]:
        drafts = Drafts([0] * self.num_guesses, "rehearsal", propose=self._depth)
        return {each.sequence_id: drafts for each in decodes}

    def planned(self, num_prompt_tokens: int, choose_s: float) -> None:
        pass

    def first(self, sequence: Sequence, start: int) -> int:
        return 0

    def came(self, sequence: Sequence, drafts: Drafts, sample: Sample) -> None:
        pass

    def hears(self, sequence: Sequence) -> bool:
        return True

    def ended(self, result: StepResult, num_unheard: int) -> None:
        if self.asking is not None:
            self.asking.ended(result)

    def timed(self, record: StepRecord) -> None:
        pass

    def left(self, sequence: Sequence) -> None:
        pass

    def forget_owner(self, owner: bytes) -> None:
        pass

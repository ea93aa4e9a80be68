"""State of one sequence in its grammar.

A state starts as a copy of the compiled grammar and accepts each token as it is appended. It can go
back (`rollback`, for rejected draft tokens), be dropped to save memory (`release`, when its
sequence is preempted), and is then rebuilt from the sequence's tokens. Worked example, the grammar
"ab" | "abc", tokens a b c:

    accept a   num_accepted 1
    accept b   num_accepted 2   is_satisfied, because "ab" is an answer; c may follow
    accept c   num_accepted 3   is_complete: nothing may follow, the answer ends
"""

import numpy as np
from llguidance import LLMatcher

from headway.engine.grammar.compiler import format_message


class Compiled:
    """Compiled grammar: a matcher that is copied but never advanced, and its first mask."""

    __slots__ = ("first_mask", "has_numbers", "num_bytes", "template", "vocab_size")

    def __init__(
        self,
        template: LLMatcher,
        first_mask: bytes,
        num_bytes: int,
        vocab_size: int,
        *,
        has_numbers: bool,
    ) -> None:
        self.template = template
        self.first_mask = first_mask
        self.num_bytes = num_bytes
        self.vocab_size = vocab_size
        """Width of the logits; a mask may be wider."""
        self.has_numbers = has_numbers
        """Whether its masks bound the digits of numbers."""

    def state(self) -> "GrammarState":
        """Return the state of a sequence without generated tokens."""
        return GrammarState(self)


class GrammarState:
    """Position of one sequence in its grammar; see the module's example."""

    __slots__ = ("_matcher", "compiled", "ended", "error", "num_accepted")

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self.num_accepted = 0
        self.error = ""
        """Error of a mask or a token, or ""; with an error the state is unusable."""
        self.ended = False
        """Whether the last token was an end token and not part of the answer."""
        self._matcher: LLMatcher | None = None

    def matcher(self, generated: list[int]) -> LLMatcher:
        """Return the matcher after `generated`; rebuilds it by replay if it was released."""
        if self._matcher is None:
            self._matcher = self.compiled.template.deep_copy()
            self.num_accepted = 0
            for token_id in generated:
                self.accept(token_id)
        return self._matcher

    @property
    def is_released(self) -> bool:
        return self._matcher is None

    def accept(self, token_id: int) -> bool:
        """Accept a token; returns False, and sets `error`, if the grammar does not allow it."""
        assert self._matcher is not None, "no mask was made for this token"
        if self.error:
            return False
        if not self._matcher.consume_token(token_id):
            self.fail()
            return False
        self.num_accepted += 1
        self.ended = self._matcher.stop_reason() == "EndOfSentence"
        return True

    def num_allowed(self, drafts: list[int]) -> int:
        """Return how many of `drafts` the grammar allows; the state does not change.

        0 without a matcher, because draft tokens do not justify building one.
        """
        if self._matcher is None or self.error:
            return 0
        return self._matcher.validate_tokens(drafts)

    def forced(self) -> list[int]:
        """Return the tokens of the only possible text, as the tokenizer splits it, or [].

        They are draft tokens: only a mask proves that no other token may begin that text.
        """
        if self._matcher is None or self.error or self._matcher.is_stopped():
            return []
        return self._matcher.compute_ff_tokens()

    def only_token(self) -> int | None:
        """Return the token that the next mask allows, if it allows exactly one.

        The mask is computed only where the text is forced: 10 µs for 152,000 tokens, else 2 µs.
        """
        if not self.forced():
            return None
        assert self._matcher is not None
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if self._matcher.is_error():
            return None
        (places,) = mask.nonzero()
        if len(places) != 1:
            return None
        word = int(mask[places[0]])
        token_id = 32 * int(places[0]) + word.bit_length() - 1
        return token_id if word.bit_count() == 1 and token_id < self.compiled.vocab_size else None

    def fail(self) -> None:
        """Take over the matcher's error."""
        assert self._matcher is not None
        self.error = format_message(self._matcher.get_error())

    @property
    def is_complete(self) -> bool:
        """Return whether no token can follow."""
        return self._matcher is not None and not self.error and self._matcher.is_stopped()

    @property
    def is_satisfied(self) -> bool:
        """Return whether the text is a complete answer, though more may be allowed."""
        return self._matcher is not None and not self.error and self._matcher.is_accepting()

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        assert 0 <= count <= self.num_accepted, (count, self.num_accepted)
        if count and self._matcher is not None:
            self._matcher.rollback(count)
            self.num_accepted -= count
            self.ended = False

    def release(self) -> None:
        """Drop the matcher; the next mask rebuilds it from the sequence's tokens."""
        self._matcher = None
        self.num_accepted = 0

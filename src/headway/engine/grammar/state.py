"""Where one sequence stands in its grammar.

A state begins as a copy of the compiled grammar and takes each token as it is appended. It can go
back (`rollback`, for drafts that are rejected), be given up to save memory (`release`, when its
sequence is preempted) and is then built again from the sequence's tokens. Worked example, the
grammar "ab" | "abc", tokens a b c:

    accept a   num_accepted 1
    accept b   num_accepted 2   is_satisfied, for "ab" is an answer; c may follow
    accept c   num_accepted 3   is_complete: nothing may follow, the answer ends by itself
"""

import numpy as np
from llguidance import LLMatcher

from headway.engine.grammar.compiler import format_message


class Compiled:
    """A grammar ready for use: a matcher that is copied, never advanced, and its first mask."""

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
        """The state of a sequence that has generated nothing."""
        return GrammarState(self)


class GrammarState:
    """One sequence's place in its grammar; see the module's example."""

    __slots__ = ("_matcher", "compiled", "ended", "error", "num_accepted")

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self.num_accepted = 0
        self.error = ""
        """What went wrong in a mask or a token, or ""; the state is of no use then."""
        self.ended = False
        """Whether the last token said that the answer is over, instead of being part of it."""
        self._matcher: LLMatcher | None = None

    def matcher(self, generated: list[int]) -> LLMatcher:
        """The matcher after `generated`; built and replayed when there is none."""
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
        """Take one more token; False when the grammar does not allow it, and `error` says why."""
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
        """How many of `drafts` the grammar allows in a row; the state stays where it is.

        0 where there is no matcher: drafts are not worth building one.
        """
        if self._matcher is None or self.error:
            return 0
        return self._matcher.validate_tokens(drafts)

    def forced(self) -> list[int]:
        """The tokens of the only text that can follow, as its tokenizer would cut it, or none.

        Each is a good guess; only a mask says that no other token may spell the same text.
        """
        if self._matcher is None or self.error or self._matcher.is_stopped():
            return []
        return self._matcher.compute_ff_tokens()

    def only_token(self) -> int | None:
        """The token that the next mask allows where it allows one; None where more may follow.

        The mask is looked at only where the text is forced: 10 µs for 152,000 tokens, else 2 µs.
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
        """Keep the matcher's error."""
        assert self._matcher is not None
        self.error = format_message(self._matcher.get_error())

    @property
    def is_complete(self) -> bool:
        """Whether no token can follow."""
        return self._matcher is not None and not self.error and self._matcher.is_stopped()

    @property
    def is_satisfied(self) -> bool:
        """Whether what was generated is a whole answer, though more may be allowed."""
        return self._matcher is not None and not self.error and self._matcher.is_accepting()

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        assert 0 <= count <= self.num_accepted, (count, self.num_accepted)
        if count and self._matcher is not None:
            self._matcher.rollback(count)
            self.num_accepted -= count
            self.ended = False

    def release(self) -> None:
        """Give up the matcher; the next mask builds it again from the sequence's tokens."""
        self._matcher = None
        self.num_accepted = 0

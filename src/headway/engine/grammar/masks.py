"""Grammar masks of one step, computed while the model runs.

`begin` starts computing on a thread of its own for the sequences with a grammar, each with its
draft tokens; `finish` waits for the result: one bit per vocabulary entry, for the next token and
after each draft token. A mask beyond llguidance's limits is left out, and the sequence's state has
the error; one after a draft token is left out silently, because that token may be rejected.
"""

from collections.abc import Sequence as Listing
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor

from headway.core.clock import Clock
from headway.core.plan import GrammarMasks
from headway.engine.grammar.digits import MAX_DIGITS, DigitLimit, Words
from headway.engine.sequence import Sequence

Ruled = tuple[Sequence, list[int]]
"""A sequence with a grammar, and its draft tokens in this step."""


class StepMasks:
    """Masks of one step, in computation."""

    __slots__ = ("_clock", "_future", "mask_s", "wait_s")

    def __init__(self, future: "Future[tuple[GrammarMasks, float]]", clock: Clock) -> None:
        self._future = future
        self._clock = clock
        self.mask_s = self.wait_s = 0.0
        """Seconds of computing the masks, and seconds of these that the step waited."""

    def finish(self) -> GrammarMasks:
        """Wait for the masks and return them by sequence id."""
        started_s = self._clock.now_s()
        masks, self.mask_s = self._future.result()
        self.wait_s = self._clock.now_s() - started_s
        return masks


class MaskMaker:
    """Computes masks for the vocabulary of `digits`, `threads` at a time."""

    def __init__(self, digits: DigitLimit, threads: int, clock: Clock) -> None:
        self._executor = LLExecutor(threads)
        self._thread = ThreadPoolExecutor(1, "masks")
        self._digits = digits
        self._num_words = digits.num_words
        self._clock = clock

    def begin(self, ruled: Listing[Ruled]) -> StepMasks:
        """Start computing the masks of `ruled`, sequences with a grammar and their draft tokens."""
        return StepMasks(self._thread.submit(self._compute, ruled), self._clock)

    def _compute(self, ruled: Listing[Ruled]) -> tuple[GrammarMasks, float]:
        started_s = self._clock.now_s()
        masks: dict[int, list[bytes]] = {}
        later = []
        for sequence, _ in ruled:
            state = sequence.grammar
            assert state is not None
            generated = sequence.tokens[sequence.num_prompt :] if state.is_released else []
            matcher = state.matcher(generated)
            if not state.error and state.num_accepted == 0:
                masks[sequence.sequence_id] = [state.compiled.first_mask]
            elif not state.error:
                later.append((sequence, state, matcher))
        if later:
            words = np.zeros((len(later), self._num_words), np.int32)
            pairs = [(matcher, row) for row, (_, _, matcher) in enumerate(later)]
            self._executor.unsafe_compute_mask_ptr(
                pairs, words.ctypes.data, words.shape[1] * words.itemsize, len(later)
            )
            possible: list[bool] = words.any(axis=1).tolist()  # type: ignore[assignment]
            for (sequence, state, matcher), row, any_allowed in zip(
                later, words, possible, strict=True
            ):
                if matcher.is_error():
                    state.fail()
                elif not any_allowed:
                    state.error = "no token of this model can follow"
                else:
                    self._bound(row, sequence, [])
                    masks[sequence.sequence_id] = [row.tobytes()]
        for sequence, drafts in ruled:
            if sequence.sequence_id in masks:
                masks[sequence.sequence_id] += self._behind(sequence, drafts)
        return GrammarMasks(masks), self._clock.now_s() - started_s

    def _bound(self, words: Words, sequence: Sequence, drafts: list[int]) -> None:
        """Apply the digit limit of JSON numbers to a mask after some draft tokens."""
        if sequence.grammar is not None and sequence.grammar.compiled.has_numbers:
            generated = sequence.tokens[
                max(sequence.num_prompt, len(sequence.tokens) - MAX_DIGITS) :
            ]
            self._digits.apply(words, generated + drafts)

    def _behind(self, sequence: Sequence, drafts: list[int]) -> list[bytes]:
        """Return a mask after each draft token; the state of the grammar does not change.

        After a token that the grammar rejects the masks allow nothing.
        """
        state = sequence.grammar
        assert state is not None
        words = np.zeros(self._num_words, np.int32)
        nothing = bytes(words.nbytes)
        if not drafts:
            return []
        matcher = state.matcher([])
        masks: list[bytes] = []
        for draft in drafts:
            if matcher.is_stopped() or not matcher.consume_token(draft):
                break
            if matcher.is_stopped():  # the answer ends with this draft
                masks.append(nothing)
                break
            words[:] = 0
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if matcher.is_error():
                break
            self._bound(words, sequence, drafts[: len(masks) + 1])
            masks.append(words.tobytes())
        if matcher.is_error():
            state.release()  # the next mask builds it again
        else:
            matcher.rollback(len(masks))
        return masks + [nothing] * (len(drafts) - len(masks))

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False)

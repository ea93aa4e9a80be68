"""Prefill and decode speed of one LLM in this process, for the scripts that measure it in turns.

A prompt of 512 random tokens gives prefill tokens/s; then 1, 8 or 32 sequences of that context are
decoded together.
"""

import random
import time

from headway import LLM, SamplingParams
from headway.core.request import Request

CONTEXT = 512
DECODE_STEPS = {1: 48, 4: 24, 8: 24, 32: 16}


class Rates:
    """Measures one LLM with prompts of `context` tokens."""

    def __init__(self, llm: LLM, context: int = CONTEXT) -> None:
        self.llm, self.context = llm, context
        self._random = random.Random(0)
        self._ids = iter(range(1, 10**9))

    def _add(self, num_seqs: int, max_tokens: int) -> None:
        vocab = self.llm.spec.vocab_size
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for _ in range(num_seqs):
            prompt = [self._random.randrange(vocab) for _ in range(self.context)]
            self.llm.engine.add(Request(next(self._ids), prompt, params))

    def prefill(self) -> float:
        """Tokens/s until the first token of one prompt."""
        self._add(1, 1)
        started = time.perf_counter()
        while self.llm.engine.has_work:
            self.llm.engine.step()
        return self.context / (time.perf_counter() - started)

    def decode(self, num_seqs: int) -> float:
        """Tokens/s while all sequences decode, prompts not counted."""
        self.begin(num_seqs)
        rate = self.steps(DECODE_STEPS[num_seqs])
        self.end()
        return rate

    def begin(self, num_seqs: int) -> None:
        """Compute the prompts of so many sequences, which then decode until `end`."""
        self._add(num_seqs, 10**6)
        scheduler = self.llm.engine.scheduler
        while scheduler.waiting or any(s.num_known - s.computed > 1 for s in scheduler.running):
            self.llm.engine.step()

    def steps(self, count: int) -> float:
        """Tokens/s of so many steps of the sequences that decode."""
        num_tokens = 0
        started = time.perf_counter()
        for _ in range(count):
            updates, _ = self.llm.engine.step()
            num_tokens += sum(len(update.token_ids) for update in updates)
        return num_tokens / (time.perf_counter() - started)

    def end(self) -> None:
        """Abort the sequences that decode."""
        for sequence in list(self.llm.engine.scheduler.running):
            self.llm.engine.abort(sequence.request.request_id)
        while self.llm.engine.has_work:
            self.llm.engine.step()

"""What a token takes of the machine: seconds of all steps, divided among prompts and answers.

1 s of decode steps with 100 tokens, 1 s of steps with 300 prompt and 100 answer tokens:
0.75 s / 300 a prompt token, 1.25 s / 200 an answer's
"""

from headway.core.records import StepRecord


class MachineTime:
    """Sums over the steps of one model; time in which nothing ran is nobody's."""

    def __init__(self) -> None:
        self._prompt_s = self._answer_s = 0.0
        self._prompt_tokens = self._answer_tokens = 0.0

    def add(self, record: StepRecord) -> None:
        """A step has run; a mixed one's time is divided by tokens."""
        prompt, decode = record.num_prefill_tokens, record.num_decode_tokens
        if not prompt + decode:
            return
        share = prompt / (prompt + decode)
        self._prompt_s += record.duration_s * share
        self._answer_s += record.duration_s * (1 - share)
        self._prompt_tokens += prompt
        decodes = decode - record.num_drafts - record.num_forced_rows
        self._answer_tokens += max(0.0, decodes * record.tokens_per_decode)

    def seconds(self, prompt_tokens: int, answer_tokens: int) -> float:
        """The machine's time of a request that computed so many tokens of its prompt."""
        prompt = prompt_tokens * self._prompt_s / self._prompt_tokens if self._prompt_tokens else 0
        answer = answer_tokens * self._answer_s / self._answer_tokens if self._answer_tokens else 0
        return prompt + answer

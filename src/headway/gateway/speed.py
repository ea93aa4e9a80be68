"""Service times of an upstream, in seconds: observed, or as a Headway server predicts them.

    time to first token = queued work + uncached prompt tokens of the request x seconds per token

The queued work is that of the gateway's own requests there: prompts without a first token, and one
token per answer, because running answers share the steps of the new prompt. If no row is free an
answer must end first, so answers count whole. A request counts from the moment it is assigned. A
Headway server also reports its queue, which includes requests of other gateways (the larger value
counts), and the predicted seconds per prompt token. The seconds per answer token are only observed
here, never reported: they price answers without usage, so no upstream may state them.
"""

from dataclasses import dataclass

from headway.core.clock import Clock
from headway.edge.relayed import LoadReport

SAMPLE_WEIGHT = 0.2
"""Weight of a new sample in the running means."""
TOKEN_S, ANSWER_S, BYTES_PER_TOKEN, ANSWER_TOKENS = 0.0005, 0.005, 4.0, 128.0
"""Initial values: a small model on a CPU, and English text."""
DEFAULT_ROWS = 16
"""Concurrent answers of an upstream that does not report them."""
MIN_BYTES_PER_TOKEN, MAX_BYTES_PER_TOKEN = 0.5, 16.0
"""Bounds of the bytes per prompt token, because estimates use it."""
MAX_LOAD_AGE_S = 3.0
"""Age in seconds up to which a reported queue is used; the queue shrinks with its age."""


@dataclass(slots=True, eq=False)
class Flight:
    """Attempt in flight: uncached prompt tokens and expected answer tokens."""

    uncached: float
    answer: float
    sent_s: float
    ahead: float = 0.0
    """Prompt tokens without a first token when it was sent, including its own."""
    began_s: float | None = None
    num_tokens: int = 0
    num_concurrent: int = 1
    """Requests in flight when it was sent, including itself."""


class Speed:
    """Learned service times of one upstream, and its attempts in flight."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.flights: dict[Flight, None] = {}
        self._token_s: float | None = None
        self.answer_s = ANSWER_S
        self.bytes_per_token = BYTES_PER_TOKEN
        self.answer_tokens = ANSWER_TOKENS
        self._load: LoadReport | None = None
        self._load_s = 0.0

    # ── estimates ───────────────────────────────────────────────────────────────────────────

    @property
    def token_s(self) -> float:
        """Return the seconds per prompt token."""
        if self._load is not None and self._load.token_s:
            return self._load.token_s
        return TOKEN_S if self._token_s is None else self._token_s

    @property
    def own_work_s(self) -> float:
        """Return the seconds of work that remain for this gateway's requests."""
        prompts = answers = 0.0
        for flight in self.flights:
            prompts += flight.uncached if flight.began_s is None else 0.0
            answers += max(0.0, flight.answer - flight.num_tokens)
        if len(self.flights) < self._rows:
            answers = min(answers, len(self.flights))
        return prompts * self.token_s + answers * self.answer_s

    @property
    def _rows(self) -> int:
        max_rows = self._load.max_rows if self._load is not None else 0
        return max_rows or DEFAULT_ROWS

    @property
    def queue_s(self) -> float:
        """Return the expected seconds until a new request's prompt begins."""
        reported_s = 0.0
        if self._load is not None:
            age_s = self._clock.now_s() - self._load_s
            reported_s = max(0.0, self._load.queue_s - age_s) if age_s < MAX_LOAD_AGE_S else 0.0
        return max(self.own_work_s, reported_s)

    def tokens_of(self, num_bytes: int) -> float:
        """Return the estimated tokens of a prompt of this size."""
        return num_bytes / self.bytes_per_token

    # ── events ──────────────────────────────────────────────────────────────────────────────

    def take(self, load: LoadReport) -> bool:
        """Take a load report; returns whether the upstream process restarted."""
        is_new = self._load is not None and self._load.boot != load.boot
        self._load, self._load_s = load, self._clock.now_s()
        return is_new

    def begin(self, uncached: float, answer: int | None) -> Flight:
        """Add an attempt; `answer` is the maximum number of its answer tokens."""
        expected = self.answer_tokens if answer is None else min(self.answer_tokens, answer)
        flight = Flight(
            uncached, expected, self._clock.now_s(), num_concurrent=len(self.flights) + 1
        )
        self.flights[flight] = None
        flight.ahead = sum(f.uncached for f in self.flights if f.began_s is None)
        return flight

    def began(self, flight: Flight) -> None:
        """Record the first token of an attempt."""
        if flight.began_s is not None:
            return
        flight.began_s = self._clock.now_s()
        if flight.ahead >= 1:
            sample = (flight.began_s - flight.sent_s) / flight.ahead
            self._token_s = running_mean(self._token_s, sample)

    def estimate_output(self, flight: Flight) -> float:
        """Estimate the answer tokens computed so far, from the time since the prompt was done."""
        prompts_s = flight.ahead * self.token_s
        since_s = self._clock.now_s() - flight.sent_s - prompts_s
        return max(0.0, since_s) / (self.answer_s * flight.num_concurrent)

    def end(self, flight: Flight, prompt_bytes: int = 0, prompt: int = 0, answer: int = 0) -> None:
        """Remove an attempt; the token counts are the upstream's, or 0. Safe to call twice."""
        if flight not in self.flights:
            return
        del self.flights[flight]
        if prompt and prompt_bytes:
            sample = min(max(prompt_bytes / prompt, MIN_BYTES_PER_TOKEN), MAX_BYTES_PER_TOKEN)
            self.bytes_per_token = running_mean(self.bytes_per_token, sample)
        if answer:
            self.answer_tokens = running_mean(self.answer_tokens, answer)
        if answer > 1 and flight.began_s is not None:
            concurrency = (flight.num_concurrent + len(self.flights) + 1) / 2
            share = (self._clock.now_s() - flight.began_s) / (answer - 1) / concurrency
            self.answer_s = running_mean(self.answer_s, share)

    def check_integrity(self) -> None:
        assert all(flight.uncached >= 0 and flight.answer >= 0 for flight in self.flights)
        assert self.queue_s >= 0 and self.token_s > 0


def running_mean(before: float | None, sample: float) -> float:
    """Return the running mean with a new sample; it starts with the first sample."""
    return sample if before is None else before + SAMPLE_WEIGHT * (sample - before)

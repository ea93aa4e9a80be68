"""What an upstream's work takes, in seconds: observed, or as a Headway server predicts it.

    wait = work before the newcomer + its uncached prompt tokens x seconds a prompt token

The work before it is that of our own requests there: prompts that have no first token, and a token
of each answer, for they share the newcomer's step. Where no row is free an answer must end first:
then answers count whole. A request counts from the moment it is chosen. A Headway server
also sends its queue, which holds the requests of other gateways (the longer of the two counts), and
the seconds of a prompt token that its engines predict. What an answer's token takes is observed
here alone: answers without a count are charged by it, so no upstream may state it.
"""

from dataclasses import dataclass

from headway.core.clock import Clock
from headway.edge.relayed import LoadReport

FOLLOWS = 0.2
"""How far a new sample moves what was learned."""
TOKEN_S, ANSWER_S, BYTES_PER_TOKEN, ANSWER_TOKENS = 0.0005, 0.005, 4.0, 128.0
"""Before anything is known: some small model on a CPU, and English."""
ROWS = 16
"""Answers at once, where an upstream does not tell it."""
LEAST_BYTES, MOST_BYTES = 0.5, 16.0
"""Bytes a prompt token is taken to have, whatever an upstream counts: estimates go by it."""
FRESH_S = 3.0
"""So long what an upstream said of its queue is believed; it runs down meanwhile."""


@dataclass(slots=True, eq=False)
class Flight:
    """One attempt at an upstream, while it lasts: its uncached prompt, what is expected of it."""

    uncached: float
    answer: float
    sent_s: float
    ahead: float = 0.0
    """Prompt tokens without a first token when it was sent, its own among them."""
    began_s: float | None = None
    num_tokens: int = 0
    num_concurrent: int = 1
    """Requests there when it was sent, itself among them."""


class Speed:
    """The learned figures of one upstream, and what is in flight there."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.flights: dict[Flight, None] = {}
        self._token_s: float | None = None
        self.answer_s = ANSWER_S
        self.bytes_per_token = BYTES_PER_TOKEN
        self.answer_tokens = ANSWER_TOKENS
        self._load: LoadReport | None = None
        self._load_s = 0.0

    # ── what is known ───────────────────────────────────────────────────────────────────────

    @property
    def token_s(self) -> float:
        """Seconds a prompt token takes."""
        if self._load is not None and self._load.token_s:
            return self._load.token_s
        return TOKEN_S if self._token_s is None else self._token_s

    @property
    def own_s(self) -> float:
        """Seconds of work that our own requests there have yet to have."""
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
        return max_rows or ROWS

    @property
    def queue_s(self) -> float:
        """Seconds until a newcomer's prompt is begun."""
        reported_s = 0.0
        if self._load is not None:
            age_s = self._clock.now_s() - self._load_s
            reported_s = max(0.0, self._load.queue_s - age_s) if age_s < FRESH_S else 0.0
        return max(self.own_s, reported_s)

    def tokens_of(self, num_bytes: int) -> float:
        """Bytes of a prompt as tokens."""
        return num_bytes / self.bytes_per_token

    # ── what happens ────────────────────────────────────────────────────────────────────────

    def take(self, load: LoadReport) -> bool:
        """What the upstream says of itself; True when it is another process than before."""
        is_new = self._load is not None and self._load.boot != load.boot
        self._load, self._load_s = load, self._clock.now_s()
        return is_new

    def begin(self, uncached: float, answer: int | None) -> Flight:
        """A request is sent there; `answer` is the most tokens it may be answered with."""
        expected = self.answer_tokens if answer is None else min(self.answer_tokens, answer)
        flight = Flight(
            uncached, expected, self._clock.now_s(), num_concurrent=len(self.flights) + 1
        )
        self.flights[flight] = None
        flight.ahead = sum(f.uncached for f in self.flights if f.began_s is None)
        return flight

    def began(self, flight: Flight) -> None:
        """Its first token is here."""
        if flight.began_s is not None:
            return
        flight.began_s = self._clock.now_s()
        if flight.ahead >= 1:
            sample = (flight.began_s - flight.sent_s) / flight.ahead
            self._token_s = follow(self._token_s, sample)

    def made(self, flight: Flight) -> float:
        """Tokens of an answer that has not come, by the pace there since its prompt was done."""
        prompts_s = flight.ahead * self.token_s
        since_s = self._clock.now_s() - flight.sent_s - prompts_s
        return max(0.0, since_s) / (self.answer_s * flight.num_concurrent)

    def end(self, flight: Flight, prompt_bytes: int = 0, prompt: int = 0, answer: int = 0) -> None:
        """It is over; the counts are the upstream's own where it told them. Safe to call twice."""
        if flight not in self.flights:
            return
        del self.flights[flight]
        if prompt and prompt_bytes:
            sample = min(max(prompt_bytes / prompt, LEAST_BYTES), MOST_BYTES)
            self.bytes_per_token = follow(self.bytes_per_token, sample)
        if answer:
            self.answer_tokens = follow(self.answer_tokens, answer)
        if answer > 1 and flight.began_s is not None:
            concurrency = (flight.num_concurrent + len(self.flights) + 1) / 2
            share = (self._clock.now_s() - flight.began_s) / (answer - 1) / concurrency
            self.answer_s = follow(self.answer_s, share)

    def check_integrity(self) -> None:
        assert all(flight.uncached >= 0 and flight.answer >= 0 for flight in self.flights)
        assert self.queue_s >= 0 and self.token_s > 0


def follow(before: float | None, sample: float) -> float:
    """A running mean that begins with its first sample."""
    return sample if before is None else before + FOLLOWS * (sample - before)

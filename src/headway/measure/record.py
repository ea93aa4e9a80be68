"""The raw record of a run: every exchange with its timestamps. All figures are derived from it.

Times are seconds since the run began, on the client's monotonic clock.
"""

import msgspec


class Exchange(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request and its answer on the client's side.

    `chunk_s[i]` is when the i-th chunk with content was read, `chunk_tokens[i]` its number of
    tokens; None where the server does not say. `error` is the reason why it failed, "" when it did
    not.
    """

    id: int
    scheduled_s: float
    asked_prompt_tokens: int
    asked_output_tokens: int
    service_class: str = "default"
    conversation: int = 0
    turn: int = 0
    sent_s: float | None = None
    headers_s: float | None = None
    published_s: float | None = None
    ended_s: float | None = None
    chunk_s: list[float] = []
    chunk_tokens: list[int] | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    status: int | None = None
    error: str = ""
    message: str = ""

    @property
    def ok(self) -> bool:
        """Return whether a whole answer was received."""
        return not self.error and self.ended_s is not None

    @property
    def num_output(self) -> int:
        """Return the tokens of the answer: from the usage, else from the chunks, else one a
        chunk."""
        if self.output_tokens is not None:
            return self.output_tokens
        return len(self.chunk_s) if self.chunk_tokens is None else sum(self.chunk_tokens)

    @property
    def num_prompt(self) -> int:
        """Return the tokens of the prompt: from the usage, else as many as were asked for."""
        return self.asked_prompt_tokens if self.prompt_tokens is None else self.prompt_tokens


class ClientCost(msgspec.Struct, kw_only=True):
    """The client's own cost: CPU seconds, wall seconds, and how late its loop woke up.

    `spent_s` has (time, CPU seconds until then), about once a second.
    """

    cpu_s: float
    wall_s: float
    late_s: list[float] = []
    spent_s: list[tuple[float, float]] = []


class LoadRecord(msgspec.Struct, kw_only=True):
    """The load. Requests scheduled in [`from_s`, `to_s`) count; the rest is cut."""

    loop: str
    arrivals: str
    workload: str
    seed: int
    span_s: float
    from_s: float
    to_s: float
    rate: float | None = None
    concurrency: int | None = None
    speed: float = 1.0
    scale: float = 1.0
    slos: dict[str, str] = {}
    attainment: float = 0.9
    price_per_hour: float | None = None


class ServerRecord(msgspec.Struct, kw_only=True):
    """The measured server, the features it accepts, and its own metrics; see `bench.scrape`."""

    url: str
    model: str
    endpoint: str
    features: list[str] = []
    sampled_s: list[float] = []
    gauges: dict[str, list[float | None]] = {}
    counters: dict[str, float] = {}


class RecordedRun(msgspec.Struct, kw_only=True):
    """A raw run: what the JSON holds and what every report is derived from.

    `started_at` is the start in seconds since 1970, `started_s` the same on the monotonic clock: on
    one machine it relates these timestamps to a server's.
    """

    started_at: float
    started_s: float
    load: LoadRecord
    server: ServerRecord
    client: ClientCost
    exchanges: list[Exchange]

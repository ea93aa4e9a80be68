"""When the tokens of one request left: TTFT, gaps and the whole, as they are defined.

Worked example, arrived at 0, tokens leave at 2, 3 and two together at 5: TTFT 2, gaps 1, 2, 0,
e2e 5; the gaps add up to e2e − TTFT and there is one less than tokens.
"""

from headway.core.clock import Clock
from headway.telemetry.registry import Registry


class Timeline:
    """One request's sequences on the server's clock."""

    __slots__ = ("_clock", "_last_s", "_registry", "arrived_s", "first_s")

    def __init__(self, clock: Clock, registry: Registry, arrived_s: float) -> None:
        self._clock = clock
        self._registry = registry
        self.arrived_s = arrived_s
        self.first_s: float | None = None
        self._last_s: dict[int, float] = {}

    def tokens_left(self, index: int, count: int) -> None:
        """`count` tokens of sequence `index` left now, in one piece."""
        if count == 0:
            return
        now_s = self._clock.now_s()
        registry = self._registry
        if self.first_s is None:
            self.first_s = now_s
            registry.ttft.observe(now_s - self.arrived_s)
        last_s = self._last_s.get(index)
        self._last_s[index] = now_s
        if last_s is not None:
            registry.itl.observe(now_s - last_s)
        for _ in range(count - 1):
            registry.itl.observe(0.0)

    def finished(self, reason: str) -> None:
        """A sequence ended."""
        self._registry.on_finish(reason)

    def complete(self, prompt_tokens: int, generated_tokens: int) -> None:
        """The request is over; counts its tokens."""
        self._registry.prompt_tokens.inc(prompt_tokens)
        self._registry.generation_tokens.inc(generated_tokens)
        self._registry.e2e.observe(self._clock.now_s() - self.arrived_s)

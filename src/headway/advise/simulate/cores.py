"""The cores of one machine, which engines, the server's process and a load generator share evenly.

Each computing thread has an equal share, at most one core. Worked example, two cores, an engine of
one thread: its step of 8 ms begins when the server has 2 ms of chunks to write and the client 2 ms
to read. Three threads want two cores, so each has two thirds of one for 3 ms, in which 2 ms of each
are done; the other 6 ms of the step follow alone: it ends after 9 ms.

Engines also slow each other by caches and memory (`FrontendTimes.interference`): a step of 8 ms
beside which another engine is in a step takes 10 ms where each other engine adds a quarter, with
cores enough.

Server and client are a FIFO queue each. The time of their work is known when it arrives, by the
threads that compute at that moment; the time of a step follows from all events until it ends.
"""

from dataclasses import dataclass

from headway.advise.simulate.front import CLIENT, SERVER, FrontendTimes

MIN_STEP_S = 1e-9
"""A step with less remaining time has ended, but for rounding."""


@dataclass(slots=True)
class FifoServer:
    """Single-server FIFO queue: models one process on one core."""

    free_s: float = 0.0
    """Time at which all work that has arrived is done."""

    def wait_s(self, at_s: float) -> float:
        """Return the waiting time of work that arrives at `at_s`."""
        return max(self.free_s - at_s, 0.0)

    def work(self, at_s: float, seconds: float) -> None:
        """Add work of `seconds` that arrives at `at_s`."""
        self.free_s = max(self.free_s, at_s) + seconds


class SharedCores:
    """The threads that compute on one machine, and their speed. Times are the world's; they never
    go back."""

    def __init__(self, front: FrontendTimes, threads: int, engines: int = 1) -> None:
        """Share the cores of `front` among `engines` engines of `threads` threads each, server and
        client."""
        self.front, self.num, self.threads = front, front.num_cores, threads
        self.num_frontend_threads = 1 + front.has_client
        self.server, self.client = FifoServer(), FifoServer()
        self.are_scarce = 0 < self.num < threads * engines + self.num_frontend_threads
        """Whether more threads than cores may compute at once."""
        self.are_shared = self.are_scarce or (engines > 1 and front.interference > 0)
        """Whether other work can make a step longer."""
        computes = any(getattr(front, name) for name in (*SERVER, *CLIENT))
        self.can_delay = self.are_shared or computes
        """Whether anything ever waits: not where neither server nor client computes."""
        self._remaining_s: dict[int, float] = {}
        """Engine → the remaining time of its step, in seconds on cores of its own."""
        self._at_s = 0.0

    # ── the server's process and the client ─────────────────────────────────────────────────

    def slowdown(self) -> float:
        """Return the factor by which all work is slower while the engines in a step, server and
        client compute."""
        if not self.are_scarce:
            return 1.0
        return max(
            (self.threads * len(self._remaining_s) + self.num_frontend_threads) / self.num, 1.0
        )

    def send_time_s(self, now_s: float) -> float:
        """Return when a request that is due now leaves the client."""
        leaves_s = now_s + self.client.wait_s(now_s)
        self._advance(now_s)
        self.client.work(now_s, self.slowdown() * self.front.client_request_cpu_s)
        return leaves_s

    def receive_time_s(self, now_s: float) -> float:
        """Return when the server begins to handle a request that arrives now."""
        if not self.can_delay:
            return now_s
        served_s = now_s + self.server.wait_s(now_s)
        self._advance(now_s)
        self.server.work(now_s, self.slowdown() * self.front.request_cpu_s)
        return served_s

    def read_s(self, now_s: float, count: int) -> list[float]:
        """Return when clients read each of `count` updates of a step that has ended now."""
        if not self.can_delay:
            return self.front.read_s(now_s, count, 0.0, self.front.row_s)
        self._advance(now_s)
        front, slowdown = self.front, self.slowdown()
        out_s = now_s + self.server.wait_s(now_s)
        late_s = out_s - now_s + self.client.wait_s(out_s)
        row_s = max(front.row_s, slowdown * front.token_cpu_s, slowdown * front.client_cpu_s)
        if count:
            self.server.work(now_s, slowdown * (front.step_cpu_s + count * front.token_cpu_s))
            self.client.work(
                out_s, slowdown * (front.client_step_cpu_s + count * front.client_cpu_s)
            )
        return front.read_s(now_s, count, late_s, row_s)

    # ── the engines ─────────────────────────────────────────────────────────────────────────

    def begin(self, engine: int, now_s: float, seconds: float) -> float:
        """Return the predicted end of a step that begins now and would take `seconds` alone."""
        self._advance(now_s)
        self._remaining_s[engine] = seconds
        return self._ends_s(now_s, seconds) if self.are_shared else now_s + seconds

    def ends_s(self, engine: int, now_s: float) -> float:
        """Return the predicted end of a running step; now, where it has ended."""
        self._advance(now_s)
        remaining_s = self._remaining_s[engine]
        return now_s if remaining_s < MIN_STEP_S else self._ends_s(now_s, remaining_s)

    def end(self, engine: int, now_s: float) -> None:
        """Remove the engine's step: it computes nothing from now on."""
        self._advance(now_s)
        self._remaining_s.pop(engine, None)

    def _phases(self) -> tuple[float, float, tuple[float, float, float]]:
        """Return (end of the first and of the last of server and client; the speed of engines while
        both compute, while one does, while none does)."""
        first_s, last_s = self.server.free_s, self.client.free_s
        if first_s > last_s:
            first_s, last_s = last_s, first_s
        num_threads, num_frontend_threads = (
            self.threads * len(self._remaining_s),
            max(len(self._remaining_s) - 1, 0),
        )
        cores = self.num if self.are_scarce else num_threads + 2
        slowdown = 1 + self.front.interference * num_frontend_threads
        both, one, none = (min(1.0, cores / (num_threads + more)) / slowdown for more in (2, 1, 0))
        return first_s, last_s, (both, one, none)

    def _advance(self, now_s: float) -> None:
        """Advance all steps until now."""
        at_s, self._at_s = self._at_s, max(now_s, self._at_s)
        if not self.are_shared or not self._remaining_s or now_s <= at_s:
            return
        first_s, last_s, (both, one, none) = self._phases()
        first_s = min(max(first_s, at_s), now_s)
        last_s = min(max(last_s, at_s), now_s)
        done_s = (first_s - at_s) * both + (last_s - first_s) * one + (now_s - last_s) * none
        for engine in self._remaining_s:
            self._remaining_s[engine] -= done_s

    def _ends_s(self, now_s: float, seconds: float) -> float:
        """Return when `seconds` of work are done, if nothing else arrives or ends."""
        first_s, last_s, speeds = self._phases()
        for until_s, speed in zip((first_s, last_s), speeds, strict=False):
            done_s = max(until_s - now_s, 0.0) * speed
            if done_s >= seconds:
                return now_s + seconds / speed
            seconds, now_s = seconds - done_s, max(until_s, now_s)
        return now_s + seconds / speeds[2]

"""The cores of one machine: engines, the server's process and a load generator share them evenly.

Each thread that computes has as much as any other, and nobody more than one core. Worked example,
two cores, an engine of one thread: its step of 8 ms begins when the server has 2 ms of chunks to
write and the client 2 ms to read. Three want two cores, so each has two thirds of one for 3 ms, in
which 2 ms of each are done; the other 6 ms of the step follow alone: it ends after 9 ms.

Engines slow each other besides, by caches and memory (`Front.beside`): a step of 8 ms that another
engine is in a step beside takes 10 ms where each other engine adds a quarter, with cores enough.

Server and client are a queue each: who comes before the work of those before is done waits. What
they take is known when it comes, by who computes then; what a step takes follows from all that
happens until it ends.
"""

from dataclasses import dataclass

from headway.advise.simulate.front import CLIENT, SERVER, Front

LEAST_S = 1e-9
"""Of a step that is over but for rounding."""


@dataclass(slots=True)
class Desk:
    """Who serves all, one after another: a process of one core."""

    free_s: float = 0.0
    """When it has done all that has come."""

    def wait_s(self, at_s: float) -> float:
        """How long what comes then waits for what came before."""
        return max(self.free_s - at_s, 0.0)

    def work(self, at_s: float, seconds: float) -> None:
        """What came then takes so long."""
        self.free_s = max(self.free_s, at_s) + seconds


class Cores:
    """Who computes on one machine, and how fast. Times are the world's; they never go back."""

    def __init__(self, front: Front, threads: int, engines: int = 1) -> None:
        """Of so many engines, each of so many threads, beside what `front` takes."""
        self.front, self.num, self.threads = front, front.num_cores, threads
        self.others = 1 + front.has_client
        self.server, self.client = Desk(), Desk()
        self.are_scarce = 0 < self.num < threads * engines + self.others
        """Whether it can happen that more compute than there are cores."""
        self.are_shared = self.are_scarce or (engines > 1 and front.beside > 0)
        """Whether what others do can make a step longer."""
        computes = any(getattr(front, name) for name in (*SERVER, *CLIENT))
        self.matter = self.are_shared or computes
        """Whether anything ever waits: not where neither server nor client computes."""
        self._left: dict[int, float] = {}
        """Engine → what its step has still to do, in seconds of cores of its own."""
        self._at_s = 0.0

    # ── the server's process and the client ─────────────────────────────────────────────────

    def slower(self) -> float:
        """By how much all is slower while the engines of this moment, server and client compute."""
        if not self.are_scarce:
            return 1.0
        return max((self.threads * len(self._left) + self.others) / self.num, 1.0)

    def sent(self, now_s: float) -> float:
        """When a request leaves that the client is to send now."""
        leaves_s = now_s + self.client.wait_s(now_s)
        self._advance(now_s)
        self.client.work(now_s, self.slower() * self.front.client_request_cpu_s)
        return leaves_s

    def received(self, now_s: float) -> float:
        """When the server gets to a request that arrives now."""
        if not self.matter:
            return now_s
        served_s = now_s + self.server.wait_s(now_s)
        self._advance(now_s)
        self.server.work(now_s, self.slower() * self.front.request_cpu_s)
        return served_s

    def read_s(self, now_s: float, count: int) -> list[float]:
        """A step has ended with so many updates: when clients read each."""
        if not self.matter:
            return self.front.read_s(now_s, count, 0.0, self.front.row_s)
        self._advance(now_s)
        front, slower = self.front, self.slower()
        out_s = now_s + self.server.wait_s(now_s)
        late_s = out_s - now_s + self.client.wait_s(out_s)
        row_s = max(front.row_s, slower * front.token_cpu_s, slower * front.client_cpu_s)
        if count:
            self.server.work(now_s, slower * (front.step_cpu_s + count * front.token_cpu_s))
            self.client.work(out_s, slower * (front.client_step_cpu_s + count * front.client_cpu_s))
        return front.read_s(now_s, count, late_s, row_s)

    # ── the engines ─────────────────────────────────────────────────────────────────────────

    def begin(self, engine: int, now_s: float, seconds: float) -> float:
        """When a step ends that begins now and would take so long alone, as things stand."""
        self._advance(now_s)
        self._left[engine] = seconds
        return self._ends_s(now_s, seconds) if self.are_shared else now_s + seconds

    def ends_s(self, engine: int, now_s: float) -> float:
        """The same of a step that has begun; now, where it is over."""
        self._advance(now_s)
        left_s = self._left[engine]
        return now_s if left_s < LEAST_S else self._ends_s(now_s, left_s)

    def end(self, engine: int, now_s: float) -> None:
        """It computes nothing from now on."""
        self._advance(now_s)
        self._left.pop(engine, None)

    def _pieces(self) -> tuple[float, float, tuple[float, float, float]]:
        """(until when server and client compute, until when one of them does, how fast engines are
        while both do, one does, none does)."""
        first_s, last_s = self.server.free_s, self.client.free_s
        if first_s > last_s:
            first_s, last_s = last_s, first_s
        wanted, others = self.threads * len(self._left), max(len(self._left) - 1, 0)
        cores = self.num if self.are_scarce else wanted + 2
        slower = 1 + self.front.beside * others
        both, one, none = (min(1.0, cores / (wanted + more)) / slower for more in (2, 1, 0))
        return first_s, last_s, (both, one, none)

    def _advance(self, now_s: float) -> None:
        """Let all steps go on until now."""
        at_s, self._at_s = self._at_s, max(now_s, self._at_s)
        if not self.are_shared or not self._left or now_s <= at_s:
            return
        first_s, last_s, (both, one, none) = self._pieces()
        first_s = min(max(first_s, at_s), now_s)
        last_s = min(max(last_s, at_s), now_s)
        done_s = (first_s - at_s) * both + (last_s - first_s) * one + (now_s - last_s) * none
        for engine in self._left:
            self._left[engine] -= done_s

    def _ends_s(self, now_s: float, seconds: float) -> float:
        """When so much is done, if nobody else comes or goes."""
        first_s, last_s, speeds = self._pieces()
        for until_s, speed in zip((first_s, last_s), speeds, strict=False):
            done_s = max(until_s - now_s, 0.0) * speed
            if done_s >= seconds:
                return now_s + seconds / speed
            seconds, now_s = seconds - done_s, max(until_s, now_s)
        return now_s + seconds / speeds[2]

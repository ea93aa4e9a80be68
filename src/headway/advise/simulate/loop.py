"""The event loop around simulated servers: arrivals, turns, retries, refusals, client time-outs.

One heap of events, one clock for all. A request is scheduled before the run, as by the load
generator, and is timed from then; a later turn of a conversation is due when the answer before it
was read and the think time has passed. The same traffic, seed and truth give the same exchanges, to
the byte.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np

from headway.advise.simulate.cores import SharedCores
from headway.advise.simulate.front import FrontendTimes
from headway.advise.simulate.replica import (
    FinishedStep,
    SimulatedAdmission,
    SimulatedJob,
    SimulatedReplica,
)
from headway.bench.prompts import IdWriter
from headway.bench.workload import Conversation, Turn
from headway.config.resolve import Settings
from headway.core.errors import RequestError
from headway.core.request import Request, SamplingParams, SequenceUpdate
from headway.measure.record import Exchange

FIRST_RETRY_PAUSE_S = 0.5
"""Pause before the first retry where the refusal names none; doubled for the next, as by OpenAI's
and Anthropic's clients."""


DRAW_BATCH = 64
"""Conversations whose first prompts are drawn together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """The behaviour of the clients.

    `answer_limit` is the client's `max_tokens`: an engine plans by it, since it cannot know where
    an answer ends; with None the client sends the length itself, as `headway bench` does. `retries`
    is the number of retries after a 429 or a 503. After `timeout_s` without a whole answer a client
    leaves.
    """

    answer_limit: int | None = None
    retries: int = 0
    timeout_s: float = 600.0
    concurrency: int | None = None
    until_s: float | None = None
    """Time at which a closed loop begins no more conversations; None: each conversation runs
    once."""


@dataclass(slots=True)
class ConversationState:
    """A conversation in progress: its tokens, and the next turn."""

    number: int
    conversation: Conversation
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    turn: int = 0


class World:
    """Replicas, their clients, and time."""

    def __init__(
        self,
        replicas: list[SimulatedReplica],
        front: FrontendTimes,
        writer: IdWriter,
        clients: Clients,
        seed: int,
        *,
        apart: bool = False,
    ) -> None:
        """Take replicas as engines of one server on one machine; with `apart`, as servers on
        machines of their own, each with a front like this."""
        self.replicas, self.writer, self.clients = replicas, writer, clients
        self.front, self.apart = front, apart
        threads, count = threads_of(replicas[0].served.settings), len(replicas)
        if apart:
            self.cores = [SharedCores(front, threads) for _ in replicas]
            """The cores that each replica computes on."""
        else:
            self.cores = [SharedCores(front, threads, count)] * count
        """Those that each replica computes on."""
        self.door = SimulatedAdmission(replicas[0].served, replicas)
        self.exchanges: list[Exchange] = []
        self.num_retries = 0
        self._random = np.random.default_rng([seed, 17])
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._next_id = 0
        self._waiting: deque[tuple[float, ClientRequest, int]] = deque()
        """(when the client leaves, its exchange, the number of its request), in this order."""
        self._in_flight: dict[int, FinishedStep] = {}
        """The step that each engine is in, where cores are shared."""
        self._upcoming: Iterator[tuple[int, Conversation]] = iter(())
        self._talks: list[Conversation] = []
        self._num_drawn = 0
        """Number of conversations whose first prompts are drawn."""

    def at(self, at_s: float, act: Callable[..., None], *given: Any) -> None:
        """Schedule a call of `act` at `at_s`."""
        heapq.heappush(self._heap, (at_s, self._order, act, given))
        self._order += 1

    def run(self, conversations: list[Conversation]) -> list[Exchange]:
        """Run all conversations to their ends; return the exchanges in the order in which they were
        sent."""
        self._talks = conversations
        if self.clients.concurrency is None:
            for number, conversation in enumerate(conversations):
                self.at(conversation.at_s, self._begin, number, conversation, conversation.at_s)
        else:
            again = conversations if self.clients.until_s is None else cycle(conversations)
            self._upcoming = enumerate(again)
            for _ in range(self.clients.concurrency):
                self.at(0.0, self._work, 0.0)
        while self._heap:
            _, _, act, given = heapq.heappop(self._heap)
            act(*given)
        return self.exchanges

    # ── clients ────────────────────────────────────────────────────────────────────────────

    def _work(self, now_s: float) -> None:
        """Start the next conversation of a client of a closed loop."""
        if self.clients.until_s is not None and now_s >= self.clients.until_s:
            return
        following = next(self._upcoming, None)
        if following is not None:
            self._begin(*following, now_s)

    def _begin(self, number: int, conversation: Conversation, at_s: float) -> None:
        if number >= self._num_drawn:
            self._draw(number)
        self._send_turn(ConversationState(number, conversation), at_s)

    def _draw(self, number: int) -> None:
        """Draw the first prompts of this conversation and of some that follow."""
        self._num_drawn = number + DRAW_BATCH
        begin = number % max(len(self._talks), 1)
        first = [talk.turns[0] for talk in self._talks[begin : begin + DRAW_BATCH]]
        self.writer.prefetch([turn.system + turn.prompt for turn in first])

    def _send_turn(self, talk: ConversationState, at_s: float) -> None:
        """Send the next turn: all earlier tokens, and the new ones."""
        turn = talk.conversation.turns[talk.turn]
        new = self.writer.ids(turn.system + turn.prompt)
        talk.token_ids += new
        talk.num_prompt_tokens += len(new)
        x = Exchange(
            id=len(self.exchanges),
            scheduled_s=at_s,
            sent_s=at_s,
            service_class=talk.conversation.service_class,
            conversation=talk.number,
            turn=talk.turn,
            asked_prompt_tokens=talk.num_prompt_tokens,
            asked_output_tokens=turn.output_tokens,
        )
        self.exchanges.append(x)
        self._send(ClientRequest(self, talk, turn, x), at_s, 0)

    def _send(self, asking: "ClientRequest", at_s: float, tries: int) -> None:
        if self.front.client_request_cpu_s and not self.apart:
            self.at(at_s, self._depart, asking, at_s, tries)
        else:
            self.at(self.front.arrives_s(at_s), self._arrive, asking, tries)

    def _depart(self, asking: "ClientRequest", at_s: float, tries: int) -> None:
        """Let a client on the server's machine send a request when it has done all earlier work."""
        asking.sent_s = self.cores[0].send_time_s(at_s)
        if not tries:
            asking.x.sent_s = asking.sent_s
        self.at(self.front.arrives_s(asking.sent_s), self._arrive, asking, tries)

    def end_exchange(self, talk: ConversationState, x: Exchange, at_s: float) -> None:
        """Schedule the next turn after an exchange, or the next conversation of a closed loop."""
        talk.turn += 1
        turns = talk.conversation.turns
        if x.ok and talk.turn < len(turns):
            due_s = at_s + turns[talk.turn].think_s
            self.at(due_s, self._send_turn, talk, due_s)
        elif self.clients.concurrency is not None:
            self.at(at_s, self._work, at_s)

    # ── servers ────────────────────────────────────────────────────────────────────────────

    def _arrive(self, asking: "ClientRequest", tries: int) -> None:
        """Receive a whole body: it is judged when all earlier ones have been served."""
        at_s = self.front.arrives_s(asking.sent_s)
        now_s = at_s if self.apart else self.cores[0].receive_time_s(at_s)
        if now_s > at_s:
            self.at(now_s, self._judge, asking, tries, now_s)
        else:
            self._judge(asking, tries, now_s)

    def _judge(self, asking: "ClientRequest", tries: int, now_s: float) -> None:
        """Admit the request or refuse it."""
        prompt = list(asking.talk.token_ids)
        sampling = asking.sampling(self._next_id)
        try:
            ticket = self.door.arrive(now_s, asking.x.service_class, prompt, sampling)
        except RequestError as error:
            asking.refused(error, self.front.refused_s(now_s), tries)
            return
        replica = self.replicas[ticket.engine]
        self._next_id += 1
        request = Request(
            self._next_id,
            prompt,
            sampling,
            self.door.caller.principal,
            arrived_s=replica.started_s + now_s,
            terms=ticket.terms(self.door.class_of(asking.x.service_class).terms()),
        )
        if sampling.seed is not None and not sampling.ignore_eos:
            replica.lengths[sampling.seed] = asking.turn.output_tokens
        served_s = self.cores[ticket.engine].receive_time_s(now_s) if self.apart else now_s
        due_s = served_s + self.front.judging_s(len(prompt))
        replica.submit(
            due_s,
            SimulatedJob(
                request=request,
                ticket=ticket,
                chunk_s=asking.x.chunk_s,
                chunk_tokens=asking.chunk_tokens,
                answer=asking.answer,
                began=asking.began,
                ended=asking.ended,
                fail=lambda error, at_s: asking.refused(error, self.front.refused_s(at_s), tries),
            ),
        )
        self.at(due_s, self._step, replica, due_s)
        leaves_s = asking.sent_s + self.clients.timeout_s
        if not self._waiting:
            self.at(leaves_s, self._time_out, leaves_s)
        self._waiting.append((leaves_s, asking, request.request_id))

    def _time_out(self, now_s: float) -> None:
        """Let clients leave that have waited too long."""
        while self._waiting:
            at_s, asking, number = self._waiting[0]
            replica = next((each for each in self.replicas if number in each.jobs), None)
            if replica is not None and not asking.is_over:
                if at_s > now_s:
                    self.at(at_s, self._time_out, at_s)
                    return
                replica.drop(at_s, number)
                asking.failed("timeout", "", at_s)
                self.at(at_s, self._step, replica, at_s)
            self._waiting.popleft()

    def _step(self, replica: SimulatedReplica, now_s: float) -> None:
        """Run a step of an engine that has work."""
        due_s = replica.next_s(now_s)
        if due_s is None:
            return
        if due_s > now_s:
            if not replica.inbox:  # a message in the inbox has an event of its own
                self.at(due_s, self._step, replica, due_s)
            return
        stepped = replica.step(now_s)
        if stepped is None:
            return
        number = self.replicas.index(replica)
        if self.cores[number].are_shared and stepped.record is not None:
            self._in_flight[number] = stepped
            stepped.ends_s = self.cores[number].begin(number, now_s, stepped.ends_s - now_s)
        self.at(stepped.ends_s, self._check_step_end, replica, stepped, stepped.ends_s)

    def _check_step_end(
        self, replica: SimulatedReplica, stepped: FinishedStep, due_s: float
    ) -> None:
        """End a step at its predicted end, unless other work on its cores has moved that end
        since."""
        number = self.replicas.index(replica)
        cores = self.cores[number]
        if not cores.are_shared or stepped.record is None:
            self._finish_step(replica, stepped)
            return
        if self._in_flight.get(number) is not stepped or stepped.ends_s != due_s:
            return
        stepped.ends_s = cores.ends_s(number, due_s)
        if stepped.ends_s > due_s:
            self.at(stepped.ends_s, self._check_step_end, replica, stepped, stepped.ends_s)
            return
        del self._in_flight[number]
        self._finish_step(replica, stepped)
        if number not in self._in_flight:
            self._go_idle(number, due_s)

    def _go_idle(self, number: int, now_s: float) -> None:
        """Remove an idle engine from its cores, which makes the other engines on them faster."""
        cores = self.cores[number]
        cores.end(number, now_s)
        for other, stepped in self._in_flight.items():
            if self.cores[other] is cores:
                stepped.ends_s = ends_s = cores.ends_s(other, now_s)
                self.at(ends_s, self._check_step_end, self.replicas[other], stepped, ends_s)

    def _finish_step(self, replica: SimulatedReplica, stepped: FinishedStep) -> None:
        """End a step: its tokens are sent, and the next step begins."""
        number, ends_s = self.replicas.index(replica), stepped.ends_s
        self.door.on_step(number, stepped)
        replica.finish(stepped, self.cores[number].read_s(ends_s, len(stepped.updates)))
        self._step(replica, ends_s)


class ClientRequest:
    """One exchange on the client's side."""

    __slots__ = ("_world", "answer", "chunk_tokens", "is_over", "sent_s", "talk", "turn", "x")

    def __init__(self, world: World, talk: ConversationState, turn: Turn, x: Exchange) -> None:
        self._world, self.talk, self.turn, self.x = world, talk, turn, x
        self.sent_s = x.scheduled_s
        self.is_over = False
        goes_on = len(talk.conversation.turns) > talk.turn + 1
        self.answer: list[int] | None = [] if goes_on else None
        """The tokens of the answer where another turn follows, which repeats them; else None."""
        self.chunk_tokens = x.chunk_tokens = list[int]()

    def sampling(self, number: int) -> SamplingParams:
        """Return the sampling parameters; the engine learns the limit of the answer, not its
        length."""
        limit = self._world.clients.answer_limit
        if limit is None:
            return SamplingParams(
                max_tokens=self.turn.output_tokens, temperature=0, ignore_eos=True, seed=number
            )
        return SamplingParams(
            max_tokens=max(limit, self.turn.output_tokens), temperature=0, seed=number
        )

    def began(self, update: SequenceUpdate, read_s: float) -> None:
        """Note that the first token is read."""
        x = self.x
        x.headers_s, x.published_s, x.status = read_s, read_s, 200
        x.prompt_tokens, x.cached_tokens = len(self.talk.token_ids), update.num_cached_tokens

    def ended(self, update: SequenceUpdate, read_s: float) -> None:
        """Note that the last token is read; a request that failed before its first token comes here
        alone."""
        x = self.x
        if x.headers_s is None:
            self.began(update, read_s)
        if self.answer:
            self.talk.token_ids += self.answer
            self.talk.num_prompt_tokens += len(self.answer)
        x.output_tokens = sum(self.chunk_tokens)
        x.finish_reason, x.ended_s = update.finish_reason, read_s
        self._end(read_s)

    def refused(self, error: RequestError, read_s: float, tries: int) -> None:
        """Send the request again later, or give up."""
        world = self._world
        if tries < world.clients.retries and error.status in (429, 503):
            world.num_retries += 1
            pause_s = error.retry_after_s or FIRST_RETRY_PAUSE_S * 2**tries
            self.sent_s = read_s + pause_s
            world._send(self, self.sent_s, tries + 1)
            return
        self.x.status = error.status
        self.failed(f"status {error.status}", error.cause, read_s)

    def failed(self, reason: str, message: str, at_s: float) -> None:
        self.x.error, self.x.message, self.x.ended_s = reason, message, at_s
        self._end(at_s)

    def _end(self, at_s: float) -> None:
        self.is_over = True
        self._world.end_exchange(self.talk, self.x, at_s)


def threads_of(settings: Settings) -> int:
    """Return the threads that compute in a step of one engine; pipeline stages take turns."""
    return settings.threads * settings.parallel.size * settings.parallel.context

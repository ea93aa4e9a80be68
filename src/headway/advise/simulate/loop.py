"""The world around simulated servers: who arrives when, turns, retries, refusals, those who leave.

One heap of events, one clock for all. A request is scheduled before the run, as the load generator
does it, and is timed from then; a later turn of a conversation is due when the answer before it was
read and thought about. The same traffic, seed and truth give the same exchanges, to the byte.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import numpy as np

from headway.advise.simulate.cores import Cores
from headway.advise.simulate.front import Front
from headway.advise.simulate.replica import Door, Job, Replica, Stepped
from headway.bench.prompts import IdWriter
from headway.bench.workload import Conversation, Turn
from headway.config.resolve import Settings
from headway.core.errors import RequestError
from headway.core.request import Request, SamplingParams, SequenceUpdate
from headway.measure.record import Exchange

FIRST_PAUSE_S = 0.5
"""Before the first retry where the refusal does not say; doubled for the next, as OpenAI's and
Anthropic's clients do."""


DRAWN_AT_ONCE = 64
"""Conversations whose first prompts are drawn together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """How those behave who ask.

    `answer_limit` is the client's `max_tokens`, by which an engine plans that cannot know where an
    answer ends; None says the length itself, as `headway bench` does. `retries` are tries beyond
    the first after a 429 or a 503. After `timeout_s` without a whole answer they leave.
    """

    answer_limit: int | None = None
    retries: int = 0
    timeout_s: float = 600.0
    concurrency: int | None = None
    until_s: float | None = None
    """Of a closed loop: when nobody begins any more; None: each conversation once."""


@dataclass(slots=True)
class Talk:
    """A conversation on its way: what was said, and which turn is next."""

    number: int
    conversation: Conversation
    said: list[int] = field(default_factory=list)
    asked: int = 0
    turn: int = 0


class World:
    """Replicas, their clients, and time."""

    def __init__(
        self,
        replicas: list[Replica],
        front: Front,
        writer: IdWriter,
        clients: Clients,
        seed: int,
        *,
        apart: bool = False,
    ) -> None:
        """Replicas are engines of one server on one machine; `apart`, servers on machines of their
        own, each with a front like this."""
        self.replicas, self.writer, self.clients = replicas, writer, clients
        self.front, self.apart = front, apart
        threads, count = threads_of(replicas[0].served.settings), len(replicas)
        if apart:
            self.cores = [Cores(front, threads) for _ in replicas]
        else:
            self.cores = [Cores(front, threads, count)] * count
        """Those that each replica computes on."""
        self.door = Door(replicas[0].served, replicas)
        self.exchanges: list[Exchange] = []
        self.num_retries = 0
        self._random = np.random.default_rng([seed, 17])
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._next_id = 0
        self._waiting: deque[tuple[float, Asking, int]] = deque()
        """(When the client leaves, its exchange, the number of its request), in this order."""
        self._flying: dict[int, Stepped] = {}
        """Where cores are shared, the step that each engine is in."""
        self._upcoming: Iterator[tuple[int, Conversation]] = iter(())
        self._talks: list[Conversation] = []
        self._num_drawn = 0
        """Of so many conversations the first prompts are drawn."""

    def at(self, at_s: float, act: Callable[..., None], *given: Any) -> None:
        """Call `act` then."""
        heapq.heappush(self._heap, (at_s, self._order, act, given))
        self._order += 1

    def run(self, conversations: list[Conversation]) -> list[Exchange]:
        """All conversations to their ends; the exchanges in the order in which they were sent."""
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

    # ── who asks ────────────────────────────────────────────────────────────────────────────

    def _work(self, now_s: float) -> None:
        """One of a closed loop is free."""
        if self.clients.until_s is not None and now_s >= self.clients.until_s:
            return
        following = next(self._upcoming, None)
        if following is not None:
            self._begin(*following, now_s)

    def _begin(self, number: int, conversation: Conversation, at_s: float) -> None:
        if number >= self._num_drawn:
            self._draw(number)
        self._say(Talk(number, conversation), at_s)

    def _draw(self, number: int) -> None:
        """Draw the first prompts of the conversation of this number and of some that follow."""
        self._num_drawn = number + DRAWN_AT_ONCE
        begin = number % max(len(self._talks), 1)
        first = [talk.turns[0] for talk in self._talks[begin : begin + DRAWN_AT_ONCE]]
        self.writer.foresee([turn.system + turn.prompt for turn in first])

    def _say(self, talk: Talk, at_s: float) -> None:
        """Send the next turn: all that was said, and what is new."""
        turn = talk.conversation.turns[talk.turn]
        new = self.writer.ids(turn.system + turn.prompt)
        talk.said += new
        talk.asked += len(new)
        x = Exchange(
            id=len(self.exchanges),
            scheduled_s=at_s,
            sent_s=at_s,
            service_class=talk.conversation.service_class,
            conversation=talk.number,
            turn=talk.turn,
            asked_prompt_tokens=talk.asked,
            asked_output_tokens=turn.output_tokens,
        )
        self.exchanges.append(x)
        self._send(Asking(self, talk, turn, x), at_s, 0)

    def _send(self, asking: "Asking", at_s: float, tries: int) -> None:
        if self.front.client_request_cpu_s and not self.apart:
            self.at(at_s, self._leaves, asking, at_s, tries)
        else:
            self.at(self.front.arrives_s(at_s), self._arrive, asking, tries)

    def _leaves(self, asking: "Asking", at_s: float, tries: int) -> None:
        """A client on the server's machine sends it when it has done all before."""
        asking.sent_s = self.cores[0].sent(at_s)
        if not tries:
            asking.x.sent_s = asking.sent_s
        self.at(self.front.arrives_s(asking.sent_s), self._arrive, asking, tries)

    def over(self, talk: Talk, x: Exchange, at_s: float) -> None:
        """An exchange has ended: the next turn, or the next of a closed loop."""
        talk.turn += 1
        turns = talk.conversation.turns
        if x.ok and talk.turn < len(turns):
            due_s = at_s + turns[talk.turn].think_s
            self.at(due_s, self._say, talk, due_s)
        elif self.clients.concurrency is not None:
            self.at(at_s, self._work, at_s)

    # ── who answers ─────────────────────────────────────────────────────────────────────────

    def _arrive(self, asking: "Asking", tries: int) -> None:
        """A whole body is at a server: it is judged when all before it have been served."""
        at_s = self.front.arrives_s(asking.sent_s)
        now_s = at_s if self.apart else self.cores[0].received(at_s)
        if now_s > at_s:
            self.at(now_s, self._judge, asking, tries, now_s)
        else:
            self._judge(asking, tries, now_s)

    def _judge(self, asking: "Asking", tries: int, now_s: float) -> None:
        """In, or refused."""
        prompt = list(asking.talk.said)
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
        served_s = self.cores[ticket.engine].received(now_s) if self.apart else now_s
        due_s = served_s + self.front.judging_s(len(prompt))
        replica.submit(
            due_s,
            Job(
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
            self.at(leaves_s, self._leave, leaves_s)
        self._waiting.append((leaves_s, asking, request.request_id))

    def _leave(self, now_s: float) -> None:
        """Clients that have waited too long leave."""
        while self._waiting:
            at_s, asking, number = self._waiting[0]
            replica = next((each for each in self.replicas if number in each.jobs), None)
            if replica is not None and not asking.is_over:
                if at_s > now_s:
                    self.at(at_s, self._leave, at_s)
                    return
                replica.drop(at_s, number)
                asking.failed("timeout", "", at_s)
                self.at(at_s, self._step, replica, at_s)
            self._waiting.popleft()

    def _step(self, replica: Replica, now_s: float) -> None:
        """Let an engine run that has something to do."""
        due_s = replica.next_s(now_s)
        if due_s is None:
            return
        if due_s > now_s:
            if not replica.inbox:  # who is in the inbox has an event of his own
                self.at(due_s, self._step, replica, due_s)
            return
        stepped = replica.step(now_s)
        if stepped is None:
            return
        number = self.replicas.index(replica)
        if self.cores[number].are_shared and stepped.record is not None:
            self._flying[number] = stepped
            stepped.ends_s = self.cores[number].begin(number, now_s, stepped.ends_s - now_s)
        self.at(stepped.ends_s, self._stepped, replica, stepped, stepped.ends_s)

    def _stepped(self, replica: Replica, stepped: Stepped, due_s: float) -> None:
        """A step was to end now. It goes on where others have taken its cores since, and is over
        already where they have left them."""
        number = self.replicas.index(replica)
        cores = self.cores[number]
        if not cores.are_shared or stepped.record is None:
            self._ended(replica, stepped)
            return
        if self._flying.get(number) is not stepped or stepped.ends_s != due_s:
            return
        stepped.ends_s = cores.ends_s(number, due_s)
        if stepped.ends_s > due_s:
            self.at(stepped.ends_s, self._stepped, replica, stepped, stepped.ends_s)
            return
        del self._flying[number]
        self._ended(replica, stepped)
        if number not in self._flying:
            self._rests(number, due_s)

    def _rests(self, number: int, now_s: float) -> None:
        """An engine has nothing to do: the others on its cores are faster from now on."""
        cores = self.cores[number]
        cores.end(number, now_s)
        for other, stepped in self._flying.items():
            if self.cores[other] is cores:
                stepped.ends_s = ends_s = cores.ends_s(other, now_s)
                self.at(ends_s, self._stepped, self.replicas[other], stepped, ends_s)

    def _ended(self, replica: Replica, stepped: Stepped) -> None:
        """A step is over: its tokens leave, and the next begins."""
        number, ends_s = self.replicas.index(replica), stepped.ends_s
        self.door.heard(number, stepped)
        replica.finish(stepped, self.cores[number].read_s(ends_s, len(stepped.updates)))
        self._step(replica, ends_s)


class Asking:
    """One exchange from its client's side."""

    __slots__ = ("_world", "answer", "chunk_tokens", "is_over", "sent_s", "talk", "turn", "x")

    def __init__(self, world: World, talk: Talk, turn: Turn, x: Exchange) -> None:
        self._world, self.talk, self.turn, self.x = world, talk, turn, x
        self.sent_s = x.scheduled_s
        self.is_over = False
        goes_on = len(talk.conversation.turns) > talk.turn + 1
        self.answer: list[int] | None = [] if goes_on else None
        """Its tokens, where another turn follows, which repeats them."""
        self.chunk_tokens = x.chunk_tokens = list[int]()

    def sampling(self, number: int) -> SamplingParams:
        """What the client asks for; the engine learns its limit and no more."""
        limit = self._world.clients.answer_limit
        if limit is None:
            return SamplingParams(
                max_tokens=self.turn.output_tokens, temperature=0, ignore_eos=True, seed=number
            )
        return SamplingParams(
            max_tokens=max(limit, self.turn.output_tokens), temperature=0, seed=number
        )

    def began(self, update: SequenceUpdate, read_s: float) -> None:
        """Its first token is read."""
        x = self.x
        x.headers_s, x.published_s, x.status = read_s, read_s, 200
        x.prompt_tokens, x.cached_tokens = len(self.talk.said), update.num_cached_tokens

    def ended(self, update: SequenceUpdate, read_s: float) -> None:
        """Its last token is read; the only thing that is where it failed before its first."""
        x = self.x
        if x.headers_s is None:
            self.began(update, read_s)
        if self.answer:
            self.talk.said += self.answer
            self.talk.asked += len(self.answer)
        x.output_tokens = sum(self.chunk_tokens)
        x.finish_reason, x.ended_s = update.finish_reason, read_s
        self._end(read_s)

    def refused(self, error: RequestError, read_s: float, tries: int) -> None:
        """Try again later, or give up."""
        world = self._world
        if tries < world.clients.retries and error.status in (429, 503):
            world.num_retries += 1
            pause_s = error.retry_after_s or FIRST_PAUSE_S * 2**tries
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
        self._world.over(self.talk, self.x, at_s)


def threads_of(settings: Settings) -> int:
    """That compute in a step of one engine; stages take turns."""
    return settings.threads * settings.parallel.size * settings.parallel.context


def repeated(
    conversations: list[Conversation], share: float, rng: np.random.Generator
) -> list[Conversation]:
    """The traffic and a share of it once more, a second later: people who ask again."""
    again = [
        replace(talk, at_s=talk.at_s + float(rng.exponential(1.0)))
        for talk in conversations
        if rng.random() < share
    ]
    return sorted([*conversations, *again], key=lambda talk: talk.at_s)

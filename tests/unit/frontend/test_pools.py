"""Prompts and answers in different engines: the tokens of one, whoever dies, and when."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headway.core.errors import EngineDownError
from headway.core.parcel import decode_parcel
from headway.core.request import SamplingParams
from headway.engine import messages
from headway.frontend.pools import DECODE, PREFILL
from pool_world import PoolWorld, WorldClient, expected

PROMPT = list(range(1, 21))
NUM_KILLS = int(os.environ.get("HEADWAY_KILLS", "1000"))


@asynccontextmanager
async def opened(**how) -> AsyncIterator[PoolWorld]:
    world = PoolWorld(**how)
    try:
        yield world
    finally:
        await world.close()


def computed(client: WorldClient) -> int:
    """Tokens that the engine of `client` has advanced by."""
    assert client.living is not None
    return len(client.living.world.executor.memory)


async def until_parcel(world: PoolWorld, client: WorldClient) -> None:
    """The prompt is computed, and its parcel on its way to the server."""
    for _ in range(200):
        sent = client.living.socket.outbox
        kinds = [type(messages.decode_from_engine(frame)) for frame in sent]
        if messages.HandedOver in kinds:
            return
        client.deliver() or client.step()
    raise AssertionError("no parcel")


async def test_a_prompt_is_computed_in_one_engine_and_answered_in_the_other():
    async with opened() as world:
        first, second = world.clients
        number = world.ask(PROMPT)
        assert (first.num_requests, second.num_requests) == (1, 0)
        await until_parcel(world, first)
        while first.hear():
            pass
        assert (first.num_requests, second.num_requests) == (0, 1)
        assert world.handed == [(number, 1)]
        assert world.streams[number].resumed_tokens[0], "the first token has left already"
        await world.check()
        assert world.outcomes == {"taken": 1}
        computed_again = second.living.world.executor.num_submits
        assert computed_again <= 2 + 6, "the full blocks of the prompt were not computed again"


@pytest.mark.parametrize(
    ("prompt", "sampling"), [(PROMPT[:4], {}), (PROMPT, {"n": 2})], ids=["short", "two answers"]
)
async def test_what_gains_nothing_is_answered_by_one_engine(prompt, sampling):
    async with opened() as world:
        world.ask(prompt, **sampling)
        assert world.clients[1].num_requests == 1
        await world.check()
        assert world.handed == [] and world.outcomes == {}


async def test_an_answer_of_one_token_stays():
    async with opened() as world:
        world.ask(PROMPT, max_tokens=1)
        await world.check()
        assert world.handed == []


async def test_the_decode_engine_with_the_fewest_requests_goes_on():
    async with opened(num_decode=3) as world:
        for shift in range(6):
            world.ask([shift, *PROMPT])
        await world.check()
        assert sorted({engine for _, engine in world.handed}) == [1, 2, 3]
        assert all(world.pools.roles[engine] == DECODE for _, engine in world.handed)


async def test_without_a_decode_engine_the_first_goes_on_itself():
    async with opened() as world:
        world.ask(PROMPT)
        await until_parcel(world, world.clients[0])
        world.clients[1].die()
        while world.clients[0].hear():
            pass
        assert world.clients[0].num_requests == 1 and world.outcomes == {"stayed": 1}
        later = world.ask([9, *PROMPT])
        assert not world.streams[later].hands_over, "who is alone begins no hand-over"
        await world.check()


async def test_a_prefill_engine_that_dies_behind_its_parcel_costs_a_prompt():
    """Its blocks are gone with it: the other computes them, behind the token that was told."""
    async with opened() as world:
        first, second = world.clients
        world.ask(PROMPT)
        await until_parcel(world, first)
        while first.hear():
            pass
        first.die()
        await world.check()
        assert world.outcomes == {"taken": 1}
        assert second.living.world.executor.failed_reads or computed(second) >= len(PROMPT)


async def test_a_decode_engine_that_dies_with_the_parcel_begins_again_in_the_pools():
    async with opened(num_decode=2) as world:
        world.ask(PROMPT)
        await until_parcel(world, world.clients[0])
        while world.clients[0].hear():
            pass
        world.clients[world.handed[0][1]].die()
        assert world.outcomes == {"lost": 1}
        assert world.clients[0].num_requests == 1, "the prompt is computed where prompts are"
        await world.check()
        assert world.outcomes == {"lost": 1, "taken": 1}


async def test_a_refused_parcel_is_told_and_computed():
    async with opened() as world:
        world.clients[1].living.handover.fingerprint = b"o" * 32
        world.ask(PROMPT)
        await world.check()
        assert world.outcomes == {"refused": 1}


async def test_a_parcel_of_other_tokens_than_were_told_is_refused():
    async with opened() as world:
        first, second = world.clients
        number = world.ask(PROMPT)
        await until_parcel(world, first)
        while first.hear():
            pass
        stream = world.streams[number]
        assert decode_parcel(stream.parcel).tokens[-1] == stream.resumed_tokens[0][-1]
        told = list(second.living.socket.inbox)
        (submit,) = [messages.decode_to_engine(frame) for frame in told]
        submit.resumed_tokens[0].append(5)
        refused = second.living.handover.take_over(
            submit.request, submit.parcel, submit.resumed_tokens
        )
        assert refused == "tokens"
        second.living.engine.abort(number)
        await world.check()


async def test_an_engine_that_changes_its_role_ends_what_runs_there():
    async with opened(num_prefill=1, num_decode=2) as world:
        told: list[list[bool]] = []
        world.pools.on_roles = told.append
        number = world.ask(PROMPT, n=2)  # in the first decode engine
        assert world.clients[1].num_requests == 1
        world.pools.set_num_prefill(2)
        assert world.pools.roles == [PREFILL, DECODE, PREFILL], "who has fewest changes"
        world.pools.set_num_prefill(1)
        assert told == [[True, False, True], [False, False, True]]
        world.pools.set_num_prefill(2)
        later = [world.ask([shift, *PROMPT]) for shift in range(4)]
        assert [client.num_requests for client in world.clients] == [2, 1, 2]
        await world.check()
        assert world.outcomes == {"taken": 4} and number not in later


@pytest.mark.parametrize("behind", ["parcel", "hand-over"])
async def test_a_client_that_leaves_leaves_no_block_behind(behind):
    async with opened() as world:
        number = world.ask(PROMPT)
        await until_parcel(world, world.clients[0])
        if behind == "hand-over":
            while world.clients[0].hear():
                pass
        world.leave(number)
        await world.check()


async def test_with_nobody_ready_a_request_is_refused():
    async with opened() as world:
        for client in world.clients:
            client.die()
            client._died_s = None
        with pytest.raises(EngineDownError):
            world.ask(PROMPT)


async def test_prefill_engines_are_drained_first():
    """What they hand over while the server ends is taken: only then the others end."""
    async with opened() as world:
        number = world.ask(PROMPT)

        async def go_on() -> None:
            while True:
                world.act()
                await asyncio.sleep(0)

        going = asyncio.create_task(go_on())
        reading = asyncio.create_task(world.tokens(number))
        await world.pools.drain(600.0)
        assert await reading == expected(world.streams[number].answer.request)
        assert world.outcomes == {"taken": 1}
        assert {client.status for client in world.clients} == {"draining"}
        going.cancel()


async def test_killed_at_any_moment_on_either_side():
    """Kills, delays, lost blocks, clients that leave, roles that change, in any order: no wrong
    token, no lost block and no lost request."""
    num_kills, seed = 0, 0
    while num_kills < NUM_KILLS:
        seed += 1
        async with opened(num_prefill=1 + seed % 2, num_decode=1 + seed // 2 % 2, seed=seed) as w:
            num_kills += await disturbed(w)
            await w.check()


async def disturbed(world: PoolWorld) -> int:
    """A life of many things at random; returns how many engines were killed."""
    draw, num_kills = world.random, 0
    for _ in range(120):
        dead = [client for client in world.clients if client.living is None]
        what = draw.random()
        if what < 0.12 and len(dead) < len(world.clients):
            length = draw.randint(1, 30)
            prompt = [draw.randint(0, 2) for _ in range(length)]
            world.ask(prompt, max_tokens=draw.randint(1, 9), n=draw.choice([1, 1, 1, 2]))
        elif what < 0.17 and len(dead) + 1 < len(world.clients):
            draw.choice([c for c in world.clients if c.living is not None]).die()
            num_kills += 1
        elif what < 0.22 and dead:
            dead[0].be_born()
        elif what < 0.225:
            world.pools.set_num_prefill(draw.randint(1, len(world.clients) - 1))
        elif what < 0.24 and world.streams:
            number = draw.choice(list(world.streams))
            if number not in world.left and not world.streams[number].is_complete:
                world.leave(number)
        elif what < 0.26:
            for client in world.clients:
                if client.living is not None:
                    wait, brings = draw.randint(0, 3), draw.random() < 0.8
                    client.living.world.executor.delay = lambda wait=wait: wait
                    client.living.world.executor.bring = lambda brings=brings: brings
        else:
            world.act()
            await asyncio.sleep(0)
    return num_kills


def test_a_request_of_several_answers_is_not_offered():
    world = PoolWorld()
    try:
        assert world.pools.roles == [PREFILL, DECODE]
        several = SamplingParams(n=3, max_tokens=2)
        asked = messages.Request(1, PROMPT, several)
        assert world.pools._role_of(asked) == DECODE
    finally:
        asyncio.run(world.close())

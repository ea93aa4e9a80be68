"""One name with an address for each server: they come, go and answer, and a silent resolver."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from gateway_world import Gateway, Stub, config_of, gateway
from headway.gateway import state, upstream

HOSTS = ("127.0.0.1", "127.0.0.2")


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the resolver has for the name `servers`; it is asked twenty times a second."""
    known: list[str] = []
    original: Callable[..., Any] = socket.getaddrinfo

    def look_up(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host != "servers":
            return original(host, port, *args, **kwargs)
        if not known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [each for a in known for each in original(a, port, type=socket.SOCK_STREAM)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(state, "LOOK_UP_S", 0.05)
    return known


async def names(live: Gateway, *expected: str) -> None:
    """Wait until these are the upstreams, and each was reached."""
    while not (
        set(live.state.upstreams) == set(expected)
        and all(each.was_reached for each in live.state.upstreams.values())
    ):
        await asyncio.sleep(0.02)


async def hosts(live: Gateway) -> set[str]:
    """Hosts that answered twelve chats."""
    answers = await asyncio.gather(*(live.chat() for _ in range(12)))
    assert all(answer.is_complete for answer in answers)
    return {answer.headers["x-headway-upstream"].rpartition("/")[2] for answer in answers}


async def test_servers_come_and_go_behind_one_name(addresses: list[str]) -> None:
    first = await Stub("first").start()
    second = await Stub("second", host=HOSTS[1], port=first.port, token_s=0.01).start()
    try:
        url = f"dns+http://servers:{first.port}/v1"
        row = {"name": "tiny", "policy": "round_robin"}
        config = config_of([Stub("s")], row, s={"url": url})
        async with gateway(config) as live:
            # nothing is known of the name yet: it is down, not an error of the gateway
            assert set(live.state.upstreams) == {"s"}
            assert (await live.chat()).status == 502
            addresses[:] = HOSTS[:1]
            await names(live, "s/127.0.0.1")
            assert await hosts(live) == {HOSTS[0]}
            before = live.state.upstreams["s/127.0.0.1"]
            addresses[:] = HOSTS
            await names(live, *(f"s/{each}" for each in HOSTS))
            assert live.state.upstreams["s/127.0.0.1"] is before
            assert await hosts(live) == set(HOSTS)
            # a server that leaves the name ends its streams in peace
            running = [asyncio.create_task(live.chat()) for _ in range(4)]
            while second.num_tokens < len(second.asked) or len(first.asked) < 1:
                await asyncio.sleep(0.005)
            addresses[:] = HOSTS[:1]
            await names(live, "s/127.0.0.1")
            assert all(answer.is_complete for answer in await asyncio.gather(*running))
            assert await hosts(live) == {HOSTS[0]}
            # a resolver without an answer takes no server away, nor does a file that is read again
            addresses.clear()
            await asyncio.sleep(0.2)
            await live.state.reload(live.state.file_config)
            assert await hosts(live) == {HOSTS[0]}
    finally:
        await first.stop()
        await second.stop()


async def test_names_stand_in_models_and_rollouts(addresses: list[str]) -> None:
    addresses[:] = HOSTS
    row = {"name": "r", "model": "tiny", "canary": ["b"]}
    stubs = [Stub("a"), Stub("b")]
    given = {"a": {"url": "http://10.0.0.1"}, "b": {"url": "dns+http://servers:8000"}}
    config = config_of(stubs, {"name": "tiny"}, rollouts=[row], **given)
    found = upstream.Discovery()
    assert await found.look_up(config) and not await found.look_up(config)
    wide = found.expand(config)
    assert [each.url for each in wide.upstreams] == [
        "http://10.0.0.1",
        *(f"http://{each}:8000" for each in HOSTS),
    ]
    assert wide.models[0].upstreams == ("a", *(f"b/{each}" for each in HOSTS))
    assert wide.rollouts[0].canary == tuple(f"b/{each}" for each in HOSTS)


async def test_a_server_of_two_families_is_one_upstream(addresses: list[str]) -> None:
    addresses[:] = ["::1", "127.0.0.1"]
    assert await upstream.resolve("dns+http://servers:8000/v1") == ("127.0.0.1",)
    addresses[:] = ["::1"]
    assert await upstream.resolve("dns+http://servers:8000/v1") == ("::1",)
    config = config_of([Stub("s")], s={"url": "dns+http://servers:8000/v1"})
    found = upstream.Discovery()
    await found.look_up(config)
    assert found.expand(config).upstreams[0].url == "http://[::1]:8000/v1"


async def test_a_name_has_a_bounded_number_of_upstreams(addresses: list[str]) -> None:
    addresses[:] = [f"10.0.{i // 256}.{i % 256}" for i in range(upstream.MAX_ADDRESSES + 9)]
    assert len(await upstream.resolve("dns+http://servers:8000/v1")) == upstream.MAX_ADDRESSES

"""What stays in the server's memory when a request is over: bounded, and counted as it is."""

import asyncio
import gc
import tracemalloc
import weakref
from collections.abc import Iterator

import pytest

from headway.admit.prefixes import page_hashes
from headway.core.clock import VirtualClock
from headway.core.errors import EngineDownError, RequestError
from headway.core.request import Request, SamplingParams
from headway.frontend.answer import OutputProcessor, Stream
from headway.server.models import ServedModel
from headway.server.responses.store import ResponseStore, StoredResponse
from headway.telemetry.live import Telemetry
from telemetry_cases import begin, telemetry


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed here is freed because nobody refers to it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def served(model: Telemetry) -> ServedModel:
    return ServedModel(names=["made-up"], client=None, tokenizer=None, telemetry=model)  # type: ignore[arg-type]


def test_no_more_prefixes_are_remembered_than_the_engine_has_memory_for() -> None:
    """100 blocks of 16 tokens are 25 pages of 64, however many prompts come."""
    prefixes = served(telemetry(VirtualClock())).admission.queues.by_engine[0].prefixes
    assert prefixes is not None
    for number in range(200):
        prefixes.add(page_hashes("", [number] * 130))
    assert len(prefixes) == 25
    assert prefixes.num_cached(page_hashes("", [199] * 130), 130) == 128


def test_a_restarted_engine_has_no_cached_prefixes() -> None:
    model = telemetry(VirtualClock())
    prefixes = served(model).admission.queues.by_engine[0].prefixes
    assert prefixes is not None and model.ready is not None
    prefixes.add(page_hashes("", [1] * 130))
    model.on_ready(model.ready)
    assert prefixes.num_cached(page_hashes("", [1] * 130), 130) == 0


@pytest.mark.parametrize("size", [10, 1000])
def test_stored_responses_take_no_more_memory_than_they_are_counted_as(size: int) -> None:
    """Small ones take far more than their JSON."""
    store = ResponseStore(600_000)
    tracemalloc.start()
    began = tracemalloc.get_traced_memory()[0]
    for number in range(5000):
        items, response = bytes(bytearray(size // 2)), bytes(bytearray(size))
        name, owner = f"resp_{number:032x}", "o"
        store.put(
            StoredResponse(
                response_id=name, owner=owner, previous_id=None, items=items, response=response
            )
        )
    held = tracemalloc.get_traced_memory()[0] - began
    tracemalloc.stop()
    assert len(store) < 2000
    assert held < 1.1 * store.num_bytes + 100_000  # the table has room for some more


def test_an_error_goes_with_the_request_that_it_ended(no_collector: None) -> None:
    """Its traceback holds the frames, and with them prompts and bodies."""
    request = Request(1, [1], SamplingParams(max_tokens=1))
    stream = Stream(OutputProcessor(request, None), lambda index: None)
    error = EngineDownError("It is down.")
    gone = weakref.ref(error)
    stream.fail(error)

    async def read() -> None:
        with pytest.raises(EngineDownError):
            await stream.next()
        assert await stream.next() == []

    del error
    asyncio.run(read())
    assert gone() is None


def test_a_finished_request_is_listed_without_its_error(no_collector: None) -> None:
    """The last 2,048 are kept; what one of them was told of is not."""
    model = telemetry(VirtualClock())

    def fail() -> weakref.ref[RequestError]:
        timeline = begin(model, "a")
        try:
            raise EngineDownError("It is down.")
        except EngineDownError as error:
            model.on_failure(timeline, error)
            return weakref.ref(error)

    gone = fail()
    assert len(model.finished) == 1
    assert gone() is None

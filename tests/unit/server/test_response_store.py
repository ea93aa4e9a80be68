"""Stored responses: bounded, each for its owner alone, read once for all references to it."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import RequestError
from headway.server.responses.store import ResponseStore, StoredResponse


def entry(
    number: int, size: int = 10, owner: str = "o", previous: str | None = None
) -> StoredResponse:
    return StoredResponse(
        response_id=f"resp_{number}",
        owner=owner,
        previous_id=previous,
        items=b'[{"id":"msg_%d_i0"}]' % number,
        response=b'{"output":[{"id":"msg_%d_0"}]}' % number + b" " * size,
    )


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300), st.booleans()), max_size=40))
def test_a_store_keeps_its_bound_and_forgets_the_oldest(
    steps: list[tuple[int, int, bool]],
) -> None:
    store = ResponseStore(2000)
    for number, size, kept in steps:
        if kept:
            store.put(entry(number, size))
        elif store.find(f"resp_{number}", "o"):
            store.delete(f"resp_{number}", "o")
        store.check_integrity()
        assert not kept or store.find(f"resp_{number}", "o") is not None


def test_a_store_is_read_by_a_thread_while_another_makes_room() -> None:
    """Prompts are prepared in the threads of the tokenizer pool."""
    store = ResponseStore(2000)
    makes_room = threading.Thread(target=lambda: store.put(entry(2, 1500)))

    class Owner(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            if makes_room.ident is None:
                makes_room.start()
                makes_room.join(0.05)  # it has no way in before we are out
            return str.__eq__(self, other)

    store.put(entry(1, owner=Owner("o")))
    assert store.find("resp_1", "o") is not None
    makes_room.join()
    assert len(store) == 1 and store.find("resp_2", "o") is not None
    store.check_integrity()


def test_a_response_larger_than_the_bound_is_not_stored() -> None:
    store = ResponseStore(800)
    store.put(entry(1, 500))
    assert len(store) == 0 and store.num_bytes == 0


def test_a_stored_response_is_there_for_its_owner_alone() -> None:
    store = ResponseStore(3000)
    store.put(entry(1))
    for other in ("", "another"):
        with pytest.raises(RequestError) as caught:
            store.get("resp_1", other)
        assert caught.value.status == 404
        with pytest.raises(RequestError):
            store.chain("resp_1", other)
        assert store.items(["msg_1_0"], other) == {}
    both = {name: {"id": name} for name in ("msg_1_0", "msg_1_i0")}
    assert store.items([*both, "", "_", "msg_1_9", "msg_2_0", "a_b_c"], "o") == both


def test_a_response_is_read_once_for_all_references_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store, read = ResponseStore(3000), []
    store.put(entry(1))
    monkeypatch.setattr(StoredResponse, "input_items", lambda self: read.append(1) or [])
    store.items(["msg_1_0"] * 1000, "o")
    assert read == [1]


def test_a_chain_with_a_gap_says_what_is_missing() -> None:
    store = ResponseStore(3000)
    for number, previous in ((1, None), (2, "resp_1"), (3, "resp_2")):
        store.put(entry(number, previous=previous))
    assert [e.response_id for e in store.chain("resp_3", "o")] == ["resp_1", "resp_2", "resp_3"]
    store.delete("resp_2", "o")
    with pytest.raises(RequestError, match="resp_2") as caught:
        store.chain("resp_3", "o")
    assert caught.value.code == "previous_response_not_found"

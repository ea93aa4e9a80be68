"""Which documents answers drew on, and examples before their questions."""

import random
import threading

from headway.core.clock import VirtualClock
from headway.telemetry.documents import (
    FEW_SHOWN,
    MOST_CHARACTERS,
    MOST_DOCUMENTS,
    MOST_PLACES,
    DocumentTally,
    telling_words,
    used,
)
from headway.telemetry.examples import FEW_QUESTIONS, MOST_KEPT, ExampleTally

KITE, BALL = "Anna has a red kite.", "Tom has a blue ball."
QUESTION = "What colour is the kite of Anna?"


def test_a_document_is_used_by_a_word_that_only_documents_have():
    telling = telling_words([KITE, BALL], [QUESTION])
    assert used(telling, ["Red."]) == [True, False]
    assert used(telling, ["Anna: kite of what colour is the"]) == [False, False]
    assert used(telling, ["I cannot say.", "BLUE"]) == [False, True], "of two answers either counts"
    assert used(telling_words([KITE, KITE], [QUESTION]), ["Red."]) == [True, True]
    assert used(telling_words([], [QUESTION]), ["Red."]) == []


def test_what_most_documents_say_tells_of_none():
    others = ["Ben has a pink pen.", "Ida has a white cup."]
    telling = telling_words([KITE, BALL, *others], [QUESTION])
    assert used(telling, ["She has a red one"]) == [True, False, False, False]
    assert used(telling_words([KITE, BALL], [QUESTION]), ["She has a red one"]) == [True, True]


def watch(tally: DocumentTally, documents: list[str], answer: str, tokens: int = 100) -> None:
    watched = tally.watch(documents, [QUESTION], tokens)
    assert watched is not None
    tally.answered(watched, [answer])


def test_the_tally_counts_documents_tokens_and_places():
    tally = DocumentTally(VirtualClock())
    assert tally.use(0.01) is None
    for _ in range(FEW_SHOWN):
        watch(tally, [KITE, BALL], "Red.")
    found = tally.use(0.01)
    assert (found.answers, found.shown, found.used, found.idle) == (5, 10, 5, 1)
    assert found.requests == 5
    assert [(p.shown, p.used) for p in found.places] == [(5, 5), (5, 0)]
    size = len(KITE) + len(BALL) + len(QUESTION)
    ball = round(100 * len(BALL) / size)
    assert found.unused_tokens == FEW_SHOWN * ball == FEW_SHOWN * found.idle_tokens
    assert found.tokens == FEW_SHOWN * (ball + round(100 * len(KITE) / size))
    assert found.unused_s == found.unused_tokens / found.answers * 0.01
    watch(tally, [KITE, BALL], "Blue.")
    assert tally.use(0.01).idle == 0, "one answer used it"


def test_what_is_kept_is_bounded():
    tally, rng = DocumentTally(VirtualClock()), random.Random(0)
    for number in range(MOST_DOCUMENTS // 8):
        watch(tally, [f"w{number}x{i} {rng.random()}" for i in range(9)], "w0x0 and w1x8")
    found = tally.use(0.0)
    assert len(tally._seen) <= MOST_DOCUMENTS
    assert len(found.places) == MOST_PLACES
    assert found.places[-1].shown == 2 * found.places[0].shown, "the last is of all behind it"
    assert tally.watch(["a" * MOST_CHARACTERS], ["b"], 9) is None


class Ticking(VirtualClock):
    """A clock on which each look takes a second."""

    def now_s(self) -> float:
        self.advance(1.0)
        return super().now_s()


def test_looking_takes_a_fiftieth_of_the_time():
    clock = Ticking()
    tally, looks = DocumentTally(clock), 0
    for _ in range(500):
        looks += tally.watch([KITE], [QUESTION], 10) is not None
    assert 5 <= looks <= 12
    assert tally._requests == 500, "all are counted"


def chat(examples: int, question: str) -> list[dict[str, str]]:
    pairs = [
        {"role": role, "content": f"{role} {i}"}
        for i in range(examples)
        for role in ("user", "assistant")
    ]
    return [{"role": "system", "content": "Add."}, *pairs, {"role": "user", "content": question}]


def test_pairs_before_different_questions_are_examples_and_a_conversation_is_not():
    tally = ExampleTally()
    for turn in range(1, 12):  # one conversation, asked again and again at each turn
        for _ in range(FEW_QUESTIONS):
            tally.asked(chat(turn, f"turn {turn}"), 100)
    assert tally.use(0.01) is None
    for number in range(FEW_QUESTIONS):
        tally.asked(chat(3, f"another {number}"), 100)
    found = tally.use(0.01)
    assert (found.chats, found.requests, found.pairs) == (60, 2 * FEW_QUESTIONS, 3)
    assert 0 < found.tokens < 100 and found.seconds == found.tokens * 0.01
    assert found.share == found.tokens * 10 / 6000


def test_examples_are_bounded_and_counted_from_threads():
    tally = ExampleTally()

    def ask(name: int) -> None:
        for number in range(MOST_KEPT):
            tally.asked(chat(1, f"{name} {number}"), 10)
            tally.asked([{"role": "user", "content": str(number)}], 10)
            tally.use(0.0)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tally.use(0.0).chats == 8 * MOST_KEPT
    for number in range(2 * MOST_KEPT):
        tally.asked(
            [*chat(0, "?"), {"role": "assistant", "content": str(number)}, *chat(0, "!")[1:]], 9
        )
    assert len(tally._kept) == MOST_KEPT

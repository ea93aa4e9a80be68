"""Examples in chats: pairs before the last question, and blocks of one shape in a text."""

import pytest

from headway.core.examples import MOST_CHARACTERS, examples_of

MOODS = """Say the mood.

Text: I love it.
Mood: good

Text: It broke.
Mood: bad

Text: Such joy!
Mood: good

Text: Fine, I guess.
Mood:"""


def user(text: object) -> dict[str, object]:
    return {"role": "user", "content": text}


def assistant(text: object) -> dict[str, object]:
    return {"role": "assistant", "content": text}


PAIRS = [
    {"role": "system", "content": "Add."},
    *(user("1 + 1"), assistant("2"), user("2 + 2"), assistant("4"), user("3 + 3")),
]


def test_pairs_are_left_out_from_the_last():
    found = examples_of(PAIRS)
    assert found.texts == ["1 + 1\n2", "2 + 2\n4"] and found.question == "3 + 3"
    assert found.first(2) == found.first(9) == PAIRS
    assert found.first(1) == [*PAIRS[:3], PAIRS[-1]]
    assert found.first(0) == [PAIRS[0], PAIRS[-1]]


def test_blocks_of_one_shape_are_left_out_from_the_last():
    found = examples_of([user(MOODS)])
    assert [text.split("\n")[0] for text in found.texts] == [
        *("Text: I love it.", "Text: It broke.", "Text: Such joy!")
    ]
    assert found.first(3) == [user(MOODS)]
    [one] = found.first(1)
    assert one["content"] == (
        "Say the mood.\n\nText: I love it.\nMood: good\n\nText: Fine, I guess.\nMood:"
    )
    [none] = found.first(0)
    assert none["content"] == found.question == "Say the mood.\n\nText: Fine, I guess.\nMood:"


def test_blocks_in_a_system_message_stand_before_any_question():
    system = {"role": "system", "content": MOODS.rsplit("\n\n", 1)[0]}
    found = examples_of([system, user("Text: Hm.\nMood:")])
    assert len(found.texts) == 3 and found.question == "Text: Hm.\nMood:"
    changed, asked = found.first(0)
    assert changed == {"role": "system", "content": "Say the mood.\n\n"} and asked == user(
        "Text: Hm.\nMood:"
    )
    assert system["content"].startswith("Say the mood.\n\nText"), "what was asked is not changed"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [user("Hello")],
        [user([{"type": "text", "text": MOODS}])],
        [user("a"), assistant(None), user("b")],
        [user("a"), user("b"), user("c")],
        [user("a"), {"role": "tool", "content": "b"}, user("c")],
        [user("Note: one thing.\n\nNote: another.")],
        [user("Text: a\nMood: b")],
        [user("Text: a\nMood: b\n\nBetween them.\n\nText: c\nMood: d")],
        [user(MOODS + "x" * MOST_CHARACTERS)],
    ],
)
def test_other_chats_have_none(messages):
    assert examples_of(messages) is None

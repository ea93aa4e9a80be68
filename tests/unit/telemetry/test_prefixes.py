"""Where prompts part, and what stands there."""

import random

import pytest

from headway.telemetry.prefixes import PrefixSearch, find_shared_prefixes, words

SYSTEM = (
    "You are the assistant of a small library. Be short and kind, name the shelf where a book "
    "stands, and never invent a title. Answer in the language of the question. "
)


def test_prompts_part_where_the_users_text_begins():
    prompts = [words(SYSTEM + text) for text in ("Where is Dune?", "who wrote it", "Any maps?")]
    (sharing,) = find_shared_prefixes(prompts, unit="words")
    assert sharing.shared == len(words(SYSTEM.strip())) + 1  # the blank too
    assert sharing.requests == 3
    assert sharing.alike_after == 0
    assert sharing.outliers == []


def test_a_date_in_the_system_prompt_is_named_with_what_it_costs():
    days = ["2026-11-19", "2026-11-20", "2026-11-21"]
    prompts = [words(f"Today, on {days[i % 3]}, hello. {SYSTEM}{i * 7919} ?") for i in range(30)]
    lengths = [len(prompt) - 3 for prompt in prompts]
    (sharing,) = find_shared_prefixes(prompts, system=lengths, unit="words")
    assert sharing.looks_like == "a date"
    assert sharing.shared == words(f"Today, on {days[0]}").index("11") + 2  # up to the day
    assert sharing.alike_after == len(words(f", hello. {SYSTEM}"))
    assert "in the system prompt" in sharing.sentence


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("2026-11-21", "a date"),
        ("21 November 2026", "a date"),
        ("Saturday", "a date"),
        ("14:05:11", "a time"),
        ("1b4e28ba-2fa1-11d2-883f-0016d3cca427", "a UUID"),
        ("ada@example.org", "an e-mail address"),
        ("deadbeef01", "a hexadecimal id"),
        ("48151", "a number"),
        ("Grace Hopper", "a name"),
    ],
)
def test_one_request_that_differs_is_named(text, kind):
    prompts = [words(f"{SYSTEM}The reader is unknown. {SYSTEM}") for _ in range(20)]
    prompts[17] = words(f"{SYSTEM}The reader is {text}. {SYSTEM}")
    (sharing,) = find_shared_prefixes(prompts, unit="words")
    (parting,) = sharing.outliers
    assert (parting.request, parting.looks_like) == (17, kind)
    assert parting.at == len(words(f"{SYSTEM}The reader is "))
    assert parting.alike_after == len(words(f". {SYSTEM}"))
    assert parting.sentence.startswith(
        f"Request 17 differs from the others at word {parting.at}: {kind}"
    )


def test_ids_need_no_text():
    shared = list(range(100, 300))
    prompts = [[*shared, 1000 + i, 2000 + i] for i in range(10)]
    prompts[4][50] = 7
    (sharing,) = find_shared_prefixes(prompts)
    assert (sharing.shared, sharing.requests, sharing.looks_like) == (200, 10, "")
    (parting,) = sharing.outliers
    assert (parting.request, parting.at, parting.alike_after) == (4, 50, 149)


def test_applications_are_told_apart():
    a, b = list(range(100, 150)), list(range(200, 260))
    prompts = [[*a, i] for i in range(5)] + [[*b, i] for i in range(7)] + [[1, 2, 3]]
    found = find_shared_prefixes(prompts)
    assert [(s.requests, s.shared) for s in found] == [(7, 60), (5, 50)]


def test_nothing_shared_is_nothing_found():
    rng = random.Random(0)
    assert (
        find_shared_prefixes([[rng.randrange(10**6) for _ in range(40)] for _ in range(30)]) == []
    )
    assert find_shared_prefixes([]) == []
    assert find_shared_prefixes([[1, 2, 3]]) == []


def test_prompts_that_are_all_alike_part_nowhere():
    (sharing,) = find_shared_prefixes([list(range(50))] * 4)
    assert (sharing.shared, sharing.example) == (50, "")


def test_every_prompt_is_in_at_most_one_application():
    """Random tries: groups never overlap and what is sentence to be shared is."""
    rng = random.Random(1)
    for _ in range(50):
        stems = [[rng.randrange(50) for _ in range(rng.randrange(1, 40))] for _ in range(4)]
        prompts = [
            rng.choice(stems)[: rng.randrange(1, 40)] + [rng.randrange(50) for _ in range(5)]
            for _ in range(25)
        ]
        found = find_shared_prefixes(prompts)
        assert sum(s.requests for s in found) <= len(prompts)
        for sharing in found:
            assert sharing.shared >= 8


def test_words_join_to_the_text():
    text = "On 2026-11-21, at 14:05 – „hello“?\n  Ada's  tea."
    assert "".join(words(text)) == text
    assert PrefixSearch([words(text)], [0], None, None, "words").kind(0, 2) == "a date"

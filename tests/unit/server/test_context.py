"""`context`: what of a chat is marked, what is cut of it, and that nothing else ever is."""

import copy
import hashlib
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headway.core.errors import RequestError
from headway.core.service import ServiceClass
from headway.core.slo import Slo
from headway.frontend.text import Tokenizer
from headway.server.context import ContextAsked, check
from headway.server.openai.schema import ChatBody, chat_messages
from headway.server.shorten import apply_class_context, marked_parts, shorten_chat
from headway.spec.embedded import model_folder

HALF = ContextAsked(keep=0.5)
WORDS = "kite bell fox river moon red blue Anna Tom house tree sings walks far away again".split()
DOCUMENT = "Anna has a red kite. Tom has a blue bell. The fox walks far away. The moon is out."


class ByHash:
    """Stands for the drafting model: any score, the same for the same text."""

    def surprisals(self, units: list[str], owner: str = "") -> list[float]:
        return [hashlib.blake2b(u.encode()).digest()[0] / 64 for u in units]


@pytest.fixture(scope="module")
def model() -> Any:
    tokenizer = Tokenizer(model_folder("headway-tiny"))
    tokenizer.template.source += "{# documents #}"
    return SimpleNamespace(
        scorer=ByHash(),
        needs_tokenizer=lambda param: tokenizer,
        info=lambda: SimpleNamespace(max_model_len=4096),
    )


def body_of(messages: list[dict[str, Any]], **fields: Any) -> ChatBody:
    return msgspec.convert({"messages": messages, **fields}, ChatBody)


def document(text: str, **more: str) -> dict[str, Any]:
    return {"type": "document", "document": {"data": {"text": text, **more}}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def sentences(rng: random.Random, most: int = 12) -> str:
    return " ".join(
        " ".join(rng.choices(WORDS, k=rng.randint(2, 8))).capitalize() + "."
        for _ in range(rng.randint(1, most))
    )


def some_chat(rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Instructions of every kind among documents and results of tools."""
    messages: list[dict[str, Any]] = [
        {"role": rng.choice(("system", "developer")), "content": sentences(rng)}
    ]
    for _ in range(rng.randint(1, 3)):
        asked: Any = sentences(rng)
        if rng.random() < 0.7:
            asked = [
                document(sentences(rng), title=sentences(rng, 1))
                if rng.random() < 0.5
                else text(sentences(rng))
                for _ in range(rng.randint(1, 4))
            ] + [text(sentences(rng, 2))]
        messages.append({"role": "user", "content": asked})
        if rng.random() < 0.6:
            arguments = msgspec.json.encode({"q": sentences(rng, 2)}).decode()
            call = {"id": "c", "type": "function"}
            call["function"] = {"name": "look", "arguments": arguments}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            result = sentences(rng)
            if rng.random() < 0.3:
                result = msgspec.json.encode([sentences(rng, 1) for _ in range(5)]).decode()
            messages.append({"role": "tool", "tool_call_id": "c", "content": result})
        messages.append({"role": "assistant", "content": sentences(rng)})
    messages.append({"role": "user", "content": sentences(rng, 2)})
    documents = [{"title": sentences(rng, 1), "text": sentences(rng)} for _ in range(2)]
    return messages, documents if rng.random() < 0.5 else None


def instructions(messages: list[dict[str, Any]]) -> list[Any]:
    """All of a chat that is not marked, in its order."""
    found: list[Any] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            found.append((message["role"], message["tool_call_id"]))
        elif isinstance(content, list):
            found.append((message["role"], [p["text"] for p in content if p["type"] == "text"]))
        else:
            found.append((message["role"], content, message.get("tool_calls")))
    return found


def test_no_instruction_of_1000_prompts_is_cut(model):
    rng, num_cut = random.Random(7), 0
    for number in range(1000):
        messages, documents = some_chat(rng)
        asked = ContextAsked(
            keep=rng.choice((0.8, 0.5, 0.3, 0.05)), method=("surprisal", "random")[number % 2]
        )
        body = body_of(messages, documents=documents)
        was = copy.deepcopy(body.messages)
        found, cut = shorten_chat(model, body, asked)
        assert instructions(found.messages) == instructions(was)
        assert body.messages == was, "the client's own body is left as it is"
        assert [d["title"] for d in found.documents or ()] == [d["title"] for d in documents or ()]
        assert number % 10 or shorten_chat(model, body, asked) == (found, cut)
        chat_messages(found.messages)
        num_cut += cut.num_cut
    assert num_cut > 100_000


def test_what_a_later_turn_adds_changes_no_earlier_cut(model):
    rng = random.Random(3)
    for _ in range(100):
        messages, _ = some_chat(rng)
        longer = [*messages, {"role": "assistant", "content": "So."}, *some_chat(rng)[0][1:]]
        first, _ = shorten_chat(model, body_of(messages), HALF)
        then, _ = shorten_chat(model, body_of(longer), HALF)
        assert then.messages[: len(messages)] == first.messages


def test_the_parts_of_a_message_share_its_room(model):
    """What the question names stays, and a document that says nothing of it goes whole."""
    messages = [
        {
            "role": "user",
            "content": [document("Far away. " * 8), document(DOCUMENT), text("What has Anna?")],
        }
    ]
    model_half, cut = shorten_chat(model, body_of(messages), HALF)
    kept = [p for p in model_half.messages[0]["content"] if p["type"] == "document"]
    assert "Anna has a red kite." in kept[-1]["document"]["data"]["text"]
    assert cut.num_cut >= cut.num_tokens / 2 and cut.num_units > 4
    assert (
        "cut_tokens" not in cut.header_value
        and f"cut={cut.num_cut}/{cut.num_tokens}" in cut.header_value
    )


def test_repeated_units_are_cut_first(model):
    result = {"role": "tool", "tool_call_id": "c", "content": DOCUMENT}
    messages = [{"role": "user", "content": "Look."}, result, dict(result)]
    found, cut = shorten_chat(model, body_of(messages), ContextAsked(keep=0.99))
    assert len(found.messages[2]["content"]) < len(DOCUMENT) / 2
    assert cut.num_duplicate > 0 and "said twice" in cut.header_value


def test_documents_are_left_where_the_template_shows_none(model):
    bare = SimpleNamespace(**vars(model))
    tokenizer = Tokenizer(model_folder("headway-tiny"))
    bare.needs_tokenizer = lambda param: tokenizer
    body = body_of([{"role": "user", "content": "Hi"}], documents=[{"text": DOCUMENT}])
    assert shorten_chat(bare, body, HALF)[0].documents == [{"text": DOCUMENT}]
    assert shorten_chat(model, body, HALF)[0].documents != [{"text": DOCUMENT}]


def test_parts_go_with_the_question_of_their_message():
    messages = [
        {"role": "user", "content": [document("A."), text("First?")]},
        {"role": "tool", "tool_call_id": "c", "content": "B."},
        {"role": "user", "content": "Last?"},
    ]
    groups = list(
        marked_parts(messages, [{"snippet": "C."}, {"data": "D."}, {"data": {"text": "E."}}])
    )
    told = [[(part.text, part.question) for part in parts] for parts in groups]
    assert told[0] == [("C.", "Last?"), ("D.", "Last?"), ("E.", "Last?")]
    assert told[1:] == [[("A.", "First?")], [("B.", "First?")]]


def test_without_context_the_body_is_unchanged(model):
    body = body_of([{"role": "tool", "tool_call_id": "c", "content": DOCUMENT}])
    for asked in (None, ContextAsked(keep=1.0)):
        assert shorten_chat(model, body, asked) == (body, None)


@pytest.mark.parametrize(
    ("asked", "has_scorer", "param", "code"),
    [
        (ContextAsked(), True, "context.keep", "missing_required_parameter"),
        (ContextAsked(keep=0), True, "context.keep", "decimal_below_min_value"),
        (ContextAsked(keep=1.5), True, "context.keep", "decimal_above_max_value"),
        (ContextAsked(keep=0.5, method="best"), True, "context.method", "invalid_value"),
        (HALF, False, "context.keep", "no_draft_model"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(asked, has_scorer, param, code):
    with pytest.raises(RequestError) as caught:
        check(asked, has_scorer)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_without_a_draft_model_only_random_cuts_are_possible():
    check(ContextAsked(keep=0.5, method="random"), False)
    check(ContextAsked(keep=1.0), False)


def test_a_class_says_it_for_its_requests(model):
    row = ServiceClass(name="cheap", slo=Slo(), keep_context=0.3)
    body = body_of([{"role": "user", "content": "Hi"}])
    apply_class_context(model, body, row)
    assert body.context == ContextAsked(keep=0.3)
    own = body_of([{"role": "user", "content": "Hi"}], context={"keep": 1})
    apply_class_context(model, own, row)
    assert own.context == ContextAsked(keep=1)
    apply_class_context(model, SimpleNamespace(), row)  # completions have no documents


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"type": "document"}, "messages[0].content[0].document"),
        ({"type": "document", "document": {"data": 3}}, "messages[0].content[0].document.data"),
        (
            {"type": "document", "document": {"data": {"text": 3}}},
            "messages[0].content[0].document.data.text",
        ),
        (
            {"type": "document", "document": {"data": {"url": "x"}}},
            "messages[0].content[0].document.data.url",
        ),
        (
            {"type": "document", "document": {"data": "x", "score": 1}},
            "messages[0].content[0].document.score",
        ),
    ],
)
def test_a_document_of_another_shape_is_refused(given, param):
    with pytest.raises(RequestError) as caught:
        chat_messages([{"role": "user", "content": [given]}])
    assert caught.value.param == param


def test_a_document_is_its_title_and_its_text():
    said = [document(DOCUMENT, title="Kites"), text("Who?")]
    [message] = chat_messages([{"role": "user", "content": said}])
    assert message["content"] == f"Kites\n{DOCUMENT}\nWho?"


def test_more_text_than_is_read_is_refused(model):
    small = SimpleNamespace(**vars(model))
    small.info = lambda: SimpleNamespace(max_model_len=2)
    body = body_of([{"role": "tool", "tool_call_id": "c", "content": DOCUMENT * 50}])
    with pytest.raises(RequestError, match="the most that are read here") as caught:
        shorten_chat(small, body, HALF)
    assert caught.value.param == "context"

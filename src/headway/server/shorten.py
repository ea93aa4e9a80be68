"""The marked parts of a chat, cut as `context` asks: see `server.context`."""

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from headway.core.service import ServiceClass
from headway.edge.lanes import checkpoint
from headway.frontend.shorten.choose import Seen, by_chance, choose, relevance
from headway.frontend.shorten.units import Text, split
from headway.frontend.text import Tokenizer
from headway.server import context, prompt_text
from headway.server.context import RANDOM, SURPRISAL, ContextAsked, Cut
from headway.server.models import ServedModel
from headway.server.openai.documents import FIELDS
from headway.server.openai.schema import ChatBody

TOOLS = ("tool", "function")


def shortened(
    model: ServedModel, body: ChatBody, asked: ContextAsked | None, owner: str = ""
) -> tuple[ChatBody, Cut | None]:
    """The body with its marked parts cut, and what was cut; the body itself where nothing is asked.

    `owner` is who may profit from what was computed for the same text.
    """
    context.check(asked, model.scorer is not None)
    if asked is None or asked.keep is None or asked.keep == 1:
        return body, None
    tokenizer = model.needs_tokenizer("context")
    method = asked.method or SURPRISAL
    cut, seen = Cut(keep=asked.keep, method=method), Seen()
    messages, documents = copy.deepcopy((body.messages, body.documents))
    groups = list(marked(messages, documents if shows_documents(tokenizer) else None))
    check_size(model, tokenizer, groups)
    for parts in groups:
        texts = [split(part.text) for part in parts]
        units = [unit for text in texts for unit in text.units]
        sizes = tokenizer.counts(units)
        checkpoint()
        scores = worth(model, texts, parts[0].question, method, owner)
        choice = choose(sizes, seen.repeated(units), scores, asked.keep)
        kept = iter(choice.kept)
        left = [text.keep(list(islice(kept, len(text.units)))) for text in texts]
        for part, text in zip(parts, left, strict=True):
            part.put(text)
        cut = cut.add(
            choice, sum(tokenizer.counts([p.text for p in parts])), sum(tokenizer.counts(left))
        )
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = [part for part in message["content"] if not is_empty(part)]
    return msgspec.structs.replace(body, messages=messages, documents=documents), cut


def worth(
    model: ServedModel, texts: list[Text], question: str, method: str, owner: str
) -> list[float]:
    """What each unit of these texts is worth, in nats: how surprising it is in its own text, and
    what it shares with the question beside the others."""
    units = [unit for text in texts for unit in text.units]
    if len(units) == 1:
        return [0.0]
    if method == RANDOM or model.scorer is None:
        return by_chance(units)
    told = [nats for text in texts for nats in model.scorer.surprisals(text.units, owner)]
    return [own + also for own, also in zip(told, relevance(units, question), strict=True)]


def settle_context(model: ServedModel, body: Any, row: ServiceClass) -> None:
    """Where a body that chats does not say how much of its documents stays, its class may."""
    if not hasattr(body, "context"):
        return
    if body.context is None and row.keep_context is not None:
        body.context = ContextAsked(keep=row.keep_context)
    context.check(body.context, model.scorer is not None)


def check_size(model: ServedModel, tokenizer: Tokenizer, groups: "list[list[Part]]") -> None:
    """Refuse marked parts of more text than is rendered here, before a model reads them."""
    size = sum(len(part.text) for parts in groups for part in parts)
    most = model.info().max_model_len
    limit = min(tokenizer.text_limit(most, loosely=True), prompt_text.RENDERED_BYTES)
    if size > limit:
        raise prompt_text.too_long(
            f"Documents and tool results have {size} characters, and {limit} are the most that "
            "are read here to be shortened.",
            "context",
        )


# ── what is marked ──────────────────────────────────────────────────────────────────────────


class Part(NamedTuple):
    """A text that may be cut, what was asked beside it, and the way to put another in its place."""

    text: str
    question: str
    put: Callable[[str], None]


def shows_documents(tokenizer: Tokenizer) -> bool:
    """Whether the model's template shows the field `documents`."""
    return tokenizer.template is not None and "documents" in tokenizer.template.source


def marked(
    messages: list[dict[str, Any]], documents: list[dict[str, Any]] | None
) -> Iterator[list[Part]]:
    """The marked parts in their order: `documents` together, those of a message together.

    Those of a message go with what was asked in it or before it, so that a later turn leaves them
    as they are; `documents` with the last question.
    """
    told = [asked_in(message) for message in messages]
    last = next((text for text in reversed(told) if text), "")
    found = [part for document in documents or () for part in texts_of(document, last)]
    if found:
        yield found
    before = ""
    for i, message in enumerate(messages):
        before = told[i] or before
        question = before or next((text for text in told[i:] if text), "")
        found = list(parts_of(message, question))
        if found:
            yield found


def parts_of(message: dict[str, Any], question: str) -> Iterator[Part]:
    """What of a message is marked: all of a tool's, and documents."""
    of_tool, content = message.get("role") in TOOLS, message.get("content")
    if of_tool and isinstance(content, str):
        yield place(message, "content", question)
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict):
            continue
        if of_tool and part.get("type") == "text":
            yield from in_place(part, "text", question)
        elif part.get("type") == "document":
            yield from texts_of(part.get("document"), question)


def is_empty(part: Any) -> bool:
    """Whether a document of a message has lost all of its text, and had no title."""
    match part:
        case {"type": "document", "document": {"data": str(text)}}:
            return not text
        case {"type": "document", "document": {"data": dict(data)}}:
            return bool(data) and not any(data.values())
    return False


def asked_in(message: dict[str, Any]) -> str:
    """The text of a user's message, without its documents."""
    content = message.get("content")
    if message.get("role") != "user":
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def texts_of(document: Any, question: str) -> Iterator[Part]:
    """The texts of a document; what names it stays whole."""
    if not isinstance(document, dict):
        return
    for name in FIELDS:
        yield from in_place(document, name, question)
    yield from in_place(document, "data", question)
    if isinstance(document.get("data"), dict):
        for name in FIELDS:
            yield from in_place(document["data"], name, question)


def in_place(holder: dict[str, Any], name: str, question: str) -> Iterator[Part]:
    """The text under `name`, where there is one."""
    if isinstance(holder.get(name), str):
        yield place(holder, name, question)


def place(holder: dict[str, Any], name: str, question: str) -> Part:
    """The text under `name`."""
    return Part(holder[name], question, lambda text: holder.__setitem__(name, text))

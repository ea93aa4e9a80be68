"""Shortening of documents and tool results in a chat: the field `context` (`server.context`)."""

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from headway.core.service import ServiceClass
from headway.edge.lanes import checkpoint
from headway.frontend.shorten.choose import SeenUnits, by_chance, choose, relevance
from headway.frontend.shorten.units import SplitText, split
from headway.frontend.text import Tokenizer
from headway.server import context, prompt_text
from headway.server.context import RANDOM, SURPRISAL, ContextAsked, ContextCut
from headway.server.models import ServedModel
from headway.server.openai.documents import TEXT_FIELDS
from headway.server.openai.schema import ChatBody

TOOL_ROLES = ("tool", "function")


def shorten_chat(
    model: ServedModel, body: ChatBody, options: ContextAsked | None, owner: str = ""
) -> tuple[ChatBody, ContextCut | None]:
    """Return the body with its marked parts shortened, and the counts of what was cut.

    Without `context`, or with keep 1, it is the body itself and None. `owner` is the tenant whose
    cached scores of the same text may be used.
    """
    context.check(options, model.scorer is not None)
    if options is None or options.keep is None or options.keep == 1:
        return body, None
    tokenizer = model.needs_tokenizer("context")
    method = options.method or SURPRISAL
    cut, history = ContextCut(keep=options.keep, method=method), SeenUnits()
    messages, documents = copy.deepcopy((body.messages, body.documents))
    groups = list(marked_parts(messages, documents if template_has_documents(tokenizer) else None))
    check_size(model, tokenizer, groups)
    for parts in groups:
        texts = [split(part.text) for part in parts]
        units = [unit for text in texts for unit in text.units]
        sizes = tokenizer.counts(units)
        checkpoint()
        scores = unit_scores(model, texts, parts[0].question, method, owner)
        choice = choose(sizes, history.repeated(units), scores, options.keep)
        flags = iter(choice.mask)
        shortened = [text.keep(list(islice(flags, len(text.units)))) for text in texts]
        for part, text in zip(parts, shortened, strict=True):
            part.put(text)
        cut = cut.add(
            choice,
            sum(tokenizer.counts([p.text for p in parts])),
            sum(tokenizer.counts(shortened)),
        )
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = [part for part in message["content"] if not is_empty(part)]
    return msgspec.structs.replace(body, messages=messages, documents=documents), cut


def unit_scores(
    model: ServedModel, texts: list[SplitText], question: str, method: str, owner: str
) -> list[float]:
    """Return the value of each unit of the texts, in nats.

    It is the surprisal of the unit in its own text, plus what the unit shares with the question
    and others do not.
    """
    units = [unit for text in texts for unit in text.units]
    if len(units) == 1:
        return [0.0]
    if method == RANDOM or model.scorer is None:
        return by_chance(units)
    surprisals = [nats for text in texts for nats in model.scorer.surprisals(text.units, owner)]
    return [own + also for own, also in zip(surprisals, relevance(units, question), strict=True)]


def apply_class_context(model: ServedModel, body: Any, row: ServiceClass) -> None:
    """Set `context` of a chat body from its class where the body has none."""
    if not hasattr(body, "context"):
        return
    if body.context is None and row.keep_context is not None:
        body.context = ContextAsked(keep=row.keep_context)
    context.check(body.context, model.scorer is not None)


def check_size(model: ServedModel, tokenizer: Tokenizer, groups: "list[list[MarkedPart]]") -> None:
    """Refuse marked parts of more text than is rendered here, before the draft model reads them."""
    size = sum(len(part.text) for parts in groups for part in parts)
    most = model.info().max_model_len
    limit = min(tokenizer.text_limit(most, loosely=True), prompt_text.RENDERED_BYTES)
    if size > limit:
        raise prompt_text.too_long_error(
            f"Documents and tool results have {size} characters, and {limit} are the most that "
            "are read here to be shortened.",
            "context",
        )


# ── marked parts ────────────────────────────────────────────────────────────────────────────


class MarkedPart(NamedTuple):
    """A text that may be cut, the question it is compared with, and a setter that replaces it."""

    text: str
    question: str
    put: Callable[[str], None]


def template_has_documents(tokenizer: Tokenizer) -> bool:
    """Whether the chat template shows the field `documents`."""
    return tokenizer.template is not None and "documents" in tokenizer.template.source


def marked_parts(
    messages: list[dict[str, Any]], documents: list[dict[str, Any]] | None
) -> Iterator[list[MarkedPart]]:
    """Yield groups of marked parts in their order: `documents`, then those of each message.

    Parts of a message go with the question in it or the last one before it, so that a later turn
    leaves them as they are; `documents` go with the last question.
    """
    user_texts = [user_text(message) for message in messages]
    last_question = next((text for text in reversed(user_texts) if text), "")
    parts = [
        part for document in documents or () for part in document_parts(document, last_question)
    ]
    if parts:
        yield parts
    latest_question = ""
    for i, message in enumerate(messages):
        latest_question = user_texts[i] or latest_question
        question = latest_question or next((text for text in user_texts[i:] if text), "")
        parts = list(message_parts(message, question))
        if parts:
            yield parts


def message_parts(message: dict[str, Any], question: str) -> Iterator[MarkedPart]:
    """Yield the marked parts of a message: all text of a tool's message, and documents."""
    of_tool, content = message.get("role") in TOOL_ROLES, message.get("content")
    if of_tool and isinstance(content, str):
        yield part_at(message, "content", question)
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict):
            continue
        if of_tool and part.get("type") == "text":
            yield from parts_at(part, "text", question)
        elif part.get("type") == "document":
            yield from document_parts(part.get("document"), question)


def is_empty(part: Any) -> bool:
    """Whether a document of a message has lost all of its text and has no title."""
    match part:
        case {"type": "document", "document": {"data": str(text)}}:
            return not text
        case {"type": "document", "document": {"data": dict(data)}}:
            return bool(data) and not any(data.values())
    return False


def user_text(message: dict[str, Any]) -> str:
    """Return the text of a user's message without its documents, "" for other roles."""
    content = message.get("content")
    if message.get("role") != "user":
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def document_parts(document: Any, question: str) -> Iterator[MarkedPart]:
    """Yield the texts of a document; its title and id are never cut."""
    if not isinstance(document, dict):
        return
    for name in TEXT_FIELDS:
        yield from parts_at(document, name, question)
    yield from parts_at(document, "data", question)
    if isinstance(document.get("data"), dict):
        for name in TEXT_FIELDS:
            yield from parts_at(document["data"], name, question)


def parts_at(holder: dict[str, Any], name: str, question: str) -> Iterator[MarkedPart]:
    """Yield the text under `name`, where there is one."""
    if isinstance(holder.get(name), str):
        yield part_at(holder, name, question)


def part_at(holder: dict[str, Any], name: str, question: str) -> MarkedPart:
    """Return the text under `name` as a part."""
    return MarkedPart(holder[name], question, lambda text: holder.__setitem__(name, text))

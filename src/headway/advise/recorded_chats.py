"""Superfluous parts of recorded chats: the report of `headway doctor --data FILE`.

The file holds a chat body a line, or the lines of a batch with `body`; `answer` (a text) or
`response` (a chat completion) beside it is the recorded answer. The report counts runs that stand
twice in a prompt, tools that no answer called, documents that no answer used, examples, and answers
that could be shorter. Sizes are words and marks, so that no tokenizer is needed. The report has
numbers and the names of tools: never a text of a prompt or an answer.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.markup import escape

from headway.advise.show import plain_table
from headway.advise.words import percent, plural
from headway.core.errors import UsageError
from headway.core.regular_file import read_text

PIECE = re.compile(r"\w+|[^\w\s]")
WORD = re.compile(r"\w+")
RUN = 16
"""Pieces of a run that counts as a repetition: shorter ones repeat by accident."""
MIN_OFFERS = 10
"""Chats that offer a tool before it counts as never called."""
MIN_QUESTIONS = 5
"""Different questions behind the same pairs or blocks before these count as examples."""
MAX_DOCUMENT_PLACES = 8
MAX_BLOCK_CHARACTERS = 1 << 15
"""Longer texts are not searched for blocks."""
ANSWER_CAP_PERCENTILE = 90
MAX_LOOP_PERIOD, MIN_LOOP_CYCLES, MIN_LOOP_PIECES = 32, 3, 24
TOOL_ROLES, INSTRUCTION_ROLES = ("tool", "function"), ("system", "developer")
DOCUMENT_FIELDS = ("data", "text", "snippet", "content", "contents")
PARAGRAPH = re.compile(r"(?:[^\n]*\S[^\n]*(?:\n|\Z))+")
LABEL = re.compile(r"^[ \t]*([^\W\d][\w ]{0,24}):(?=\s|\Z)", re.MULTILINE)

FORMAT = 'Write a chat body a line, {"messages": […]}, or the lines of a batch.'

Json = dict[str, Any]


class RecordedChat(msgspec.Struct, kw_only=True):
    """One line of the file: its messages, documents, the words of each tool's description, and the
    answer where it was recorded."""

    messages: list[Json]
    documents: list[str] = []
    tools: dict[str, int] = {}
    answer: str | None = None
    calls: list[str] = []


class SuperfluousPart(msgspec.Struct, kw_only=True):
    """A part that `chats` could omit: `words` of the `of_words` of all prompts or answers."""

    what: str
    chats: int
    words: int
    of_words: int
    note: str


class ChatReport(msgspec.Struct, kw_only=True):
    """The chats, the words of their prompts and tools, and the parts that were found."""

    chats: int
    words: int
    parts: list[SuperfluousPart]


# ── the file ────────────────────────────────────────────────────────────────────────────────────


def read_chats(path: Path) -> list[RecordedChat]:
    """Return the chats of a file; raise UsageError where it holds none or something else."""
    try:
        lines = read_text(path).split("\n")
    except OSError as error:
        raise UsageError(f"--data {path}: {error.strerror or error}.", "Check the path.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--data {path} is not UTF-8 text.", FORMAT) from error
    chats = [
        chat_of(line, f"--data {path.name}, line {i}")
        for i, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not chats:
        raise UsageError(f"--data {path} holds no chat.", FORMAT)
    return chats


def chat_of(line: str, where: str) -> RecordedChat:
    """Return the chat of one line."""
    try:
        fields = msgspec.json.decode(line, type=dict)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{where}: {error}", FORMAT) from error
    body = fields.get("body", fields)
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise UsageError(f"{where} has no messages.", FORMAT)
    answer, calls = fields.get("answer"), called(messages)
    if isinstance(message := answer_message(fields.get("response")), dict):
        answer, calls = text_of(message.get("content")), calls + called([message])
    return RecordedChat(
        messages=messages,
        documents=documents_of(body),
        tools=tools_of(body),
        answer=answer if isinstance(answer, str) else None,
        calls=calls,
    )


def answer_message(response: Any) -> Any:
    """Return the message of a chat completion, or of a batch's line around one."""
    match response:
        case {"body": {"choices": [{"message": message}, *_]}}:
            return message
        case {"choices": [{"message": message}, *_]}:
            return message
    return None


def called(messages: Iterable[Json]) -> list[str]:
    """Return the names of the tools that messages call."""
    names = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            match call:
                case {"function": {"name": str(name)}}:
                    names.append(name)
    return names


def text_of(content: Any) -> str:
    """Return the text of a message's content, documents left out."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def document_text(document: Any) -> str:
    """Return the text of a document, of a field or of `data`."""
    if isinstance(document, str):
        return document
    if not isinstance(document, dict):
        return ""
    return "\n".join(filter(None, (document_text(document.get(n)) for n in DOCUMENT_FIELDS)))


def documents_of(body: Json) -> list[str]:
    """Return tools' results, parts of the type `document` and the field `documents`."""
    texts = [document_text(each) for each in body.get("documents") or ()]
    for message in body["messages"]:
        content = message.get("content")
        if message.get("role") in TOOL_ROLES:
            texts.append(text_of(content))
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") == "document":
                texts.append(document_text(part.get("document")))
    return [text for text in texts if text]


def other_texts(chat: RecordedChat) -> list[str]:
    """Return all text of the messages that is no document."""
    mine = [m for m in chat.messages if m.get("role") not in TOOL_ROLES]
    return [text_of(m.get("content")) for m in mine] + [
        str(m.get("tool_calls") or "") for m in mine
    ]


def tools_of(body: Json) -> dict[str, int]:
    """Return the words of each tool's description, by name."""
    tools = {}
    for tool in body.get("tools") or ():
        match tool:
            case {"function": {"name": str(name)} as function}:
                tools[name] = num_pieces(msgspec.json.encode(function).decode())
    return tools


def num_pieces(text: str) -> int:
    return len(PIECE.findall(text))


# ── what is counted ─────────────────────────────────────────────────────────────────────────────


def report_on(chats: Sequence[RecordedChat]) -> ChatReport:
    """Return all parts of the chats that were found."""
    prompts = [PIECE.findall("\n".join((*other_texts(c), *c.documents))) for c in chats]
    words = sum(map(len, prompts)) + sum(sum(chat.tools.values()) for chat in chats)
    repeated = [repeated_pieces(prompt) for prompt in prompts]
    twice = SuperfluousPart(
        what="repeated in one prompt",
        chats=sum(map(bool, repeated)),
        words=sum(repeated),
        of_words=words,
        note=f"runs of {RUN} words and marks",
    )
    prompt_parts = (*uncalled_tools(chats, words), *unused_documents(chats, words))
    parts = [twice, *prompt_parts, *shared_examples(chats, words), *long_answers(chats)]
    return ChatReport(chats=len(chats), words=words, parts=[part for part in parts if part.words])


def repeated_pieces(pieces: Sequence[str], run: int = RUN) -> int:
    """Return how many pieces lie in a run that stands before in the same prompt, not overlapping.

    >>> repeated_pieces("1 2 3 9 1 2 3".split(), run=3), repeated_pieces("1 1 1 1".split(), run=3)
    (3, 0)
    """
    first: dict[tuple[str, ...], int] = {}
    covered, count = 0, 0
    for start in range(len(pieces) - run + 1):
        before = first.setdefault(tuple(pieces[start : start + run]), start)
        if before + run <= start:
            count += start + run - max(covered, start)
            covered = start + run
    return count


def uncalled_tools(chats: Sequence[RecordedChat], words: int) -> list[SuperfluousPart]:
    """Return the tools that were offered often and never called, the dearest first."""
    offers, sizes = Counter[str](), Counter[str]()
    calls = {name for chat in chats for name in chat.calls}
    for chat in chats:
        offers.update(chat.tools.keys())
        sizes.update(chat.tools)
    parts = [
        SuperfluousPart(
            what=f"tool {name}, never called",
            chats=count,
            words=sizes[name],
            of_words=words,
            note=f"offered by {plural(count, 'chat')}",
        )
        for name, count in offers.items()
        if count >= MIN_OFFERS and name not in calls
    ]
    return sorted(parts, key=lambda part: (-part.words, part.what))


def words_of(texts: Iterable[str]) -> set[str]:
    return {word.lower() for text in texts for word in WORD.findall(text)}


def telling_words(documents: Sequence[str], rest: Iterable[str]) -> list[set[str]]:
    """Return the words of each document by which an answer would show that it used it: those that
    stand in none of the other text and in at most two of the documents, or half of them.

    >>> sorted(telling_words(["Anna has a kite", "Tom has a ball"], ["Anna's toy"])[0])
    ['a', 'has', 'kite']
    """
    other = words_of(rest)
    each = [words_of([document]) - other for document in documents]
    count = Counter(word for words in each for word in words)
    most = max(len(documents) / 2, 2)
    return [{word for word in words if count[word] <= most} for words in each]


def unused_documents(chats: Sequence[RecordedChat], words: int) -> Iterator[SuperfluousPart]:
    """Yield the documents of the chats with an answer that has none of their telling words."""
    shown, used, unused_words = [0] * MAX_DOCUMENT_PLACES, [0] * MAX_DOCUMENT_PLACES, 0
    answered = [chat for chat in chats if chat.answer is not None and chat.documents]
    for chat in answered:
        answer = words_of([chat.answer or ""])
        telling = telling_words(chat.documents, other_texts(chat))
        for i, (text, its_words) in enumerate(zip(chat.documents, telling, strict=True)):
            is_used, place = not its_words.isdisjoint(answer), min(i, MAX_DOCUMENT_PLACES - 1)
            shown[place] += 1
            used[place] += is_used
            unused_words += 0 if is_used else num_pieces(text)
    places = ", ".join(f"{a} of {b}" for a, b in zip(used, shown, strict=True) if b)
    yield SuperfluousPart(
        what="documents that no answer used",
        chats=len(answered),
        words=unused_words,
        of_words=words,
        note=f"used by place: {places}; answers in words of their own are not seen",
    )


def shared_examples(chats: Sequence[RecordedChat], words: int) -> Iterator[SuperfluousPart]:
    """Yield the examples that stand before several different questions, were none needed."""
    each = [examples for chat in chats if (examples := examples_of(chat.messages))]
    questions: dict[tuple[str, ...], set[str]] = {}
    for texts, question in each:
        questions.setdefault(texts, set()).add(question)
    shared = [texts for texts, _ in each if len(questions[texts]) >= MIN_QUESTIONS]
    mean = sum(map(len, shared)) / max(len(shared), 1)
    yield SuperfluousPart(
        what="examples, were none needed",
        chats=len(shared),
        words=sum(num_pieces(text) for texts in shared for text in texts),
        of_words=words,
        note=f"{mean:.1f} a chat; ask the same questions without them first",
    )


def examples_of(messages: Sequence[Json]) -> tuple[tuple[str, ...], str] | None:
    """Return (examples, question): pairs before the last question, or blocks of one shape."""
    rest = [m for m in messages if m.get("role") not in INSTRUCTION_ROLES]
    texts = [text_of(m.get("content")) for m in rest]
    roles = [m.get("role") for m in rest]
    if len(rest) > 2 and roles == ["user", "assistant"] * (len(rest) // 2) + ["user"]:
        pairs = zip(texts[:-1:2], texts[1::2], strict=True)
        return tuple(f"{question}\n{answer}" for question, answer in pairs), texts[-1]
    last = texts[-1] if texts else ""
    instructions = [m for m in messages if m.get("role") in INSTRUCTION_ROLES]
    for text in [*(text_of(m.get("content")) for m in instructions), last]:
        if blocks := blocks_in(text):
            return tuple(blocks), last
    return None


def blocks_in(text: str) -> list[str]:
    """Return the longest run of paragraphs with the same labels ("Text: …", "Mood: …")."""
    best: list[str] = []
    run: list[str] = []
    shape: list[str] = []
    for match in PARAGRAPH.finditer(text if len(text) <= MAX_BLOCK_CHARACTERS else ""):
        labels = LABEL.findall(match[0])
        is_whole = len(labels) > 1 and not match[0].rstrip().endswith(":")
        run = ([*run, match[0]] if labels == shape else [match[0]]) if is_whole else []
        shape = labels
        best = run if len(run) > len(best) else best
    return best if len(best) > 1 else []


def long_answers(chats: Sequence[RecordedChat]) -> Iterator[SuperfluousPart]:
    """Yield what a cap and a stop rule would have left out of the answers."""
    answers = [PIECE.findall(chat.answer) for chat in chats if chat.answer]
    lengths = [len(pieces) for pieces in answers] or [0]
    cap = round(float(np.percentile(lengths, ANSWER_CAP_PERCENTILE)))
    above, looped = [max(n - cap, 0) for n in lengths], [looped_pieces(each) for each in answers]
    for what, superfluous, note in (
        (f"answers behind {cap} words", above, "max_tokens; it cuts the longest tenth"),
        ("ends of answers that repeat", looped, "stop strings, a schema, penalties"),
    ):
        yield SuperfluousPart(
            what=what,
            chats=sum(map(bool, superfluous)),
            words=sum(superfluous),
            of_words=sum(lengths),
            note=note,
        )


def looped_pieces(pieces: Sequence[str]) -> int:
    """Return the length of an answer's end that repeats what stands before it three times or more.

    >>> looped_pieces("7".split() + "1 2 3".split() * 10), looped_pieces("1 2 3".split() * 2)
    (27, 0)
    """
    best = 0
    for period in range(1, min(MAX_LOOP_PERIOD, len(pieces) // MIN_LOOP_CYCLES) + 1):
        length = 0
        while length < len(pieces) - period and pieces[-1 - length] == pieces[-1 - length - period]:
            length += 1
        if length >= max((MIN_LOOP_CYCLES - 1) * period, MIN_LOOP_PIECES):
            best = max(best, length)
    return best


# ── the table ───────────────────────────────────────────────────────────────────────────────────


def show_report(report: ChatReport, console: Console) -> None:
    """Print the counts as a table."""
    mean = report.words / report.chats
    head = f"{plural(report.chats, 'chat')}, {mean:.0f} words and marks of prompt and tools each"
    console.print(f"[bold]{head}[/]", highlight=False)
    table = plain_table("Superfluous parts", "words", "share", "chats", "")
    for part in report.parts:
        share = percent(part.words / max(part.of_words, 1))
        table.add_row(escape(part.what), f"{part.words:,}", share, f"{part.chats:,}", part.note)
    console.print(table if report.parts else "Nothing was found.", highlight=False)

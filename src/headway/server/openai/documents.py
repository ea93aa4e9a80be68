"""A document among the parts of a message, as Cohere's API has it, and the text that it becomes.

    {"type": "document", "document": {"data": "Anna has a red kite."}}
    {"type": "document", "document": {"id": "7", "data": {"title": "Kites", "text": "Anna has …"}}}

`id` is the client's own. The model reads the title, then the text, on lines of their own.
"""

from typing import Any

from headway.core.errors import RequestError

FIELDS = ("text", "snippet", "content", "contents")
"""Where clients put the text of a document."""


def document_text(part: dict[str, Any], where: str) -> str:
    """The text of a part of the type `document`; what would be dropped is refused by name."""
    document = part.get("document")
    if not isinstance(document, dict):
        raise wrong(f"{where}.document", "must be an object with data")
    known(document, ("id", "data"), f"{where}.document")
    data = document.get("data")
    if isinstance(data, str):
        return data
    if not isinstance(data, dict):
        raise wrong(f"{where}.document.data", "must be a string or an object")
    known(data, ("title", *FIELDS), f"{where}.document.data")
    for name, value in data.items():
        if not isinstance(value, str):
            raise wrong(f"{where}.document.data.{name}", "must be a string")
    return "\n".join(data[name] for name in ("title", *FIELDS) if data.get(name))


def known(given: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    """Refuse a field that the model would not be shown."""
    for name in given:
        if name not in names:
            raise RequestError(
                f"{where}.{name[:64]} is not read here; there are {', '.join(names)}.",
                param=f"{where}.{name[:64]}",
                code="unsupported_parameter",
            )


def wrong(where: str, why: str) -> RequestError:
    """A document of another shape."""
    return RequestError(f"{where} {why}.", param=where, code="invalid_type")

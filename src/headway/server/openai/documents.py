"""A document among the parts of a message, in the shape of Cohere's API, and its text.

    {"type": "document", "document": {"data": "Anna has a red kite."}}
    {"type": "document", "document": {"id": "7", "data": {"title": "Kites", "text": "Anna has …"}}}

`id` is the client's own. The model reads the title, then the text, on separate lines.
"""

from typing import Any

from headway.core.errors import RequestError

TEXT_FIELDS = ("text", "snippet", "content", "contents")
"""Names under which clients send the text of a document."""


def document_text(part: dict[str, Any], where: str) -> str:
    """Return the text of a `document` part; RequestError names a field that would be dropped."""
    document = part.get("document")
    if not isinstance(document, dict):
        raise shape_error(f"{where}.document", "must be an object with data")
    check_field_names(document, ("id", "data"), f"{where}.document")
    data = document.get("data")
    if isinstance(data, str):
        return data
    if not isinstance(data, dict):
        raise shape_error(f"{where}.document.data", "must be a string or an object")
    check_field_names(data, ("title", *TEXT_FIELDS), f"{where}.document.data")
    for name, value in data.items():
        if not isinstance(value, str):
            raise shape_error(f"{where}.document.data.{name}", "must be a string")
    return "\n".join(data[name] for name in ("title", *TEXT_FIELDS) if data.get(name))


def check_field_names(given: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    """Raise RequestError for a field that the model would not be shown."""
    for name in given:
        if name not in names:
            raise RequestError(
                f"{where}.{name[:64]} is not read here; there are {', '.join(names)}.",
                param=f"{where}.{name[:64]}",
                code="unsupported_parameter",
            )


def shape_error(where: str, why: str) -> RequestError:
    """Return the error of a document of another shape."""
    return RequestError(f"{where} {why}.", param=where, code="invalid_type")

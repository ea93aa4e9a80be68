"""Parsers of tool calls written as JSON, {"name": …, "arguments": {…}}: one, or a list.

The arguments are passed on as they arrive once the name is known. Nothing is passed on before it is
certain to be a call; after that the parser is lenient: a missing brace at the end does not undo a
call.
"""

from headway.frontend.text.source import TextSource, Wait, decoded

ARGUMENTS = ("arguments", "parameters")
NO_ARGUMENTS = "{}"


def call_object(source: TextSource, *, strict: bool = False) -> Wait[bool]:
    """Parse one call; return False, without any part, if this is none.

    `strict` is for formats that do not mark calls: the name must be that of an offered tool and the
    object must have arguments, else it is JSON for the user.
    """
    name: str | None = None
    early: str | None = None
    """Arguments before the name."""
    if not (yield from source.accept("{")):
        return False
    while True:
        yield from source.skip_space()
        char = yield from source.peek()
        if char == ",":
            source.skip(1)
            continue
        if char == "}":
            source.skip(1)
            break
        key = yield from source.decoded_string()
        yield from source.skip_space()
        if key is None or not (yield from source.accept(":")):
            return False
        yield from source.skip_space()
        if key == "name" and name is None:
            name = yield from source.decoded_string()
            if not name or (strict and name not in source.offered):
                return False
        elif key in ARGUMENTS and name is not None:
            yield from call_arguments(source, name)
            yield from rest_of_object(source)
            return True
        else:
            held: list[str] = []
            if not (yield from source.value(held.append)):
                return False
            early = "".join(held) if key in ARGUMENTS else early
    if name is None or (strict and early is None):
        return False
    source.begin_call(name)(unquoted(early or NO_ARGUMENTS))
    source.end_call()
    return True


def call_arguments(source: TextSource, name: str) -> Wait[None]:
    """Parse the arguments of a call: an object as it arrives, other values when complete."""
    write = source.begin_call(name)
    if (yield from source.peek()) in "{[":
        source.end_call((yield from source.value(write)))
        return
    held: list[str] = []
    complete = yield from source.value(held.append)
    write(unquoted("".join(held)))
    source.end_call(complete)


def unquoted(raw: str) -> str:
    """Return arguments written as a JSON string or null as an object: '"{}"' → '{}'."""
    if raw == "null":
        return NO_ARGUMENTS
    return (decoded(raw) or raw) if raw.startswith('"') else raw


def rest_of_object(source: TextSource) -> Wait[None]:
    """Skip other keys after the arguments and the closing brace, as far as they are there."""
    dropped: list[str] = []
    while True:
        yield from source.skip_space()
        char = yield from source.peek()
        if char == "}":
            source.skip(1)
            return
        if char != ",":
            return
        source.skip(1)
        yield from source.skip_space()
        if (yield from source.decoded_string()) is None:
            return
        yield from source.skip_space()
        if not (yield from source.accept(":")):
            return
        yield from source.skip_space()
        if not (yield from source.value(dropped.append)):
            return


def call_list(source: TextSource) -> Wait[bool]:
    """Parse [{…}, {…}]; return whether it had at least one call."""
    called = False
    if not (yield from source.accept("[")):
        return False
    while True:
        yield from source.skip_space()
        if (yield from source.accept(",")):
            continue
        if (yield from source.accept("]")):
            return called
        if called:
            source.hold()
        if not (yield from call_object(source)):
            source.show()
            return called
        called = True

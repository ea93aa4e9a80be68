"""Mistral: [TOOL_CALLS] and a list of calls, or since 2025 [TOOL_CALLS]name[ARGS]{…} for each."""

import re
import secrets
import string

from headway.frontend.text.source import TextSource, Wait
from headway.frontend.text.tools.calls import call_arguments, call_list

TAG, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAME = re.compile(r"[\w.:/-]*")
ID_CHARACTERS = string.ascii_letters + string.digits
ID_LENGTH = 9


def new_id() -> str:
    """Return an id of nine letters and digits, the only form that Mistral's templates accept."""
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))


def parse(source: TextSource) -> Wait[None]:
    """Parse a whole answer."""
    while (yield from source.until((TAG,), source.content)):
        source.hold(TAG)
        yield from source.skip_space()
        if (yield from source.sees("[")) and not (yield from source.sees(ARGS)):
            called = yield from call_list(source)
        else:
            called = yield from named_call(source)
        if not called:
            source.show()


def named_call(source: TextSource) -> Wait[bool]:
    """Parse name[CALL_ID]id[ARGS]{…}; the id and the marks may be missing."""
    name: list[str] = []
    yield from source.run(NAME, name.append)
    if (yield from source.accept(ID)):
        yield from source.run(NAME, len)
    yield from source.accept(ARGS)
    yield from source.skip_space()
    if not any(name) or not (yield from source.sees("{")):
        return False
    yield from call_arguments(source, "".join(name))
    return True

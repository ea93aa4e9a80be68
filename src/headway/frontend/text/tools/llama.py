"""Llama 3: the answer is a call, or several with "; " between them; <|python_tag|> may stand first.

Without the tag a call looks like JSON for the user, so the object must then have the name of a tool
and parameters.
"""

from headway.frontend.text.source import TextSource, Wait
from headway.frontend.text.tools.calls import call_object

TAG = "<|python_tag|>"


def parse(source: TextSource) -> Wait[None]:
    """Parse a whole answer."""
    source.hold()
    yield from source.skip_space()
    if not (yield from calls(source)):
        source.show()
    while (yield from source.until((TAG,), source.content)):
        source.hold(TAG)
        yield from source.skip_space()
        if not (yield from calls(source)):
            source.show()


def calls(source: TextSource) -> Wait[bool]:
    """Parse consecutive calls; return whether there was one."""
    called = False
    while True:
        yield from source.accept(TAG)
        yield from source.skip_space()
        if not (yield from call_object(source, strict=True)):
            break
        called = True
        source.hold()
        yield from source.skip_space()
        yield from source.accept(";")
        yield from source.skip_space()
        if not (yield from source.peek()):
            source.drop()
            break
    if called:
        source.show()
    return called

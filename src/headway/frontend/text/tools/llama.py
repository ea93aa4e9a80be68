"""Llama 3: the answer is a call, or several with "; " between them; <|python_tag|> may stand first.

Nothing else tells a call from JSON that the user asked for, so without the tag the object must have
a tool's name and its parameters.
"""

from headway.frontend.text.source import TextSource, Wait
from headway.frontend.text.tools.calls import call_object

TAG = "<|python_tag|>"


def parse(source: TextSource) -> Wait[None]:
    """All of an answer."""
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
    """As many calls as follow one another; False when there is none."""
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

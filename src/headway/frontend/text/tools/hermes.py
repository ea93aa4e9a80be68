"""Hermes and Qwen: each call between <tool_call> and </tool_call>, text before and between them."""

from headway.frontend.text.source import TextSource, Wait
from headway.frontend.text.tools.calls import call_object

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse(source: TextSource) -> Wait[None]:
    """Parse a whole answer."""
    marker = yield from source.until((OPEN,), source.content)
    while marker:
        source.hold(marker)
        yield from source.skip_space()
        if (yield from call_object(source)):
            marker = yield from source.until((CLOSE, OPEN), len)
            if marker == OPEN:
                continue
        else:
            source.show()
        marker = yield from source.until((OPEN,), source.content)

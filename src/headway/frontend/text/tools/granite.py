"""Granite 3 and Phi-4: <|tool_call|> and a list of calls; Phi closes it with <|/tool_call|>."""

from headway.frontend.text.source import TextSource, Wait
from headway.frontend.text.tools.calls import call_list

OPEN, CLOSE = "<|tool_call|>", "<|/tool_call|>"


def parse(source: TextSource) -> Wait[None]:
    """Parse a whole answer."""
    while (yield from source.until((OPEN,), source.content)):
        source.hold(OPEN)
        yield from source.skip_space()
        if (yield from call_list(source)):
            source.hold()
            yield from source.skip_space()
            if (yield from source.accept(CLOSE)):
                source.drop()
        source.show()

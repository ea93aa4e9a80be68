"""The process that renders a model's chat template for the server; see `frontend.text.rendering`.

The first line of its input is the template and its special tokens, each other one messages and
options. The first answer is null, or cause and fix where the template does not compile. The process
allows itself `LIMIT_BYTES` of memory, and for each line its argument, in seconds of processor time;
it ends with its input.
"""

import resource
import signal
import sys
from typing import Any

import msgspec

from headway.core.errors import RequestError, TokenizerError
from headway.frontend.text.template import ChatTemplate

LIMIT_BYTES = 256 * 2**20


def answer(template: ChatTemplate, line: bytes) -> tuple[str, Any]:
    """("text", the prompt) or ("refused", [message, param, code])."""
    messages, options = msgspec.json.decode(line)
    try:
        return "text", template.render(messages, **options)
    except RequestError as error:
        return "refused", [error.cause, error.param, error.code]
    except MemoryError:
        return "refused", ["The model's chat template takes too much memory.", "messages", None]


def limit_memory() -> None:
    """Allow `LIMIT_BYTES` more than this process has mapped by now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + LIMIT_BYTES, mapped + LIMIT_BYTES))


def say(answer: Any) -> None:
    """Answer one line; until the next the processor's time is not counted."""
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()
    signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Serve renderings until the server closes its end."""
    limit_s = float(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, special_tokens = msgspec.json.decode(sys.stdin.buffer.readline())
    if sys.platform == "linux":
        limit_memory()
    signal.setitimer(signal.ITIMER_PROF, limit_s)  # SIGPROF ends the process
    try:
        template = ChatTemplate(source, special_tokens)
    except TokenizerError as error:
        say([error.cause, error.fix])
        return
    say(None)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        say(answer(template, line))


if __name__ == "__main__":
    main()

"""Process that renders a model's chat template for the server; see `frontend.text.rendering`.

The first line of its input has the template and its special tokens, each later line messages and
options. The first answer is null, or cause and fix if the template does not compile. The process
limits itself to `LIMIT_BYTES` of memory, and per line to the seconds of processor time given as its
argument; it ends with its input.
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
    """Return ("text", prompt) or ("refused", [message, param, code])."""
    messages, options = msgspec.json.decode(line)
    try:
        return "text", template.render(messages, **options)
    except RequestError as error:
        return "refused", [error.cause, error.param, error.code]
    except MemoryError:
        return "refused", ["The model's chat template takes too much memory.", "messages", None]


def limit_memory() -> None:
    """Limit the memory to `LIMIT_BYTES` more than is mapped at present."""
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + LIMIT_BYTES, mapped + LIMIT_BYTES))


def say(answer: Any) -> None:
    """Write the answer to one line and stop the timer until the next one."""
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()
    signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Render templates until the server closes the input."""
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

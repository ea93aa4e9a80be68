"""Helper process with a protocol of lines: a line of JSON in, a line of JSON out.

Work that may take too much time or memory runs there, because a process can be killed.
"""

import contextlib
import os
import selectors
import subprocess
import time
from typing import Any

import msgspec

READ_BYTES = 2**20


class GoneError(Exception):
    """The process has ended, or had to be ended."""


class LineProcess:
    """One process; `ask` writes a line and reads one, or ends the process."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the server's
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._in, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._in, False)

    def ask(self, content: Any, timeout_s: float) -> Any:
        """Return the answer to `content`; on a timeout kill the process and raise GoneError."""
        try:
            line = self._exchange(msgspec.json.encode(content) + b"\n", timeout_s)
        except (OSError, TimeoutError) as error:
            self.close()
            raise GoneError(str(error)) from error
        return msgspec.json.decode(line)

    def _exchange(self, data: bytes, timeout_s: float) -> bytes:
        """Write `data` and read up to the end of a line."""
        deadline_s = time.monotonic() + timeout_s
        remaining = memoryview(data)
        answer: list[bytes] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            selector.register(self._in, selectors.EVENT_WRITE)
            while not (answer and answer[-1].endswith(b"\n")):
                ready = selector.select(max(0.0, deadline_s - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"more than {timeout_s:.0f} s")
                for key, _ in ready:
                    if key.fd == self._in:
                        remaining = remaining[os.write(self._in, remaining) :]
                        if not remaining:
                            selector.unregister(self._in)
                    else:
                        piece = os.read(self._out, READ_BYTES)
                        if not piece:
                            raise self.why_ended()
                        answer.append(piece)
        return b"".join(answer)

    def why_ended(self) -> Exception:
        """Return the reason why the process ended by itself."""
        return OSError("its process has ended")

    def end(self) -> None:
        """Kill the process; a pending `ask` raises GoneError."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Kill the process and close its pipes."""
        with contextlib.suppress(OSError):
            self.process.kill()
        with self.process:  # closes the pipes and waits
            pass

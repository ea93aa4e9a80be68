"""The Unix socket of --uds: made at the start, gone at the end.

One that a server left when it was killed is replaced; one that is in use is refused by name.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

from headway.core.errors import PortInUseError, UsageError


@contextlib.contextmanager
def open_socket(path: str) -> Iterator[socket.socket]:
    """A listening socket at `path`; raises PortInUseError or UsageError."""
    remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.closing(listener):
        try:
            listener.bind(path)
            own = os.stat(path)
        except OSError as error:
            raise UsageError(
                f"Cannot listen on --uds {path}: {error.strerror or error}.",
                "Its folder has to be there and writable; a path has at most 107 bytes.",
            ) from error
        listener.listen(2048)
        listener.setblocking(False)
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(path), own):
                    os.unlink(path)


def remove_stale(path: str) -> None:
    """Remove a socket that nothing listens on; raises where something does, or it is a file."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return  # what is wrong with the folder is told by `bind`
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"--uds {path} is a file, and no socket.", "Choose another path.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError:
            pass  # its queue is full, or it is another user's: something listens
    raise PortInUseError(
        f"The socket {path} is in use.", "Stop what listens there, or choose another with --uds."
    )

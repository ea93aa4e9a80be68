"""Servers that say they are there, and the gateway's file that names them.

A server is a member while it has said so within the last seconds; the file is written anew when the
members have changed, and never without any: a gateway needs one, and the last one may come back.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

SILENT_S = 15.0
"""A member that says nothing for so long is not there any more."""


@dataclass(slots=True)
class Members:
    """The URLs of the servers in `file`; `changed` is called when it was written."""

    file: Path
    changed: Callable[[], None]
    key_env: str = ""
    heard_s: dict[str, float] = field(default_factory=dict)
    written: tuple[str, ...] = ()
    """Whom the file names."""

    def hear(self, url: str, now_s: float) -> None:
        """A server says that it is there."""
        self.heard_s[url] = now_s
        self.look(now_s)

    def leave(self, url: str, now_s: float) -> None:
        """A server says that it ends."""
        self.heard_s.pop(url, None)
        self.look(now_s)

    def look(self, now_s: float) -> None:
        """Forget who is silent; write the file where the members are others than it says."""
        self.heard_s = {u: at_s for u, at_s in self.heard_s.items() if now_s - at_s < SILENT_S}
        urls = tuple(sorted(self.heard_s))
        if urls and urls != self.written:
            rows = [{"url": f"{url}/v1", "key_env": self.key_env} for url in urls]
            if not self.key_env:
                rows = [{"url": row["url"]} for row in rows]
            new = self.file.with_suffix(".new")
            new.write_bytes(msgspec.yaml.encode({"upstreams": rows}))
            os.replace(new, self.file)
            self.changed()  # where that fails the next look tries it again
            self.written = urls

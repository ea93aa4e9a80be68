"""Membership of servers, and the gateway's configuration file that lists them.

A server is a member if it has registered within the last SILENT_S seconds. The file is rewritten
when the members change, but never empty: a gateway needs a server, and the last one may come back.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

MEMBER_TIMEOUT_S = 15.0
"""Seconds without a registration after which a server is no member."""


@dataclass(slots=True)
class Members:
    """The servers' URLs in `file`; `changed` is called after each write."""

    file: Path
    changed: Callable[[], None]
    key_env: str = ""
    heard_s: dict[str, float] = field(default_factory=dict)
    written: tuple[str, ...] = ()
    """The URLs in the file."""

    def register(self, url: str, now_s: float) -> None:
        """Register a server, or renew its registration."""
        self.heard_s[url] = now_s
        self.update(now_s)

    def deregister(self, url: str, now_s: float) -> None:
        """Remove a server that is about to end."""
        self.heard_s.pop(url, None)
        self.update(now_s)

    def update(self, now_s: float) -> None:
        """Drop members that are silent, and write the file if the members differ from it."""
        self.heard_s = {
            u: at_s for u, at_s in self.heard_s.items() if now_s - at_s < MEMBER_TIMEOUT_S
        }
        urls = tuple(sorted(self.heard_s))
        if urls and urls != self.written:
            rows = [{"url": f"{url}/v1", "key_env": self.key_env} for url in urls]
            if not self.key_env:
                rows = [{"url": row["url"]} for row in rows]
            new = self.file.with_suffix(".new")
            new.write_bytes(msgspec.yaml.encode({"upstreams": rows}))
            os.replace(new, self.file)
            self.changed()  # if it fails, the next update tries again
            self.written = urls

"""A real `headway gateway` in a process of its own, before these upstreams or this file."""

import contextlib
import re
import shutil
import signal
import sqlite3
import sys
import tempfile
from pathlib import Path
from typing import Any

from live_server import LiveAddress, clean_environment, start_process, wait_until

GREETING = re.compile(r"gateway is ready: (http://[^/\s]+)/v1")


class LiveGateway(LiveAddress):
    """One gateway process before these URLs, a fork unless it is to be a `real` interpreter."""

    def __init__(
        self,
        *urls: str,
        env: dict[str, str] | None = None,
        file: str = "",
        flags: tuple[str, ...] = (),
        real: bool = False,
    ) -> None:
        self.headers = {}
        self.temp = Path(tempfile.mkdtemp(prefix="hw-"))
        (self.temp / "gateway.yaml").write_text(file)
        self.process = start_process(
            [
                *(sys.executable, "-m", "headway.cli.main", "gateway", "--port=0"),
                *(f"--upstream={url}/v1" for url in urls),
                *([str(self.temp / "gateway.yaml")] if file else []),
                *flags,
            ],
            self.temp,
            clean_environment() | {"HEADWAY_DATA_DIR": str(self.temp / "data")} | (env or {}),
            real=real,
        )
        self.url = wait_until(self._greeted)[1]

    def _greeted(self) -> re.Match[str] | None:
        found = GREETING.search(self.stdout)
        ended = found is None and self.process.poll() is not None
        assert not ended, self.stderr
        return found

    def rows(self, query: str) -> list[Any]:
        ledger = sqlite3.connect(self.temp / "data" / "gateway" / "ledger.db")
        with contextlib.closing(ledger) as connection:
            return connection.execute(query).fetchall()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(60) == 0, self.stderr
        shutil.rmtree(self.temp, ignore_errors=True)

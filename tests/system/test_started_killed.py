"""A measurement that is killed leaves no server behind."""

import signal
import subprocess
import sys

import pytest
from live_server import wait_until

from headway.measure.server_process import is_ready

MEASURES = """
import sys, time
from headway.spec.embedded import model_folder
from headway.measure.server_process import ServerProcess
with ServerProcess(model_folder(None), ["--kv-memory=16MiB"]) as server:
    print(server.url, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_its_server_ends_with_it(number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MEASURES], stdout=subprocess.PIPE, text=True
    ) as one:
        assert one.stdout is not None
        url = one.stdout.readline().strip()
        assert is_ready(url)
        one.send_signal(number)
    wait_until(lambda: not is_ready(url))

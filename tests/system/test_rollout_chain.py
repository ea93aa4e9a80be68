"""`headway gateway rollout` with real servers, from a folder to all requests, as clients see it.

The folders are the embedded model, and the same in weights that int4 cannot hold.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from live_gateway import LiveGateway
from live_server import LiveServer, alive, clean_environment, wait_until
from safetensors.torch import load_file, save_file

from headway.spec import embedded

pytestmark = [pytest.mark.hardening, pytest.mark.timeout(1800)]

PROCESS = re.compile(r"process (\d+)")
NAME = "tiny"
UNEVEN = 64.0
"""Every other neuron of a layer gives so much more, and is read by so much less."""


def copied(to: Path) -> Path:
    """The embedded model in a folder of its own, without its drafting heads."""
    ignored = shutil.ignore_patterns("medusa*", "*.svg", "*.md")
    return Path(shutil.copytree(embedded.model_folder("headway-tiny"), to, ignore=ignored))


def uneven(to: Path) -> Path:
    """The same function in 16 bits; a group of int4 has one scale for 1 and for 1/64."""
    folder = copied(to)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in [name for name in weights if name.endswith("up_proj.weight")]:
        weights[name][::2] *= UNEVEN
        weights[name.replace("up_proj", "down_proj")][:, ::2] /= UNEVEN
    save_file({k: v.contiguous() for k, v in weights.items()}, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The version that answers all requests."""
    folder = copied(tmp_path_factory.mktemp("today") / NAME)
    live = LiveServer(folder, "--kv-memory=64MiB", f"--served-model-name={NAME}")
    try:
        yield live.wait_ready()
    finally:
        live.close()


@pytest.fixture
def gateway(today: LiveServer) -> Iterator[LiveGateway]:
    live = LiveGateway(file=FILE.format(url=today.url))
    try:
        yield live
    finally:
        live.close()


FILE = """
upstreams: [{{name: today, url: '{url}/v1'}}]
models: [{{name: tiny, upstreams: [today]}}]
"""


class Clients:
    """Some who ask all the time; `odd` is what was not answered to its end."""

    def __init__(self, gateway: LiveGateway) -> None:
        self._gateway = gateway
        self._over = threading.Event()
        self.odd: list[str] = []
        self.count = 0
        self._threads = [threading.Thread(target=self._ask) for _ in range(3)]

    def _ask(self) -> None:
        messages: Any = [{"role": "user", "content": "What is 2 + 3?"}]
        url = self._gateway.url + "/v1"
        with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
            while not self._over.is_set():
                try:
                    chunks = list(
                        client.chat.completions.create(
                            model=NAME, messages=messages, max_tokens=8, temperature=0, stream=True
                        )
                    )
                    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
                    if text != "2 + 3 = 5.":
                        self.odd.append(text)
                except openai.OpenAIError as error:
                    self.odd.append(repr(error))
                self.count += 1

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def begun(gateway: LiveGateway, folder: Path, *flags: str) -> "subprocess.Popen[str]":
    """The command, running."""
    file = gateway.temp / "gateway.yaml"
    words = [str(folder), f"--to={file}", f"--gateway={gateway.url}", "--steps=10,50", *flags]
    return subprocess.Popen(
        [sys.executable, "-m", "headway.cli.main", "gateway", "rollout", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment() | {"HEADWAY_DATA_DIR": str(gateway.temp / "command")},
    )


def rollouts_of(gateway: LiveGateway) -> list[Any]:
    found: list[Any] = json.loads(gateway.get("/stats")[1])["rollouts"]
    return found


def test_an_int4_that_fails_the_gate_is_refused(gateway: LiveGateway, tmp_path: Path) -> None:
    command = begun(gateway, uneven(tmp_path / "uneven"), "--quantize=int4", "--questions=5")
    told = command.communicate()[0]
    assert command.returncode == 5, told
    assert "The gateway was not touched" in told and "3 serve" not in told
    assert not rollouts_of(gateway) and not (gateway.temp / "gateway.rollouts.yaml").exists()


def test_a_healthy_int8_is_promoted(gateway: LiveGateway, tmp_path: Path) -> None:
    server = 0
    try:
        with Clients(gateway) as clients:
            command = begun(gateway, copied(tmp_path / NAME), "--quantize=int8", "--questions=5")
            told = command.communicate()[0]
            server = int(PROCESS.findall(told)[-1]) if PROCESS.search(told) else 0
            assert command.returncode == 0, told
            (rollout,) = rollouts_of(gateway)
            assert (rollout["state"], rollout["share"]) == ("promoted", 1.0)
            asked, count = "SELECT COUNT(*) FROM attempts WHERE upstream = 'today'", clients.count
            ((before,),) = gateway.rows(asked)
            wait_until(lambda: clients.count > count + 20)
        ((after,),) = gateway.rows(asked)
        assert after - before <= 3, "what was under way"
        assert not clients.odd, clients.odd[:3]
    finally:
        if server and alive(server):
            ended(server)


def test_a_canary_that_dies_is_taken_back(
    gateway: LiveGateway, today: LiveServer, tmp_path: Path
) -> None:
    folder = copied(tmp_path / NAME)
    canary = LiveServer(folder, "--kv-memory=64MiB", f"--served-model-name={NAME}").wait_ready()
    try:
        with Clients(gateway) as clients:
            where = (f"--canary={canary.url}/v1", "--against=headway-tiny", "--questions=1")
            command = begun(gateway, folder, *where)

            def has_asked() -> bool:
                found = rollouts_of(gateway)
                return bool(found) and found[0]["guards"]["errors"]["canary"][1] >= 5

            wait_until(has_asked, 600.0)
            canary.process.kill()
            told = command.communicate()[0]
            assert command.returncode == 5, told
            assert re.search(r"rolled back.*errors: ", told), told
        assert not clients.odd, clients.odd[:3]
        assert not (gateway.temp / "gateway.rollouts.yaml").exists()
        last = "SELECT state FROM rollouts ORDER BY rowid DESC LIMIT 1"
        assert gateway.rows(last) == [("rolled back",)]
    finally:
        canary.close()


def ended(pid: int) -> None:
    """End a server that the command has left running."""
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not alive(pid))


def test_what_int4_cannot_hold_is_the_same_in_sixteen_bits(tmp_path: Path) -> None:
    """The folder of the first test is a fair one: what int4 loses is all that it loses."""
    plain, other = copied(tmp_path / "plain"), uneven(tmp_path / "other")
    one, two = (load_file(folder / "model.safetensors") for folder in (plain, other))
    up, down = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
    products = [(w[down].double() @ w[up].double()) for w in (one, two)]
    assert torch.equal(products[0], products[1]) and not torch.equal(one[up], two[up])

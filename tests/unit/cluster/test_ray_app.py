"""The Ray application without Ray: who is there, what is told of the load, how many are wanted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from headway.cluster import ray_app
from headway.cluster.child import Child
from headway.cluster.ray_app import MEMBER_TIMEOUT_S, Members
from headway.cluster.scale import ClusterLoad
from headway.core.errors import HeadwayError, UsageError
from headway.gateway.config import read_config

GREETS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.signal(signal.SIGHUP, lambda *_: os.write(1, b"read again\\n"))  # amid a print, too
print("some words before", flush=True)
print("Headway is ready: http://127.0.0.1:1234/v1", flush=True)
while True:
    time.sleep(0.05)
"""


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def wait_until(holds: Any) -> None:
    until_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid:
            found.append(int(stat.parent.name))
    return found


# ── a child ─────────────────────────────────────────────────────────────────────────────────────


def test_a_child_greets_reads_again_and_ends():
    child = Child(python(GREETS), drain_s=30.0, ready_s=60.0)
    assert child.url == "http://127.0.0.1:1234" and child.is_alive
    child.hang_up()
    wait_until(lambda: "read again" in child._output)
    child.stop()
    child.stop()
    assert not child.is_alive and child.process.returncode == 0


def test_a_child_that_does_not_come_up_is_told_with_its_words():
    with pytest.raises(HeadwayError, match="no such folder"):
        Child(python("import sys; sys.exit('no such folder')"), drain_s=1.0, ready_s=60.0)


def test_a_child_that_hears_nothing_is_killed():
    deaf = GREETS.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")
    child = Child(python(deaf), drain_s=0.2, ready_s=60.0)
    child.stop()
    assert child.process.returncode == 128 + signal.SIGKILL


def test_a_child_ends_with_who_was_killed():
    """A replica that Ray kills leaves no server behind."""
    program = f"""
import time
from headway.cluster.child import Child
child = Child({python(GREETS)!r}, drain_s=5.0, ready_s=60.0)
print(child.process.pid, flush=True)
time.sleep(600)
"""
    replica = subprocess.Popen(python(program), stdout=subprocess.PIPE, text=True)
    assert replica.stdout is not None
    watcher = int(replica.stdout.readline())
    (server,) = children(watcher)
    os.kill(replica.pid, signal.SIGKILL)
    replica.wait()
    wait_until(lambda: gone(watcher) and gone(server))
    replica.stdout.close()


# ── who is there ────────────────────────────────────────────────────────────────────────────────


class Room:
    def __init__(self, folder: Path, key_env: str = "") -> None:
        self.written: list[list[str]] = []
        self.members = Members(folder / "gateway.yaml", self._changed, key_env)

    def _changed(self) -> None:
        rows = yaml.safe_load(self.members.file.read_text())["upstreams"]
        self.written.append([row["url"] for row in rows])


def test_the_file_names_who_is_there_and_the_gateway_reads_it(tmp_path):
    room = Room(tmp_path)
    room.members.register("http://10.0.0.2:81", 0.0)
    room.members.register("http://10.0.0.1:80", 1.0)
    for now_s in (3.0, 6.0, 9.0):
        room.members.register("http://10.0.0.2:81", now_s)
    assert room.written == [
        ["http://10.0.0.2:81/v1"],
        ["http://10.0.0.1:80/v1", "http://10.0.0.2:81/v1"],
    ]
    config = read_config(room.members.file)
    assert [row.url for row in config.upstreams] == room.written[-1]


def test_who_is_silent_or_leaves_is_not_named_but_for_the_last(tmp_path):
    room = Room(tmp_path)
    for number in (1, 2, 3):
        room.members.register(f"http://s{number}", 0.0)
    room.members.deregister("http://s3", 1.0)
    room.members.register("http://s1", MEMBER_TIMEOUT_S)
    assert room.written[-1] == ["http://s1/v1"]
    room.members.update(9 * MEMBER_TIMEOUT_S)
    assert room.members.heard_s == {} and room.written[-1] == ["http://s1/v1"]
    room.members.register("http://s4", 9 * MEMBER_TIMEOUT_S)
    assert room.written[-1] == ["http://s4/v1"]


def test_a_gateway_that_could_not_be_started_is_tried_again(tmp_path):
    """Its port is still that of the gateway before it."""
    tries: list[str] = []

    def changed() -> None:
        tries.append("")
        if len(tries) == 1:
            raise HeadwayError("The port is taken.", "")

    members = Members(tmp_path / "gateway.yaml", changed)
    with pytest.raises(HeadwayError, match="taken"):
        members.register("http://s1", 0.0)
    assert members.written == ()
    for now_s in (3.0, 6.0):
        members.register("http://s1", now_s)
    assert members.written == ("http://s1",) and len(tries) == 2


def test_a_server_that_ends_is_named_no_more(monkeypatch, request):
    monkeypatch.setattr(ray_app.Gateway, "_reload", lambda self: None)
    gateway = ray_app.Gateway(ray_app.parse_arguments({"folder": "/m"}))
    request.addfinalizer(gateway._folder.cleanup)
    for url in ("http://s1", "http://s2"):
        gateway.register(url)
    gateway.deregister("http://s1")
    assert gateway.member_urls() == ["http://s2"]
    gateway.deregister("http://s2")
    assert gateway.member_urls() == ["http://s2"], "a gateway needs one"


def test_servers_that_want_a_key_are_asked_with_it(tmp_path, monkeypatch):
    room = Room(tmp_path, "HEADWAY_API_KEY")
    room.members.register("http://s1", 0.0)
    monkeypatch.setenv("HEADWAY_API_KEY", "secret")
    assert read_config(room.members.file).upstreams[0].key_env == "HEADWAY_API_KEY"


# ── how many ────────────────────────────────────────────────────────────────────────────────────


def stats(asked=1.2, requests=24, judged=50, met=49, engines=1) -> dict[str, Any]:
    return {
        "now": {"engines_asked": [asked / 2, asked / 2], "num_requests": requests},
        "engines": [{}] * engines,
        "windows": [
            {"seconds": 10, "classes": []},
            {"seconds": 60, "classes": [{"num_judged": judged, "num_met": met}] * 2},
        ],
    }


def test_loads_of_servers_add_up():
    told = [ray_app.load_from_stats(stats()), ray_app.load_from_stats(stats(asked=0.6, met=40))]
    by_figure = {name: dict(enumerate(each[name] for each in told)) for name in told[0]}
    assert ray_app.load_of(by_figure, 2) == ClusterLoad(
        engines_needed=pytest.approx(1.8),
        in_progress=48.0,
        servers=2,
        attainment=pytest.approx(0.89),
    )
    assert ray_app.load_of({}, 1) == ClusterLoad(engines_needed=0.0, in_progress=0.0, servers=1)


class Context(SimpleNamespace):
    """What Ray gives a policy."""

    def __init__(self, told: dict[str, float], replicas: int, state: dict[str, Any]) -> None:
        super().__init__(
            aggregated_metrics={name: {"a": value} for name, value in told.items()},
            current_num_replicas=replicas,
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=6,
            policy_state=state,
        )


def test_the_policy_asks_for_what_is_wanted_and_remembers():
    told = ray_app.load_from_stats(stats(asked=2.4, requests=48)) | {"target": 0.95, "lead_s": 60.0}
    servers, state = ray_app.scale_policy(Context(told, 1, {}))
    assert servers == 4
    assert ray_app.scale_policy(Context(told, 4, state))[0] == 4
    quiet = told | {"asked": 0.1, "in_progress": 2.0}
    assert ray_app.scale_policy(Context(quiet, 4, state))[0] == 4, "it waits before one goes"
    lenient = told | {"target": 0.5}
    assert ray_app.scale_policy(Context(lenient, 1, {}))[0] == 3


def test_before_anything_was_told_nothing_changes():
    assert ray_app.scale_policy(Context({}, 1, {}))[0] == 1


def test_a_server_of_two_engines_counts_twice():
    told = ray_app.load_from_stats(stats(asked=2.4, requests=48, engines=2)) | {"target": 0.95}
    assert ray_app.scale_policy(Context(told, 1, {}))[0] == 2


# ── arguments ───────────────────────────────────────────────────────────────────────────────────


def test_arguments_come_as_text_too():
    settings = ray_app.parse_arguments(
        {"folder": "/m", "least": "2", "most": "3", "flags": ["--seed=1"]}
    )
    assert (settings.least, settings.most, settings.flags) == (2, 3, ["--seed=1"])
    options = ray_app.options_of(settings)
    assert options["autoscaling_config"]["max_replicas"] == 3
    policy = options["autoscaling_config"]["policy"]["policy_function"]
    module, _, name = policy.partition(":")
    assert getattr(sys.modules[module], name) is ray_app.scale_policy


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "folder"),
        ({"folder": "/m", "fodler": 1}, "fodler"),
        ({"folder": "/m", "least": 3, "most": 2}, "least is 3"),
        ({"folder": "/m", "least": 0}, "least is 0"),
        ({"folder": "/m", "port": "x"}, "port"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments, why):
    with pytest.raises(UsageError, match=why):
        ray_app.parse_arguments(arguments)


def test_a_server_that_does_not_answer_is_not_healthy():
    server = ray_app.RayServer.__new__(ray_app.RayServer)
    server.child = SimpleNamespace(is_alive=True, url="http://127.0.0.1:1")
    with pytest.raises(HeadwayError, match="/health"):
        server.check_health()
    server.child.is_alive = False
    with pytest.raises(HeadwayError, match="has ended"):
        server.check_health()


class FakeChild:
    """A server that is there; what happens to it is written down."""

    def __init__(self, command: list[str], *, drain_s: float, ready_s: float) -> None:
        self.url, self.is_alive = "http://s1", True
        self.happened: list[str] = []

    def stop(self) -> None:
        self.happened.append("stop")


def handle(happened: list[str], is_there: bool) -> SimpleNamespace:
    """The gateway's, as Ray gives it to a server."""

    def method(what: str) -> SimpleNamespace:
        def result(timeout_s: float) -> None:
            if not is_there:
                raise TimeoutError
            happened.append(what)

        return SimpleNamespace(remote=lambda url: SimpleNamespace(result=result))

    return SimpleNamespace(register=method("register"), deregister=method("deregister"))


@pytest.mark.parametrize("is_there", [True, False])
def test_a_server_comes_and_leaves_before_it_drains(monkeypatch, is_there: bool):
    """Without a gateway it ends all the same."""
    monkeypatch.setattr(ray_app, "Child", FakeChild)
    monkeypatch.setattr(ray_app, "FIRST_REGISTRATION_S", 60.0 if is_there else 0.1)
    happened: list[str] = []
    monkeypatch.setattr(ray_app, "gateway", lambda: handle(happened, is_there))
    server = ray_app.RayServer(ray_app.parse_arguments({"folder": "/m", "host": "127.0.0.1"}))
    assert happened == ["register"] * is_there, "before Ray takes it for started"
    server.child.happened = happened
    server.__del__()
    assert happened[-2:] == ["deregister", "stop"] if is_there else happened == ["stop"]

"""Keys and limits: who is found, what is refused and for how long, what a key file may say."""

import pytest

from headway.core.clock import VirtualClock
from headway.core.errors import RequestError, UsageError
from headway.core.service import Limits
from headway.server.doors import ACCESS, KEY, OPERATOR, PUBLIC, access, is_here
from headway.server.keys import Keyring, digest, make_key, row_text


def key_file(tmp_path, text: str):
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    return path


def row(name: str, key: str, more: str = "") -> str:
    return f"  - name: {name}\n    sha256: {digest(key).hex()}\n{more}"


def test_a_key_has_its_owner(tmp_path):
    limits = "    class: batch\n    weight: 2.5\n    limits: {requests_at_once: 2}\n"
    text = "keys:\n" + row("alice", "one", limits) + row("ops", "two", "    admin: true\n")
    ring = Keyring(flags=["three"], file=key_file(tmp_path, text), classes={"batch"})
    alice, ops, flag = ring.find("one"), ring.find("two"), ring.find("three")
    assert (alice.principal.name, alice.admin, alice.service_class) == ("alice", False, "batch")
    assert alice.meter.limits == Limits(requests_at_once=2)
    assert (alice.weight, ops.weight, flag.weight) == (2.5, None, None)
    assert (ops.principal.name, ops.admin, ops.service_class) == ("ops", True, None)
    assert (flag.principal.name, flag.admin) == ("api-key-1", True)
    assert len({caller.principal.cache_salt for caller in (alice, ops, flag)}) == 3
    for wrong in ("", "four", "On", "one ", "one\0", digest("one").hex(), "é", "\udcff"):
        assert ring.find(wrong) is None


def test_no_key_is_kept(tmp_path):
    ring = Keyring(flags=[], file=key_file(tmp_path, "keys:\n" + row("alice", "sesame")))
    assert "sesame" not in repr(ring)


def test_every_key_is_compared(monkeypatch):
    """Finding the first takes as long as finding none."""
    from headway.server import keys

    seen = []
    real = keys.hmac.compare_digest
    monkeypatch.setattr(keys.hmac, "compare_digest", lambda a, b: seen.append(b) or real(a, b))
    ring = Keyring(flags=["one", "two", "three"])
    for key in ("one", "three", "none"):
        seen.clear()
        ring.find(key)
        assert len(seen) == 3


def test_reading_again_keeps_what_is_used_up(tmp_path):
    limits = "    limits: {requests_per_minute: 1}\n"
    path = key_file(tmp_path, "keys:\n" + row("alice", "one", limits))
    ring = Keyring(file=path, clock=VirtualClock())
    ring.find("one").meter.enter()
    path.write_text("keys:\n" + row("bob", "two") + row("alice", "one", limits))
    ring.reload()
    assert ring.find("two").principal.name == "bob"
    with pytest.raises(RequestError):
        ring.find("one").meter.enter()
    path.write_text("keys: [")
    with pytest.raises(UsageError):
        ring.reload()
    assert ring.find("two") is not None
    path.write_text("keys:\n" + row("bob", "two"))
    ring.reload()
    assert ring.find("one") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "keys.yaml"),
        ("keys: 5", "Expected `array`"),
        ("[1]", "keys.yaml"),
        ("keys:\n  - name: a", "sha256"),
        ("keys:\n  - {name: a, sha256: abc}", "64 digits"),
        ("keys:\n  - {name: a, key: secret}", "unknown field `key`"),
        ("keys:\n" + row("a", "x", "    class: fast\n"), "the class 'fast'"),
        ("keys:\n" + row("a", "x", "    limits: {requests_at_once: 0}\n"), "at least 1"),
        ("keys:\n" + row("a", "x", "    limits: {tokens: 5}\n"), "unknown field `tokens`"),
        ("keys:\n" + row("a", "x", "    weight: 0\n"), "weight must be between 0.001 and 1000"),
        ("keys:\n" + row("a", "x", "    admin: maybe\n"), "Expected `bool`"),
        ("keys:\n" + row("a", "x") + row("a", "y"), "twice"),
        ("keys:\n" + row("a", "x") + row("b", "x"), "twice"),
        ("keys:\n" + row("anonymous", "x"), "cannot be a key's name"),
        ('keys:\n  - {name: "a\\nb", sha256: ' + "f" * 64 + "}", "cannot be a key's name"),
        ("a: &a [*a]", "keys.yaml"),
    ],
)
def test_what_a_key_file_may_not_say(tmp_path, text, words):
    with pytest.raises(UsageError) as refused:
        Keyring(file=key_file(tmp_path, text), classes={"batch"})
    assert words in refused.value.cause
    assert "secret" not in str(refused.value)


def test_an_empty_key_file_lets_nobody_in(tmp_path):
    ring = Keyring(file=key_file(tmp_path, "keys: []"))
    assert ring
    assert ring.find("") is None
    assert not Keyring()


def test_a_missing_key_file(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        Keyring(file=tmp_path / "none.yaml")


def test_a_made_key_lets_in(tmp_path):
    key = make_key()
    assert len(key) > 40
    assert key != make_key()
    ring = Keyring(file=key_file(tmp_path, row_text('Al "the" cat: #1', key)))
    assert ring.find(key).principal.name == 'Al "the" cat: #1'


# ── paths and hosts ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("/", PUBLIC),
        ("/health", PUBLIC),
        ("/ready", PUBLIC),
        ("/v1/models", KEY),
        ("/v1/anything/new", KEY),
        ("/tokenize", KEY),
        ("/metrics", OPERATOR),
        ("/stats", OPERATOR),
        ("/a-route-nobody-named", OPERATOR),
        ("/health/", OPERATOR),
        ("//health", OPERATOR),
        ("/v1", OPERATOR),
        ("", OPERATOR),
    ],
)
def test_who_may_ask_where(path, wanted):
    assert access(path) == wanted


def test_few_paths_are_public():
    public = {path for path, wanted in ACCESS.items() if wanted == PUBLIC}
    assert {path for path in public if not path.startswith("/page/")} == {"/", "/health", "/ready"}


@pytest.mark.parametrize(
    "host",
    [
        *("", "localhost", "localhost:8000", "127.0.0.1:80", "10.1.2.3", "[::1]", "[::1]:8000"),
        *("a.localhost:1", "LOCALHOST.", "0.0.0.0:8000"),
    ],
)
def test_hosts_of_this_machine(host):
    assert is_here(host)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "notlocalhost"),
        *("127.0.0.1.evil.example:80", "a:b:c", "[::1].evil"),
    ],
)
def test_hosts_that_are_not(host):
    assert not is_here(host)

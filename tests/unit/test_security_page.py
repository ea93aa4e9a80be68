"""docs/security.md: its tests exist, each class names one; the lock file, the bounds."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
CLASSES = (
    *("one request kills the engine", "one request changes another's tokens", "code from data"),
    *("open doors", "model files", "grammar bombs", "template bombs", "unbounded cost"),
    *("HTTP itself", "cache as a side channel", "leaks", "supply chain"),
)
NAME = re.compile(r"`(test_\w+)`")


def rows() -> dict[str, list[str]]:
    """The first cell of each row of the page's tables → the tests in its last."""
    cells = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("|")]
    return {row[0]: NAME.findall(row[-1]) for row in cells if len(row) == 3}


def test_every_class_has_its_tests():
    for name in CLASSES:
        assert rows()[name], name


def test_every_named_test_exists():
    files = sorted(ROOT.glob("tests/**/test_*.py"))
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    defined = set(re.findall(r"def (test_\w+)\(", source))
    assert set(NAME.findall(PAGE)) - defined == set()


def test_the_lock_file_is_complete():
    """Every dependency has one exact version there, and every line of it is one."""
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8").split("\n")
    pinned = [line for line in lock if line.strip() and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[\w.!+]+", line) for line in pinned), pinned
    names = {plain(line.partition("==")[0]) for line in pinned}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    missing = {plain(re.split(r"[<>=!;\[ ]", text)[0]) for text in wanted} - names
    assert not missing


def test_lower_bounds_are_what_the_lock_has():
    """What is installed without the lock is at least what is tested with it."""
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    lock = {plain(line.partition("==")[0]): line.partition("==")[2] for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for text in project["dependencies"]:
        name, bound = re.fullmatch(r"([\w-]+)>=([\d.]+)(?:;.*)?", text).groups()
        assert lock[plain(name)].startswith(f"{bound}."), text


def plain(name: str) -> str:
    """types-PyYAML → types-pyyaml."""
    return re.sub(r"[-_.]+", "-", name).lower()

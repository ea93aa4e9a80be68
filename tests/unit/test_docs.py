"""The pages that show code: what they quote is in the file they name, the rest runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("adding-a-model.md",)
BLOCKS = [
    (page, block)
    for page in PAGES
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
]
NAMED = re.compile(r"# ([\w/]+\.py)\n")


@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_a_block_is_quoted_or_runs(page: str, block: str):
    """A first line `# file.py` says that the block is quoted, below src/headway or the root."""
    named = NAMED.match(block)
    if named is None:
        exec(compile(block, page, "exec"), {})
        return
    places = [ROOT / "src" / "headway" / named[1], ROOT / named[1]]
    text = next(place for place in places if place.exists()).read_text(encoding="utf-8")
    assert block[named.end() :] in text


def test_both_kinds_are_there():
    quoted = [block for _, block in BLOCKS if NAMED.match(block)]
    assert 0 < len(quoted) < len(BLOCKS)


def test_every_figure_has_its_command():
    """Each script is in the table once or is part of one that is; each section it names exists."""
    page = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    folder = ROOT / "benchmarks"
    packages = {folder / "literature", folder / "widening"}  # what scripts share
    scripts = {
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if path.parent not in packages
    }
    assert set(re.findall(r"`(?:benchmarks/)?((?:claims/)?\w+\.py)[^`]*`", page)) == scripts
    rows = [line.split("|")[2].strip() for line in page.splitlines() if line.startswith("| ")][2:]
    first = [re.match(r"`((?:claims/)?\w+\.py)", row)[1] for row in rows]
    assert len(set(first)) == len(first)
    for name, anchor in re.findall(r"\]\(([\w-]+\.md)#([\w-]+)\)", page):
        titles = re.findall(r"^#+ (.*)$", (ROOT / "docs" / name).read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
        assert anchor in slugs, (name, anchor)

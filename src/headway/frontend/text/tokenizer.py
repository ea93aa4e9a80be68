"""A model's tokenizer and chat template, read from its folder without transformers.

Given the folder, or a GGUF file, it encodes text, decodes ids, renders chats, and knows each
token's bytes. It promises to read nothing but `tokenizer.json`, `tokenizer_config.json` and the
template beside them.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from headway.core.errors import RequestError, TokenizerError
from headway.frontend.text import cuts, growth, lengths
from headway.frontend.text.pieces import token_bytes
from headway.frontend.text.rendering import Renderer
from headway.frontend.text.template import find_template, special_tokens
from headway.spec.model_files import read_document

SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")

HARMONY = ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>")
"""What a chat template of gpt-oss writes."""


USERS = ("user", "tool", "function")
"""Roles of messages whose text may come from anybody: a page that a tool has read, say."""
QUOTE, END_QUOTE = "\ufdd0", "\ufdd1"
"""What stands around a special token in their text while a template renders it: code points that
Unicode keeps for such use and no text has."""


class Tokenizer:
    """Text ↔ token ids for one model folder.

    A special token in the text of a user's or a tool's message stays text, unless `control_tokens`
    are let in: "<|im_end|>" there ends no turn.
    """

    def __init__(
        self, folder: Path, template_file: Path | None = None, *, control_tokens: bool = False
    ) -> None:
        document = read_document(folder, "tokenizer.json")
        if document is None:
            raise missing_tokenizer(folder)
        try:
            self._grows = growth.check_growth(document)
            self._rust = RustTokenizer.from_str(json.dumps(document))
            growth.check_added(self._rust.num_special_tokens_to_add(is_pair=False))
        except BaseException as error:  # the Rust side raises bare Exception, and panics
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise TokenizerError(
                f"tokenizer.json of {folder} cannot be read: {str(error)[:200]}.",
                "Copy it again from the model's source.",
            ) from error
        self._rust.no_padding()
        self._rust.no_truncation()
        config = read_document(folder, "tokenizer_config.json") or {}
        added = document.get("added_tokens") or []
        self.special_ids = frozenset(t["id"] for t in added if t.get("special"))
        specials = "|".join(
            re.escape(token["content"])
            for token in sorted(added, key=lambda token: -len(token["content"]))
            if token.get("special") and len(token["content"]) > 1 and not control_tokens
        )
        self._controls = re.compile(specials or r"(?!)")
        self._quoted = re.compile(f"{QUOTE}({specials or '(?!)'}){END_QUOTE}")
        self.pieces = token_bytes(document)
        self._longest = lengths.longest_entry(document, self.pieces)
        self._shrinks = lengths.shrinks(document)
        self._can_cut = cuts.splits_into_words(document) and cuts.divides(self._split)
        source = find_template(folder, config, template_file)
        self.template = None if source is None else Renderer(source, special_tokens(config))

    @property
    def vocab_size(self) -> int:
        """Entries, added tokens included; may be less than the width of the logits."""
        return self._rust.get_vocab_size(with_added_tokens=True)

    def text_limit(self, num_tokens: int, *, loosely: bool = False) -> int:
        """Bytes that no text of at most `num_tokens` exceeds; `loosely` where parts are dropped."""
        return num_tokens * self._longest * (lengths.LOOSER if loosely else self._shrinks)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; lone surrogates are refused with a RequestError."""
        parts = self.encode_parts(text, add_special_tokens=add_special_tokens)
        first = next(parts)
        for part in parts:
            first += part
        return first

    def encode_parts(self, text: str, *, add_special_tokens: bool = True) -> Iterator[list[int]]:
        """The same, part by part where a long text can be cut; at least one part.

        A caller may stop in between: the rest is not computed. A text that begins with the special
        tokens itself gets them once.
        """
        ends = self._ends if add_special_tokens else ([], [])
        if QUOTE in text and self._quoted.search(text):
            yield self._encode_quoted(text, ends or ([], []))
            return
        if ends is not None and self._begins_itself(text, ends[0]):
            ends, add_special_tokens = ([], ends[1]), False
        if len(text) <= cuts.PIECE_CHARACTERS or not self._can_cut or ends is None:
            ids = self._encode(text, add_special_tokens)
            yield ids if add_special_tokens or ends is None else ids + ends[1]
            return
        before, after = ends
        for part in cuts.cut(text, self._split):
            yield before + self._encode(part, False)
            before = []
        yield after

    def counts(self, texts: list[str]) -> list[int]:
        """Tokens of each of these texts without special tokens; the same errors as `encode`."""
        return [len(each.ids) for each in self._encoded(texts, False)]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._encoded([text], add_special_tokens)[0].ids
        return ids

    def _encoded(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        """The library's encodings; RequestError for a text that it cannot or must not encode."""
        try:
            with panics_refused():
                for text in texts:
                    growth.check_text(text, self._grows, self._normalize)
                # a batch lets other threads run meanwhile; the fast one has no offsets
                return self._rust.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            message = "The text is not valid Unicode."
            raise RequestError(message, param="prompt", code="invalid_value") from error

    def _normalize(self, text: str) -> str:
        normalized: str = self._rust.normalizer.normalize_str(text)
        return normalized

    @cached_property
    def _ends(self) -> tuple[list[int], list[int]] | None:
        """The special tokens before and after any text; None where that cannot be told."""
        bare, whole = self._encode("a", False), self._encode("a", True)
        for at in range(len(whole) - len(bare) + 1) if bare else ():
            if whole[at : at + len(bare)] == bare:
                return whole[:at], whole[at + len(bare) :]
        return None

    def _encode_quoted(self, text: str, ends: tuple[list[int], list[int]]) -> list[int]:
        """The ids of a text in which some special tokens are text: it is cut inside of them."""
        ids: list[int] = [] if self._begins_itself(text, ends[0]) else [*ends[0]]
        begin = 0
        for quoted in self._quoted.finditer(text):
            control = quoted[1]
            ids += self._encode(text[begin : quoted.start()] + control[0], False)
            ids += self._encode(control[1:], False)
            begin = quoted.end()
        return ids + self._encode(text[begin:], False) + ends[1]

    def _begins_itself(self, text: str, before: list[int]) -> bool:
        """Whether `text` begins with the special tokens that would go before it: "<s>Hi"."""
        return bool(before) and text.startswith("".join(map(self.token, before)))

    def _split(self, text: str) -> list[str]:
        """The words that the tokenizer sees in `text`."""
        with panics_refused():
            return [word for word, _ in self._rust.pre_tokenizer.pre_tokenize_str(text)]

    def offsets(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Where in `text` each of its tokens begins; added tokens take no room: <s>Hi is 0, 0."""
        before, after = (self._ends or ([], [])) if add_special_tokens else ([], [])
        itself = self._begins_itself(text, before)
        specials = add_special_tokens and not itself
        with panics_refused():
            encoded = self._rust.encode_batch([text], add_special_tokens=specials)[0]
        starts, end = [], 0
        for _, token_end in encoded.offsets:  # a token's own begin may leave out its space
            starts.append(end)
            end = max(end, token_end)
        return starts + ([end] * len(after) if itself else [])

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`, decoded as one."""
        # decode_batch, unlike decode, lets other threads run meanwhile
        with panics_refused():
            return self._rust.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def special(self, texts: tuple[str, ...]) -> dict[str, int]:
        """Those of `texts` that are special tokens, with their ids: {"[TOOL_CALLS]": 5}."""
        ids = {text: self._rust.token_to_id(text) for text in texts}
        return {text: i for text, i in ids.items() if i is not None and i in self.special_ids}

    def token(self, token_id: int) -> str:
        """The vocabulary entry as it is written in tokenizer.json, or "" for an unused id."""
        return self._rust.id_to_token(token_id) or ""

    def piece(self, token_id: int) -> bytes:
        """The bytes of one token, special tokens spelled out; b"" for an unused id."""
        if self.pieces is not None:
            return self.pieces.get(token_id, b"")
        return self._rust.decode([token_id], skip_special_tokens=False).encode()

    def chat_ids(self, messages: list[dict[str, Any]], /, **options: Any) -> list[int]:
        """Render `messages` with the model's template and encode the result.

        The template writes its own special tokens. Raises RequestError when the model has no
        template or the template refuses the messages.
        """
        return self.encode(self.render(messages, **options), add_special_tokens=False)

    def render(self, messages: list[dict[str, Any]], /, **options: Any) -> str:
        """The text that `messages` become, for `encode`; the same errors as `chat_ids`."""
        if self.template is None:
            raise RequestError(
                "This model has no chat template; use /v1/completions, or start the server with "
                "--chat-template FILE.",
                param="messages",
                code="no_chat_template",
            )
        if all(mark in self.template.source for mark in HARMONY):
            raise RequestError(
                "This model answers in Harmony's channels (analysis, commentary, final), which are "
                "not told apart here; use /v1/completions with a prompt in that format.",
                param="messages",
                code="unsupported_chat_format",
            )
        return self.template.render([*map(self._quote, messages)], **options)

    def _quote(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message whose special tokens are marked as text where it may come from anybody."""
        content = message.get("content")
        if message.get("role") not in USERS or not isinstance(content, str):
            return message
        quoted = self._controls.sub(rf"{QUOTE}\g<0>{END_QUOTE}", content)
        return message if quoted == content else {**message, "content": quoted}

    def unquoted(self, rendered: str) -> str:
        """What `render` gave, to be read by people: without the marks around special tokens."""
        return self._quoted.sub(r"\1", rendered)


@contextmanager
def panics_refused() -> Iterator[None]:
    """Turn a panic of the Rust side over one text into a RequestError.

    It is a BaseException: in a thread it would pass every handler of the server. Regular
    expressions panic where a match takes ten million steps back.
    """
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise RequestError(
            f"The model's tokenizer fails on this text: {str(error)[:200]}.",
            param="prompt",
            code="invalid_value",
        ) from error


def is_panic(error: BaseException) -> bool:
    """Whether Rust code panicked; the class of it cannot be imported."""
    return type(error).__name__ == "PanicException"


def missing_tokenizer(folder: Path) -> TokenizerError:
    """The error for a folder without tokenizer.json."""
    for name in SENTENCEPIECE_FILES:
        if (folder / name).exists():
            return TokenizerError(
                f"{folder} has only a sentencepiece tokenizer ({name}).",
                "Convert it once: transformers' AutoTokenizer.from_pretrained(FOLDER)"
                ".save_pretrained(FOLDER) writes tokenizer.json.",
            )
    return TokenizerError(
        f"{folder} has no tokenizer.json.",
        "Copy it from the model's source, name its folder with --tokenizer, or serve token ids "
        "with --skip-tokenizer-init.",
    )

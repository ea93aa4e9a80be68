"""Tokenizer and chat template of a model, read from its folder without transformers.

It encodes text, decodes ids, renders chats, and has the bytes of each token. It reads only
`tokenizer.json`, `tokenizer_config.json` and the template next to them, or a GGUF file.
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
"""Texts in a chat template of gpt-oss."""


USERS = ("user", "tool", "function")
"""Roles of messages with untrusted text, as a page that a tool has read."""
QUOTE, END_QUOTE = "\ufdd0", "\ufdd1"
"""Marks around a special token in untrusted text while a template renders it: code points that
Unicode reserves for internal use."""


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
        """Return the number of entries with added tokens; may be below the width of the logits."""
        return self._rust.get_vocab_size(with_added_tokens=True)

    def text_limit(self, num_tokens: int, *, loosely: bool = False) -> int:
        """Return the most bytes of a text of `num_tokens`; `loosely` if parts are dropped."""
        return num_tokens * self._longest * (lengths.LOOSER if loosely else self._shrinks)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; RequestError for lone surrogates."""
        parts = self.encode_parts(text, add_special_tokens=add_special_tokens)
        first = next(parts)
        for part in parts:
            first += part
        return first

    def encode_parts(self, text: str, *, add_special_tokens: bool = True) -> Iterator[list[int]]:
        """Yield the token ids of `text` part by part where a long text can be cut; at least one.

        A caller may stop in between. A text that begins with the special tokens gets them once.
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
        """Return the number of tokens of each text without special tokens; errors as `encode`."""
        return [len(each.ids) for each in self._encoded(texts, False)]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._encoded([text], add_special_tokens)[0].ids
        return ids

    def _encoded(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        """Return the library's encodings; RequestError for a text that cannot be encoded."""
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
        """Return the special tokens (before, after) any text; None if they cannot be found."""
        bare, whole = self._encode("a", False), self._encode("a", True)
        for at in range(len(whole) - len(bare) + 1) if bare else ():
            if whole[at : at + len(bare)] == bare:
                return whole[:at], whole[at + len(bare) :]
        return None

    def _encode_quoted(self, text: str, ends: tuple[list[int], list[int]]) -> list[int]:
        """Return the ids of a text with quoted special tokens: it is cut inside of them."""
        ids: list[int] = [] if self._begins_itself(text, ends[0]) else [*ends[0]]
        begin = 0
        for quoted in self._quoted.finditer(text):
            control = quoted[1]
            ids += self._encode(text[begin : quoted.start()] + control[0], False)
            ids += self._encode(control[1:], False)
            begin = quoted.end()
        return ids + self._encode(text[begin:], False) + ends[1]

    def _begins_itself(self, text: str, before: list[int]) -> bool:
        """Return whether `text` already begins with the special tokens before it: "<s>Hi"."""
        return bool(before) and text.startswith("".join(map(self.token, before)))

    def _split(self, text: str) -> list[str]:
        """Return the words of the pre-tokenizer in `text`."""
        with panics_refused():
            return [word for word, _ in self._rust.pre_tokenizer.pre_tokenize_str(text)]

    def offsets(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the start of each token in `text`; added tokens have no width: <s>Hi is 0, 0."""
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
        """Return the text of `token_ids`, decoded together."""
        # decode_batch, unlike decode, lets other threads run meanwhile
        with panics_refused():
            return self._rust.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def special(self, texts: tuple[str, ...]) -> dict[str, int]:
        """Return the special tokens among `texts` with their ids: {"[TOOL_CALLS]": 5}."""
        ids = {text: self._rust.token_to_id(text) for text in texts}
        return {text: i for text, i in ids.items() if i is not None and i in self.special_ids}

    def token(self, token_id: int) -> str:
        """Return the vocabulary entry as in tokenizer.json, or "" for an unused id."""
        return self._rust.id_to_token(token_id) or ""

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of one token, special tokens spelled out; b"" for an unused id."""
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
        """Return the text of `messages`, for `encode`; errors as `chat_ids`."""
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
        """Return a message with special tokens marked as text if its content is untrusted."""
        content = message.get("content")
        if message.get("role") not in USERS or not isinstance(content, str):
            return message
        quoted = self._controls.sub(rf"{QUOTE}\g<0>{END_QUOTE}", content)
        return message if quoted == content else {**message, "content": quoted}

    def unquoted(self, rendered: str) -> str:
        """Return rendered text without the marks around special tokens, for display."""
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
    """Return whether Rust code panicked; the class of the exception cannot be imported."""
    return type(error).__name__ == "PanicException"


def missing_tokenizer(folder: Path) -> TokenizerError:
    """Return the error for a folder without tokenizer.json."""
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

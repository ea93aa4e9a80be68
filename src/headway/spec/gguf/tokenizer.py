"""A GGUF file's vocabulary as Hugging Face's tokenizer.json and tokenizer_config.json.

llama.cpp names the splitting of text into words instead of writing it down, so there is a table of
those names here; one that is not in it is refused, for other splits give other tokens. A file that
carries its tokenizer.json (`tokenizer.huggingface.json`) is believed.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.core.errors import TokenizerError
from headway.spec.gguf.header import Header, shown

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens."""
FIX = "Name the folder of the model's own tokenizer with --tokenizer."
SPACE = "▁"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
SIGNS = r" ?[^\s\p{L}\p{N}]+"
LLAMA3 = rf"{CONTRACTIONS}|{BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{SIGNS}[\r\n]*|{END}"
QWEN2 = rf"{CONTRACTIONS}|{BEFORE}\p{{L}}+|\p{{N}}|{SIGNS}[\r\n]*|{END}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = rf"{BEFORE}{UPPER}*{LOWER}+|{BEFORE}{UPPER}+{LOWER}*|\p{{N}}|{SIGNS}[\r\n/]*|{END}"
GPT4O = (
    rf"{BEFORE}{UPPER}*{LOWER}+{CONTRACTIONS}?|{BEFORE}{UPPER}+{LOWER}*{CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{SIGNS}[\r\n/]*|{END}"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{END}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """How a text is split into words before its bytes are merged.

    `patterns` one after the other; without any GPT-2's own. `digits`: each digit is a word.
    `whole`: a word that is a token is one, whatever the merges say. `adds_bos` where the file does
    not say.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    nfc: bool = False
    whole: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> dict[str, Any]:
        """As tokenizer.json spells it."""
        parts: list[dict[str, Any]] = []
        if self.digits:
            parts.append({"type": "Digits", "individual_digits": True})
        for pattern in self.patterns:
            split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
            parts.append({**split, "invert": False})
        parts.append(byte_level(use_regex=not self.patterns))
        return {"type": "Sequence", "pretokenizers": parts} if len(parts) > 1 else parts[0]


def byte_level(use_regex: bool) -> dict[str, Any]:
    """GPT-2's alphabet of bytes, as pre-tokenizer or decoder."""
    spaces = {"add_prefix_space": False, "trim_offsets": True}
    return {"type": "ByteLevel", **spaces, "use_regex": use_regex}


LLAMA3_WORDS = Words(patterns=(LLAMA3,), whole=True, adds_bos=True)
WORDS = {
    **dict.fromkeys(("gpt-2", "phi-2"), Words()),
    **dict.fromkeys(("smollm", "starcoder", "refact"), Words(digits=True)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "lfm2"), LLAMA3_WORDS),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Words(patterns=(LLAMA3,))),
    "qwen2": Words(patterns=(QWEN2,), nfc=True),
    "deepseek-r1-qwen": Words(patterns=(QWEN2,)),
    "tekken": Words(patterns=(TEKKEN,), whole=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Words(patterns=(GPT4O,))),
    "deepseek-v3": Words(patterns=DEEPSEEK3),
}
"""`tokenizer.ggml.pre` → the splitting that the models of that name have in tokenizer.json."""


def tokenizer_of(header: Header) -> dict[str, Any]:
    """The file's tokenizer.json; TokenizerError names what is not read."""
    metadata = header.metadata
    whole = metadata.get("tokenizer.huggingface.json")
    if isinstance(whole, str):
        return parsed(header, whole)
    kind = metadata.get("tokenizer.ggml.model")
    make = KINDS.get(kind) if isinstance(kind, str) else None
    if make is None:
        what = "no tokenizer" if kind is None else f"a tokenizer of the kind {shown(kind)!r}"
        raise TokenizerError(
            f"{header.path.name} has {what}; read from GGUF are: {', '.join(KINDS)}.", FIX
        )
    return make(Vocabulary(header))


def parsed(header: Header, text: str) -> dict[str, Any]:
    """The tokenizer.json that a file carries."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise TokenizerError(
            f"{header.path.name}: tokenizer.huggingface.json is no JSON object.", FIX
        )
    return document


class Vocabulary:
    """The tokens of a file, their types and scores, checked: one of each for every token."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.tokens = [
            self._text(token, i) for i, token in enumerate(self.array("tokens", bytes) or [])
        ]
        if not self.tokens:
            raise self.wrong("has no tokens")
        self.types = self.array("token_type", int) or [NORMAL] * len(self.tokens)
        if len(self.types) < len(self.tokens):
            raise self.wrong(f"has {len(self.types)} types for {len(self.tokens)} tokens")

    def get(self, key: str) -> Any:
        """tokenizer.ggml.KEY, or None."""
        return self.header.metadata.get(f"tokenizer.ggml.{key}")

    def array(self, key: str, kind: type) -> list[Any] | None:
        """A list of that kind of items, or None; TokenizerError for anything else."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or (value and not isinstance(value[0], kind)):
            raise self.wrong(f"has no array of {kind.__name__} in tokenizer.ggml.{key}")
        return value

    def _text(self, token: bytes, token_id: int) -> str:
        try:
            return token.decode()
        except UnicodeDecodeError:
            raise self.wrong(f"has a token {token_id} that is not UTF-8") from None

    def wrong(self, what: str) -> TokenizerError:
        return TokenizerError(f"{self.header.path.name} {what}.", FIX)

    def named(self, key: str) -> int | None:
        """The id under tokenizer.ggml.KEY_token_id, or None where there is no such token."""
        token_id = self.get(f"{key}_token_id")
        whole = isinstance(token_id, int) and not isinstance(token_id, bool)
        return token_id if whole and 0 <= token_id < len(self.tokens) else None

    def entries(self) -> dict[str, int]:
        """Text → id of the tokens that text can become or that are found in it."""
        return {
            token: i for i, token in enumerate(self.tokens) if token and self.types[i] != UNUSED
        }

    def added(self) -> list[dict[str, Any]]:
        """Tokens that are found in a text before anything else; control tokens are special."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": i, "content": token, **flags, "special": self.types[i] != USER_DEFINED}
            for i, token in enumerate(self.tokens)
            if token and self.types[i] in (UNKNOWN, CONTROL, USER_DEFINED)
        ]

    def post_processor(self, adds_bos: bool) -> dict[str, Any] | None:
        """What puts the first and the last token around a text; None where nothing does."""
        begin = self.named("bos") if self._adds("bos", adds_bos) else None
        end = self.named("eos") if self._adds("eos", False) else None
        around = {i: self.tokens[i] for i in (begin, end) if i is not None}
        if not around:
            return None

        def template(letters: str) -> list[dict[str, Any]]:
            before = [] if begin is None else [special(self.tokens[begin])]
            after = [] if end is None else [special(self.tokens[end])]
            return [
                part
                for number, letter in enumerate(letters)
                for part in (*before, {"Sequence": {"id": letter, "type_id": number}}, *after)
            ]

        def special(token: str) -> dict[str, Any]:
            return {"SpecialToken": {"id": token, "type_id": 0}}

        tokens = {
            token: {"id": token, "ids": [i], "tokens": [token]} for i, token in around.items()
        }
        return {
            "type": "TemplateProcessing",
            "single": template("A"),
            "pair": template("AB"),
            "special_tokens": tokens,
        }

    def _adds(self, which: str, default: bool) -> bool:
        value = self.get(f"add_{which}_token")
        return value if isinstance(value, bool) else default


def byte_pairs(vocabulary: Vocabulary) -> dict[str, Any]:
    """`gpt2`: byte-level BPE with its merges, and words split as `tokenizer.ggml.pre` says."""
    name = vocabulary.get("pre")
    words = WORDS.get(name) if isinstance(name, str) else None
    if words is None:
        raise vocabulary.wrong(
            f"splits words as {shown(name)!r}, which is not known here; known are: "
            f"{', '.join(WORDS)}"
        )
    merges = []
    for merge in vocabulary.array("merges", bytes) or []:
        first, space, second = merge.decode(errors="replace").partition(" ")
        if not (first and space and second):
            raise vocabulary.wrong(f"has the merge {shown(merge)!r}, which is not two parts")
        merges.append([first, second])
    if not merges:
        raise vocabulary.wrong("has no merges")
    model = {"type": "BPE", "vocab": vocabulary.entries(), "merges": merges}
    return {
        "version": "1.0",
        "added_tokens": vocabulary.added(),
        "normalizer": {"type": "NFC"} if words.nfc else None,
        "pre_tokenizer": words.pre_tokenizer(),
        "post_processor": vocabulary.post_processor(words.adds_bos),
        "decoder": byte_level(use_regex=True),
        "model": {**model, "ignore_merges": words.whole, "fuse_unk": False, "byte_fallback": False},
    }


def sentence_pieces(vocabulary: Vocabulary) -> dict[str, Any]:
    """`llama`: SentencePiece's BPE; what is merged first has the higher score."""
    scores = vocabulary.array("scores", float)
    if scores is None or len(scores) < len(vocabulary.tokens):
        raise vocabulary.wrong("has no scores for its tokens")
    pieces = {
        token: i
        for token, i in vocabulary.entries().items()
        if vocabulary.types[i] in (NORMAL, USER_DEFINED)
    }
    if len({scores[i] for i in pieces.values()}) < 2:
        raise vocabulary.wrong("has the same score for all tokens, so nobody knows their merges")
    prefix = vocabulary.get("add_space_prefix") is not False
    unknown = vocabulary.named("unknown")
    if unknown is None:
        unknown = next((i for i, kind in enumerate(vocabulary.types) if kind == UNKNOWN), None)
    begin = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    end = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "version": "1.0",
        "added_tokens": vocabulary.added(),
        "normalizer": {"type": "Sequence", "normalizers": [*begin, replace]},
        "pre_tokenizer": None,
        "post_processor": vocabulary.post_processor(adds_bos=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *end],
        },
        "model": {
            "type": "BPE",
            "vocab": vocabulary.entries(),
            "merges": merges_of(pieces, scores),
            "unk_token": None if unknown is None else vocabulary.tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
        },
    }


def merges_of(pieces: dict[str, int], scores: list[float]) -> list[list[str]]:
    """The pairs that may be merged, first those that give the piece of the highest score.

    Scores 0, -1, -2 of "ab", "abc", "bc": a b, then ab c and a bc, then b c, where a, b and c are
    pieces too.
    """
    merges = []
    for piece, i in pieces.items():
        for at in range(1, len(piece)):
            if piece[:at] in pieces and piece[at:] in pieces:
                merges.append((scores[i], at, len(piece) - at, piece))
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [[piece[:at], piece[at:]] for _, at, _, piece in merges]


KINDS: dict[str, Callable[[Vocabulary], dict[str, Any]]] = {
    "gpt2": byte_pairs,
    "llama": sentence_pieces,
}
"""`tokenizer.ggml.model` → what makes a tokenizer.json of it."""


def tokenizer_config_of(header: Header) -> dict[str, Any]:
    """The file's tokenizer_config.json: the chat template, and the texts of special tokens."""
    metadata = header.metadata
    config: dict[str, Any] = {}
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    tokens = metadata.get("tokenizer.ggml.tokens")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for ours, theirs in names.items():
        token_id = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(tokens, list) and isinstance(token_id, int) and 0 <= token_id < len(tokens):
            token = tokens[token_id]
            if isinstance(token, bytes):
                config[f"{ours}_token"] = token.decode(errors="replace")
    return config

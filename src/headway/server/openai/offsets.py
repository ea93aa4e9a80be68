"""`text_offset`: where in the shown text each token begins, special tokens and half characters too.

Worked example, the prompt "Once é" of a tokenizer that puts <s> before it, "é" in two tokens:

    tokens   <s>  "Once"  " "  "\\xc3"  "\\xa9"
    offsets   0    0       4    5       5        the text is "Once é", where <s> does not show
"""

import codecs

from headway.frontend.text import Tokenizer


class Offsets:
    """Hands out the offsets of a text's tokens, in order; `hides` special tokens."""

    def __init__(self, tokenizer: Tokenizer | None, *, hides: bool, at: int = 0) -> None:
        self.at = at
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if tokenizer and hides else frozenset()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def place(self, token_ids: list[int]) -> list[int]:
        """The offsets of the tokens that come next."""
        found = []
        for token_id in token_ids:
            found.append(self.at)
            if self._tokenizer is not None and token_id not in self._hidden:
                self.at += len(self._decode(self._tokenizer.piece(token_id)))
        return found


def prompt_offsets(
    tokenizer: Tokenizer | None, prompt: list[int], text: str, hides: bool
) -> list[int]:
    """The offsets of a prompt given as ids whose decoded text is `text`.

    Some decoders drop the space before the first word: " Once" is shown as "Once".
    """
    offsets = Offsets(tokenizer, hides=hides)
    found = offsets.place(prompt)
    dropped = max(0, offsets.at - len(text))
    return [max(0, at - dropped) for at in found]

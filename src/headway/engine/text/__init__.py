"""Text in and out: tokenizer, chat template, and the text of a growing sequence."""

from headway.engine.text.reading import Reader, Reading
from headway.engine.text.stream import TextStream
from headway.engine.text.tokenizer import Tokenizer

__all__ = ["Reader", "Reading", "TextStream", "Tokenizer"]

"""Text in and out: tokenizer, chat template, and the text of a growing sequence."""

from headway.frontend.text.output_parser import OutputParser, OutputParserSpec
from headway.frontend.text.stream import TextStream
from headway.frontend.text.tokenizer import Tokenizer

__all__ = ["OutputParser", "OutputParserSpec", "TextStream", "Tokenizer"]

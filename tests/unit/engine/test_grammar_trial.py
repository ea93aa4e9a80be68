"""The process that compiles a grammar first, in a server that has much open."""

import os
import resource
from pathlib import Path

from byte_tokenizer import EOS, write_tokenizer
from grammar_engine import VOCAB
from headway.core import grammar as grammars
from headway.core.clock import SystemClock
from headway.engine.grammar.trial import Trial
from headway.engine.grammar.vocabulary import VocabularySource


def test_a_server_with_a_thousand_open_files_compiles_grammars(tmp_path: Path):
    """select() refuses descriptors from 1,024 on: a server with many segments has such."""
    write_tokenizer(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    occupied = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    trial = Trial(VocabularySource(str(tmp_path), VOCAB, (EOS,)), 5.0, SystemClock())
    try:
        rule = grammars.regex("a+", "f")
        assert trial.check(rule) == rule
    finally:
        trial.close()
        for handle in occupied:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

"""The process that compiles a grammar first, in a server that has much open."""

import os
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from byte_tokenizer import EOS, write_tokenizer
from grammar_engine import VOCAB
from headway.core import grammar as grammars
from headway.core.clock import SystemClock
from headway.engine.grammar.builder import LARGE_VOCABULARY
from headway.engine.grammar.grammars import Grammars
from headway.engine.grammar.trial import GrammarTrial
from headway.engine.grammar.vocabulary import VocabularySource


def test_a_server_with_a_thousand_open_files_compiles_grammars(tmp_path: Path):
    """select() refuses descriptors from 1,024 on: a server with many segments has such."""
    write_tokenizer(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    occupied = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    trial = GrammarTrial(VocabularySource(str(tmp_path), VOCAB, (EOS,)), 5.0, SystemClock())
    try:
        rule = grammars.regex("a+", "f")
        assert trial.check(rule) == rule
    finally:
        trial.close()
        for handle in occupied:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_large_vocabulary_is_built_before_a_grammar_is_asked_for(tmp_path: Path):
    """Then the first one waits for its compilation alone."""
    write_tokenizer(tmp_path)
    for size, prepared in ((LARGE_VOCABULARY, True), (VOCAB, False)):
        source = VocabularySource(str(tmp_path), size, (EOS,))
        rules = Grammars(source, threads=1)
        try:
            rules.prepare()
            assert (rules.builder._vocabulary is not None) == prepared
            trial = rules.builder._trial._process
            assert (trial is not None) == prepared
            ticket = rules.builder.build(grammars.regex("a+", "f"))
            while not ticket.done:
                time.sleep(0.01)
            assert ticket.compiled is not None
            assert trial in (None, rules.builder._trial._process), "the same process"
        finally:
            rules.close()


STARTS_ONE = """
import sys, time
from headway.core import grammar
from headway.core.clock import SystemClock
from headway.engine.grammar.trial import GrammarTrial
from headway.engine.grammar.vocabulary import VocabularySource
source = VocabularySource(sys.argv[1], int(sys.argv[2]), (int(sys.argv[3]),))
trial = GrammarTrial(source, 5.0, SystemClock())
trial.check(grammar.regex("a+", "f"))
print(trial._process.pid, flush=True)
time.sleep(600)
"""


def test_a_trial_that_is_stopped_ends_with_its_engine(tmp_path: Path):
    """An engine that is stopped with all that it started, and then killed."""
    write_tokenizer(tmp_path)
    command = [sys.executable, "-c", STARTS_ONE, str(tmp_path), str(VOCAB), str(EOS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        trial = os.pidfd_open(int(engine.stdout.readline()))
        for signalled in (trial, os.pidfd_open(engine.pid)):
            signal.pidfd_send_signal(signalled, signal.SIGSTOP)
        engine.kill()
        engine.wait()
    waiting = select.poll()
    waiting.register(trial, select.POLLIN)
    assert waiting.poll(60_000), "it is stopped still"

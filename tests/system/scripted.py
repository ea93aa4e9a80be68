"""A server whose model says what a test wrote: all of the server is real, only the engine is not.

`ScriptedClient` stands where the engine's client stands. Every request is answered with the next of
its `answers`, cut into tokens by the tokenizer, `pace` tokens in an update, and ended by the end
token or by length. The text stream, the output parser, the dialects and HTTP behind it are the
server's.
"""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from tiny_model import EOS, tiny_config, write_tokenizer

from headway.config.options import ServerOptions
from headway.core.errors import RequestError
from headway.core.plan import Description
from headway.core.records import StepRecord
from headway.core.request import Request, SequenceUpdate
from headway.engine.messages import Ready
from headway.frontend.answer import OutputProcessor, ResumedTokens, Stream
from headway.frontend.text import OutputParserSpec, Tokenizer
from headway.server.app import make_app
from headway.server.models import ServedModel, ServerState, answer_formats
from headway.spec import read_model_spec
from headway.telemetry.live import Telemetry

CONTEXT_TOKENS = 4096


class ScriptedClient:
    """What the server wants of an engine's client, answered from a list."""

    ready, status, num_restarts = True, "ready", 0

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.answers: list[str] = []
        self.pace = 1
        self.asked: list[Request] = []
        self.num_cut = 0
        """Sequences that the server wanted no more of."""
        self.hold: threading.Event | None = None
        """While this is not set nothing is said, as in a long prefill."""
        self.begins = False
        """Whether a chunk of the prompt is computed before the hold."""
        self.fails: RequestError | None = None
        """What comes instead of an answer."""
        self.on_record: Callable[[StepRecord], None] = lambda record: None
        self.info = Ready(
            max_model_len=CONTEXT_TOKENS,
            max_num_seqs=8,
            vocab_size=tokenizer.vocab_size,
            num_blocks=64,
            block_size=16,
            group_blocks=[64],
            description=Description(device="script"),
        )

    async def start(self) -> None: ...

    async def wait_ready(self) -> None: ...

    async def drain(self, timeout_s: float) -> None: ...

    async def stop(self) -> None: ...

    @property
    def prompt(self) -> str:
        """What the last request asked, as the template wrote it."""
        return self.tokenizer.decode(self.asked[-1].prompt_token_ids, skip_special_tokens=False)

    def submit(
        self,
        request: Request,
        parser_spec: OutputParserSpec | None = None,
        engine: int | None = None,
        resumed_tokens: ResumedTokens = (),
    ) -> Stream:
        sampling = request.sampling
        self.asked.append(request)
        running = set(range(sampling.n))

        def abort(index: int | None) -> None:
            if index in running:
                running.discard(index)
                self.num_cut += 1

        stream = Stream(OutputProcessor(request, self.tokenizer, parser_spec), abort)
        texts = [self.answers.pop(0) for _ in range(sampling.n)]
        self._task = asyncio.ensure_future(self._play(stream, request, texts, running))
        return stream

    async def _play(
        self, stream: Stream, request: Request, texts: list[str], running: set[int]
    ) -> None:
        """Put in the updates of all sequences in turn, with a moment between them."""
        if self.begins:
            self.on_record(first_chunk(request.request_id))
        while self.hold is not None and not self.hold.is_set():
            await asyncio.sleep(0.001)
        if self.fails is not None:
            stream.fail(self.fails)
            return
        limit = request.sampling.max_tokens
        scripts = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        for at in range(0, max(map(len, scripts)) + self.pace, self.pace):
            for index in sorted(running):
                script = [*scripts[index], EOS][:limit]
                tokens = script[at : at + self.pace]
                if not tokens:
                    continue
                update = SequenceUpdate(request.request_id, index, tokens)
                if at + self.pace >= len(script):
                    running.discard(index)
                    over = script[-1] == EOS
                    update.finish_reason = "stop" if over else "length"
                    update.stop_token_id = EOS if over else None
                stream.put(update)
            await asyncio.sleep(0.001)


def first_chunk(request_id: int) -> StepRecord:
    """A step that computed two tokens of a prompt."""
    record = StepRecord(
        step=1,
        started_s=time.monotonic(),
        num_running=1,
        num_waiting=0,
        num_tokens=2,
        num_sampled=0,
        kv_blocks_used=1,
        kv_usage=0.1,
        num_preemptions=0,
    )
    record.prefilling = [(request_id, 0, 2)]
    return record


class ScriptedServer:
    """The server in a thread of this process, on a free port of the loopback."""

    def __init__(
        self, folder: Path, template: str, specials: tuple[str, ...] = (), parser: str = "auto"
    ) -> None:
        write_scripted_model(folder, template, specials)
        tokenizer = Tokenizer(folder)
        self.client = ScriptedClient(tokenizer)
        format, reasoning = answer_formats(tokenizer, parser)
        self.telemetry = Telemetry(["script"], read_model_spec(folder))
        self.telemetry.on_ready(self.client.info)
        self.client.on_record = self.telemetry.on_step
        model = ServedModel(
            names=["script"],
            client=self.client,
            tokenizer=tokenizer,
            telemetry=self.telemetry,
            format=format,
            reasoning=reasoning,
        )
        self.model = model
        state = ServerState(models={"script": model}, options=ServerOptions())
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        config = uvicorn.Config(make_app(state), log_config=None, lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        sockets = [self._listener]
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": sockets})
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def says(self, *answers: str, pace: int = 1) -> None:
        """What the next requests are answered with."""
        self.client.answers = list(answers)
        self.client.pace = pace

    def counted(self, name: str, *labels: str) -> float:
        """A counter as it stands."""
        return self.telemetry.registry.values[name].get(labels, 0.0)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


def write_scripted_model(folder: Path, template: str, specials: tuple[str, ...]) -> None:
    """A folder with a config and a tokenizer, whose special tokens are the usual and `specials`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(folder)
    tokenizer.add_special_tokens(list(specials))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(tiny_config(tokenizer.get_vocab_size())))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "chat_template": template}))


@contextlib.contextmanager
def scripted(
    folder: Path, template: str, specials: tuple[str, ...] = (), parser: str = "auto"
) -> Iterator[ScriptedServer]:
    """A server for the time of a test."""
    server = ScriptedServer(folder, template, specials, parser)
    try:
        yield server
    finally:
        server.close()

"""The server's application in a thread of this process, over an engine without a model.

Everything is real but the executor, which answers with a hash of the tokens it reads: HTTP, limits,
the tokenizer and chat template of the embedded model, scheduler, SQLite, files. It starts in a
fraction of a second and needs no torch.
"""

import asyncio
import threading
from pathlib import Path
from typing import Any

import uvicorn

from fakes import FakeExecutor, make_settings
from headway.batches import open_runner
from headway.batches.runner import Runner
from headway.cli.build_server import make_classes, make_rules
from headway.cli.common import model_folder
from headway.config.options import EngineOptions, ServerOptions
from headway.edge.keys import Keyring
from headway.edge.serving import bind
from headway.engine.build import build_engine
from headway.engine.engine import Engine
from headway.frontend.local import LocalClient
from headway.frontend.text import Tokenizer
from headway.server.app import make_app
from headway.server.models import ServedModel, ServerState
from headway.spec import read_model_spec
from headway.telemetry.live import Telemetry

BLOCK, NUM_BLOCKS = 16, 513


def fake_engine(vocab_size: int, *, max_num_seqs: int = 16) -> Engine:
    """An engine over 8,192 tokens of nothing."""
    settings = make_settings(
        max_model_len=512,
        max_num_seqs=max_num_seqs,
        budget=256,
        block_size=BLOCK,
        num_blocks=(NUM_BLOCKS,),
    )
    executor = FakeExecutor(BLOCK, (NUM_BLOCKS,), vocab_size)
    return build_engine(executor, settings, vocab_size=vocab_size, eos_token_ids=())


def fake_state(engine: Engine | None = None, **options: Any) -> ServerState:
    """The state of a server of one model, called tiny; of a real `engine` where one is given."""
    folder = model_folder(None)
    tokenizer = Tokenizer(folder)
    given = ServerOptions(**options)
    telemetry = Telemetry(["tiny"], read_model_spec(folder), classes=make_classes(given))
    engine = engine or fake_engine(tokenizer.vocab_size)
    client = LocalClient(engine, tokenizer=tokenizer, on_record=telemetry.on_step)
    telemetry.on_ready(client.info)
    model = ServedModel(
        names=["tiny"],
        client=client,
        tokenizer=tokenizer,
        telemetry=telemetry,
        rules=make_rules(given, EngineOptions()),
    )
    return ServerState(
        models={"tiny": model},
        options=given,
        keyring=Keyring(
            flags=given.api_key,
            file=Path(given.key_file) if given.key_file else None,
            share_prefix_cache=given.share_prefix_cache,
        ),
    )


class InProcess:
    """A server in a thread; `url` is where it listens. Of a `state`, or of one with `options`."""

    def __init__(self, data: Path, state: ServerState | None = None, **options: Any) -> None:
        self.state = state or fake_state(data_dir=str(data), **options)
        self.data = data
        self.runner: Runner = open_runner(self.state)
        self._socket = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._ready, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._ready.wait(60)

    async def _serve(self) -> None:
        client, self.loop = self.state.rows[0].client, asyncio.get_running_loop()
        config = uvicorn.Config(
            make_app(self.state, self.runner),
            http="h11",
            lifespan="off",
            log_config=None,
            ws="none",
            timeout_graceful_shutdown=2,
        )
        server = uvicorn.Server(config)
        await client.start()
        await self.runner.start()
        serving = asyncio.create_task(server._serve([self._socket]))
        self._ready.set()
        while not self._end.is_set():
            await asyncio.sleep(0.02)
        await self.runner.stop()
        server.should_exit = True
        if self.state.upstream is not None:
            await self.state.upstream.close()
        await client.stop()
        await serving

    def close(self) -> None:
        """Stop the server, its batches where they are."""
        self._end.set()
        self._thread.join(60)
        self._socket.close()

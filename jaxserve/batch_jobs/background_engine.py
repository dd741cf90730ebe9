"""The server's engine as `batch_runner` drives one: from a thread of its own, beside everybody else's requests."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable

from jaxserve.errors import EngineDeadError, JaxserveError, QueueFullError
from jaxserve.outputs import RequestOutput
from jaxserve.request import GenerationRequest
from jaxserve.server.async_engine import AsyncEngine
from jaxserve.server.circuit_breaker import BreakerOpenError
from jaxserve.server.errors import ApiError

RETRY_SECONDS = 0.2


class Interrupted(Exception):
    """The batch is to stop where it is: it was cancelled, or the server ends. What it has done is in its journal."""


class BackgroundEngine:
    """`batch_runner.Engine` over an AsyncEngine. Belongs to one thread, which is not the event loop's.

    A circuit that is open is waited for, and so is a queue full of others' work: nobody waits for background work.

    Args:
      stop: once it is set, every call raises Interrupted.
      on_step: called by that thread, with every step and every try to submit.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        loop: asyncio.AbstractEventLoop,
        stop: threading.Event,
        on_step: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._stop = stop
        self._on_step = on_step
        self._news: queue.SimpleQueue[list[RequestOutput] | Exception] = queue.SimpleQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def submit(self, request: GenerationRequest) -> None:
        """Raises: Interrupted; InvalidRequestError: the engine can't run it; QueueFullError: not before more of
        its own has ended; OverloadedError: not in the time that it asks for, which waiting makes no better.
        """
        while True:
            self._check()
            try:
                promised = self._engine.check_admission([request])
                asyncio.run_coroutine_threadsafe(self._begin(promised[0]), self._loop).result()
            except QueueFullError:
                if self._tasks:
                    raise  # what is there goes on meanwhile, and must be written down
                self._stop.wait(RETRY_SECONDS)
            except BreakerOpenError:
                self._stop.wait(RETRY_SECONDS)
            except (EngineDeadError, ApiError, RuntimeError):  # the server ends; the last: its loop is closed
                raise Interrupted from None
            else:
                return

    def abort(self, request_id: str) -> None:
        """Does nothing to one that has ended."""
        task = self._tasks.pop(request_id, None)
        if task is not None:
            self._loop.call_soon_threadsafe(task.cancel)

    def has_work(self) -> bool:
        return bool(self._tasks)

    def step(self) -> list[RequestOutput]:
        """What has come of the requests since; waits a moment for it. Raises: Interrupted."""
        self._check()
        try:
            news = self._news.get(timeout=RETRY_SECONDS)
        except queue.Empty:
            return []
        if isinstance(news, Exception):
            raise Interrupted from news
        return news

    def close(self) -> None:
        """Abort what is left."""
        for request_id in list(self._tasks):
            self.abort(request_id)

    def _check(self) -> None:
        self._on_step()
        if self._stop.is_set():
            raise Interrupted

    async def _begin(self, request: GenerationRequest) -> None:
        stream = self._engine.open([request])
        try:
            await stream.admitted()
        except BaseException:
            stream.close()
            raise

        async def read() -> None:
            with stream:
                try:
                    while news := await stream.next():
                        self._news.put(news)
                except (JaxserveError, ApiError) as error:  # the engine or the server ends
                    self._news.put(error)

        self._tasks[request.request_id] = self._loop.create_task(read())

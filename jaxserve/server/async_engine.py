"""The bridge between the event loop and the engine, which runs in a thread of its own.

Towards the engine: one thread-safe inbox. The engine's thread drains it before every step, and sleeps on it when it
has nothing to run. Towards the loop: one `call_soon_threadsafe` a step carries all of that step's outputs; each goes
to the mailbox of the HTTP request it belongs to, where it waits until its handler is ready to send. A handler whose
client reads slowly therefore delays nobody; what it has not yet sent is never more than that request's own output.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from jaxserve.engine_view import EngineView
from jaxserve.errors import EngineDeadError, InvalidRequestError, JaxserveError, OverloadedError
from jaxserve.outputs import RequestOutput
from jaxserve.request import FinishReason, GenerationRequest
from jaxserve.server.circuit_breaker import CircuitBreaker, Trial
from jaxserve.server.engine_watch import EngineNews, EngineWatch
from jaxserve.stats import EngineStats

logger = logging.getLogger(__name__)

# Outputs joined into one delta at most: what a handler writes at once stays small even for a client that was away.
MAX_JOINED_OUTPUTS = 64
# A step that takes longer than this while the process wants to end is taken for one that hangs.
STOP_SECONDS = 30.0
# An idle engine is asked this often whether something failed in its background.
IDLE_CHECK_SECONDS = 1.0


class Engine(Protocol):
    """The part of `jaxserve.engine.EngineCore` that is driven from here; see there."""

    stats: EngineStats

    def check_admission(self, request: GenerationRequest, now: float) -> None: ...
    def submit(self, request: GenerationRequest) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> list[RequestOutput]: ...
    def watch(self, is_watched: bool) -> None: ...
    def view(self) -> EngineView: ...
    def close(self) -> None: ...


class Observer(Protocol):
    """Told, on the event loop, how choices end; `jaxserve.server.metrics` implements it. Times are in seconds."""

    def finished(self, reason: str, seconds: float) -> None: ...


@dataclass(slots=True)
class _Submit:
    requests: tuple[GenerationRequest, ...]
    stream: OutputStream


@dataclass(slots=True)
class _Abort:
    request_ids: tuple[str, ...]


@dataclass(slots=True)
class _Watch:
    is_watched: bool


@dataclass(slots=True)
class _Look:
    answer: Callable[[EngineView, float], None]  # told, on the loop, the view and the seconds it took


class _Stop:
    pass


type _Command = _Submit | _Abort | _Watch | _Look | _Stop


class OutputStream:
    """The outputs of the prompts of one HTTP request, in order. Belongs to the event loop.

    Always `close()` it (or use it as a context manager): whatever has not ended by then is aborted in the engine.

    Attributes:
      num_output_tokens: that have arrived so far, of all choices.
    """

    def __init__(
        self,
        owner: AsyncEngine,
        requests: Sequence[GenerationRequest],
        trial: Trial | None,
        on_output: Callable[[RequestOutput], None] | None,
    ) -> None:
        self._owner = owner
        self._trial = trial
        self._on_output = on_output
        now = time.monotonic()
        self.requests = tuple(requests)
        self.num_output_tokens = 0
        self._open_choices = {request.request_id: request.params.n for request in requests}
        self._arrivals = {
            request.request_id: now if request.arrival_time is None else request.arrival_time
            for request in requests
        }
        self._streaming = any(request.stream for request in requests)
        # What waits to be read: joined batches, and the latest outputs, not yet enough for one. So what a client does
        # not read costs about as much memory as its text, and not an object a token.
        self._batches: deque[list[RequestOutput]] = deque()
        self._latest: list[RequestOutput] = []
        self._failure: Exception | None = None
        self._wakeup = asyncio.Event()
        self._admission: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._closed = False

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def is_done(self) -> bool:
        """Every choice of every prompt has ended (its outputs may still wait to be read)."""
        return not self._open_choices

    async def admitted(self) -> None:
        """Wait until the engine has queued the request.

        Raises:
          OverloadedError, InvalidRequestError, EngineDeadError: it was refused.
        """
        await asyncio.shield(self._admission)

    async def next(self) -> list[RequestOutput]:
        """Wait for news, and return it with the deltas of each choice joined; an empty list at the end.

        Raises:
          EngineDeadError, or what `AsyncEngine.fail_all` was given: the request ended early.
        """
        while not self._batches and not self._latest:
            if self._failure is not None:
                raise self._failure
            if self.is_done:
                return []
            self._wakeup.clear()
            await self._wakeup.wait()
        if self._batches:
            return self._batches.popleft()
        latest, self._latest = self._latest, []
        return join_outputs(latest)

    def close(self) -> None:
        """Drop what is pending and abort what still runs; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._batches.clear()
        self._latest.clear()
        if not self._admission.done():
            self._admission.cancel()
        elif not self._admission.cancelled():
            self._admission.exception()  # read it, so that nobody is warned of it
        self._judge(None)
        self._owner._release(self)

    # Called by AsyncEngine, on the loop.

    def _admit(self, failure: Exception | None) -> None:
        if failure is not None:
            self._judge(None if isinstance(failure, OverloadedError | InvalidRequestError) else False)
            self._failure = failure
            self._open_choices.clear()
            self._wakeup.set()
        if not self._admission.done():
            if failure is None:
                self._admission.set_result(None)
            else:
                self._admission.set_exception(failure)

    def _put(self, output: RequestOutput, observer: Observer | None) -> None:
        if self._closed or output.request_id not in self._open_choices:
            return
        if observer is not None:
            self._observe(output, observer)
        if self._on_output is not None:
            self._on_output(output)
        self._judge(output.finish_reason is not FinishReason.ERROR)
        self.num_output_tokens += len(output.token_ids)
        self._latest.append(output)
        if len(self._latest) >= MAX_JOINED_OUTPUTS:
            self._batches.append(join_outputs(self._latest))
            self._latest = []
        if output.finish_reason is not None:
            self._open_choices[output.request_id] -= 1
            if not self._open_choices[output.request_id]:
                del self._open_choices[output.request_id]
        if self._streaming or output.finish_reason is not None:
            self._wakeup.set()

    def _fail(self, failure: Exception) -> None:
        if self._admission.done() and self.is_done:
            return  # it had ended: its reader gets everything
        self._admit(failure)

    def _judge(self, succeeded: bool | None) -> None:
        """Its first output, or its end without one, says whether a trial went well."""
        trial, self._trial = self._trial, None
        if trial is not None:
            self._owner.breaker.judge(trial, succeeded)

    def _observe(self, output: RequestOutput, observer: Observer) -> None:
        if output.finish_reason is not None:
            seconds = time.monotonic() - self._arrivals[output.request_id]
            observer.finished(output.finish_reason.value, seconds)

    def _unfinished(self) -> tuple[str, ...]:
        return tuple(self._open_choices)

    def _report_ended(self, reason: FinishReason, observer: Observer | None) -> None:
        """Count every choice that has not ended by itself."""
        if observer is None:
            return
        now = time.monotonic()
        for request_id, choices in self._open_choices.items():
            for _ in range(choices):
                observer.finished(reason.value, now - self._arrivals[request_id])


class AsyncEngine:
    """Runs an `EngineCore` in a thread and offers it to coroutines of one event loop.

    Args:
      engine: used by the thread alone from `start` on.
      breaker: told how the engine does, on the loop; asked before every request.
      observer: told about every request; may be None.
      on_death: called on the loop, once, when a step raised; every open stream has been failed by then.
    """

    def __init__(
        self,
        engine: Engine,
        breaker: CircuitBreaker,
        *,
        observer: Observer | None = None,
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.breaker = breaker
        self._engine = engine
        self._watch = EngineWatch(engine.stats)
        self._observer = observer
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._streams: dict[str, OutputStream] = {}  # by id of a GenerationRequest
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._death: BaseException | None = None
        self._stopped = False

    def start(self) -> None:
        """Start the thread; call it from the event loop that will use the streams."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """False as soon as the thread has ended, for whatever reason."""
        return self._death is None and self._thread.is_alive() and not self._stopped

    @property
    def stats(self) -> EngineStats:
        """The engine's; to be read."""
        return self._engine.stats

    @property
    def num_open(self) -> int:
        """Engine requests whose streams are open."""
        return len(self._streams)

    def check_admission(self, requests: Sequence[GenerationRequest]) -> tuple[GenerationRequest, ...]:
        """Refuse at once what the engine has no room for, or can't serve in time. From any thread but the loop's.

        Returns them with the promise that they get in, for `open`.

        Raises:
          OverloadedError
        """
        now = time.monotonic()
        for request in requests:
            self._engine.check_admission(request, now)
        return tuple(dataclasses.replace(request, is_promised=True) for request in requests)

    def open(
        self,
        requests: Sequence[GenerationRequest],
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> OutputStream:
        """Hand `requests` to the engine; await `admitted()` on the result to learn whether it took all of them.

        Args:
          on_output: told of every output as it arrives, on the loop.

        Raises:
          EngineDeadError: the engine has stopped.
          BreakerOpenError: it has failed too often, so it is given no work for now.
        """
        if not self.is_alive:
            raise EngineDeadError("the engine has stopped")
        stream = OutputStream(self, requests, self.breaker.admit(), on_output)
        for request in stream.requests:
            self._streams[request.request_id] = stream
        self._inbox.put(_Submit(stream.requests, stream))
        return stream

    async def generate(self, request: GenerationRequest) -> AsyncIterator[RequestOutput]:
        """The outputs of one request; leaving the iteration early aborts it."""
        with self.open([request]) as stream:
            await stream.admitted()
            while outputs := await stream.next():
                for output in outputs:
                    yield output

    def watch(self, is_watched: bool) -> None:
        """Have the engine note what its steps are made of, for `look`; or no longer."""
        self._inbox.put(_Watch(is_watched))

    def look(self, answer: Callable[[EngineView, float], None]) -> None:
        """Have the engine's thread say, between two steps, how the engine stands. A dead engine never answers.

        Args:
          answer: called on the loop with the view, and with the seconds that making it took the thread.
        """
        self._inbox.put(_Look(answer))

    def fail_all(self, failure: Exception) -> None:
        """End every open stream with `failure` and abort its requests."""
        for stream in set(self._streams.values()):
            unfinished = stream._unfinished()
            stream._report_ended(FinishReason.ABORT, self._observer)
            stream._fail(failure)
            if unfinished:
                self._inbox.put(_Abort(unfinished))

    async def stop(self) -> None:
        """Let the thread finish its step, then end it and close the engine. Open streams get EngineDeadError."""
        if self._stopped:
            return
        self._stopped = True
        self.fail_all(EngineDeadError("the server is shutting down"))
        if self._thread.is_alive():
            self._inbox.put(_Stop())
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, STOP_SECONDS)
            if self._thread.is_alive():
                logger.warning("the engine's step did not end within %g s; leaving it behind", STOP_SECONDS)

    def _release(self, stream: OutputStream) -> None:
        unfinished = stream._unfinished()
        for request in stream.requests:
            self._streams.pop(request.request_id, None)
        if unfinished:
            stream._report_ended(FinishReason.ABORT, self._observer)
            self._inbox.put(_Abort(unfinished))

    # The engine's thread.

    def _run(self) -> None:
        try:
            while self._handle_inbox():
                if self._engine.has_work():
                    outputs = self._engine.step()
                    news = self._watch.look()
                    if outputs or news:
                        self._call_loop(self._deliver, outputs, news)
        except BaseException as error:  # the thread's last word: reported to every stream and to /health
            self._death = error
            logger.critical("the engine failed and has stopped", exc_info=error)
            self._call_loop(self._announce_death)
        finally:
            self._engine.close()

    def _handle_inbox(self) -> bool:
        """Carry out what has come in, waiting a while for it when there is nothing to run. False: stop."""
        wait = not self._engine.has_work()
        while True:
            try:
                command = self._inbox.get(block=wait, timeout=IDLE_CHECK_SECONDS)
            except queue.Empty:
                return True
            wait = False
            if isinstance(command, _Stop):
                return False
            if isinstance(command, _Abort):
                for request_id in command.request_ids:
                    self._engine.abort(request_id)
            elif isinstance(command, _Watch):
                self._engine.watch(command.is_watched)
            elif isinstance(command, _Look):
                started = time.perf_counter()
                view = self._engine.view()
                self._call_loop(command.answer, view, time.perf_counter() - started)
            else:
                self._submit(command)

    def _submit(self, command: _Submit) -> None:
        taken: list[str] = []
        try:
            for request in command.requests:
                self._engine.submit(request)
                taken.append(request.request_id)
        except JaxserveError as error:  # all prompts of an HTTP request or none
            for request_id in taken:
                self._engine.abort(request_id)
            self._call_loop(command.stream._admit, error)
        else:
            self._call_loop(command.stream._admit, None)

    def _call_loop(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop has been closed: nobody is left to tell
            logger.debug("the event loop is closed")

    # The loop.

    def _deliver(self, outputs: list[RequestOutput], news: EngineNews | None) -> None:
        if news is not None:
            news.tell(self.breaker)
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream._put(output, self._observer)

    def _announce_death(self) -> None:
        assert self._death is not None
        for stream in set(self._streams.values()):
            stream._report_ended(FinishReason.ERROR, self._observer)
            stream._fail(EngineDeadError(f"the engine has stopped: {type(self._death).__name__}"))
        if self._on_death is not None:
            self._on_death(self._death)


def join_outputs(outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
    """One output for each choice, in order of first appearance: its deltas joined, its last totals kept."""
    groups: dict[tuple[str, int], list[RequestOutput]] = {}
    for output in outputs:
        groups.setdefault((output.request_id, output.index), []).append(output)
    return [group[0] if len(group) == 1 else _join(group) for group in groups.values()]


def _join(group: list[RequestOutput]) -> RequestOutput:
    has_logprobs = any(output.logprobs is not None for output in group)
    prompt_logprobs = [output.prompt_logprobs for output in group if output.prompt_logprobs is not None]
    return msgspec.structs.replace(
        group[-1],
        text="".join(output.text for output in group),
        token_ids=[token for output in group for token in output.token_ids],
        logprobs=[entry for output in group for entry in output.logprobs or ()] if has_logprobs else None,
        prompt_logprobs=prompt_logprobs[0] if prompt_logprobs else None,
    )

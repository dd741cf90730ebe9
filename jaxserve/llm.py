"""Offline use from Python: `LLM(...).generate(...)`, `.chat(...)`, `.stream(...)`, `.embed(...)`."""

from __future__ import annotations

import itertools
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock, current_thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

import numpy as np

from jaxserve.completion import Completion, PartialCompletion
from jaxserve.config import EngineConfig
from jaxserve.errors import EngineDeadError, GenerationError, InvalidRequestError, QueueFullError
from jaxserve.outputs import RequestOutput
from jaxserve.progress import BarProgress, NullProgress, Progress
from jaxserve.prompt import Prompt, PromptTokens, as_prompts, tokenize_prompt
from jaxserve.request import (
    GenerationRequest,
    Pooling,
    SamplingParams,
    ServiceClass,
    ServiceTargets,
)

if TYPE_CHECKING:
    from jaxserve.engine import EngineCore


class ServiceOptions(TypedDict, total=False):
    """How requests are served beside others; see `GenerationRequest` for the meaning and the defaults of each."""

    priority: int
    service_class: ServiceClass
    client: str
    targets: ServiceTargets


class LLM:
    """A model in this process.

    Calls from several threads are safe; they share the engine, so their requests are batched together. The engine
    runs on a thread of its own, only while a call waits for it: Ctrl-C therefore never interrupts it half-way, and
    calls work inside notebooks and running event loops (which they block).

    Use it in a `with` block, or call `close()`, to give the device's memory back.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        config: EngineConfig | None = None,
        progress: bool | Progress = True,
        wait_for_programs: bool = True,
        **options: Any,
    ) -> None:
        """Load a model and compile what it needs.

        Args:
          model: a name ("smollm2"), a Hugging Face directory, a GGUF file or an Orbax store.
          config: engine options; or give them one by one as keywords (`max_model_len=...`), see `EngineConfig`.
          progress: show bars (on stderr), or a function that is told instead.
          wait_for_programs: return when every shape is compiled; otherwise as soon as any step can run, more slowly
            until the rest is there.

        Raises:
          CheckpointError, ConfigError: the model or the options can't be used.
        """
        if config is not None and options:
            raise TypeError("give either config or single options, not both")
        from jaxserve.engine_factory import create_engine

        with _display(progress) as show:
            engine = create_engine(
                str(model),
                config or EngineConfig(**options),
                progress=show,
                wait_for_programs=wait_for_programs,
            )
        self._adopt(engine)

    @classmethod
    def from_engine(cls, engine: EngineCore) -> Self:
        """Wrap an engine that exists already, and own it: nobody else may step it any more."""
        self = cls.__new__(cls)
        self._adopt(engine)
        return self

    def _adopt(self, engine: EngineCore) -> None:
        self._engine = engine
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jaxserve-llm")
        self._routes: dict[str, _Call] = {}  # touched on the worker thread alone, as the engine is
        self._closed = False
        self._closing = Lock()
        self._failed = False
        self._ids = itertools.count()
        self._id_prefix = f"llm-{uuid.uuid4().hex[:12]}"

    @property
    def engine(self) -> EngineCore:
        """The engine: its configuration, tokenizer and statistics. Don't step it."""
        return self._engine

    # -- generation ----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | Progress = True,
        **service: Unpack[ServiceOptions],
    ) -> list[Completion]:
        """Continue prompts; as many at once as the engine can run.

        Args:
          prompts: one or a list; each a text, a list of token ids, ``{"prompt": text}`` or
            ``{"prompt_token_ids": ids}``. Special tokens in a text count as such, and BOS is added where the model
            wants one; token ids are taken as they are.
          params: one for all, or one for each prompt.
          progress: show a bar, or a function that is told.
          service: how all of them are served beside those of other calls.

        Returns:
          One completion for each prompt, in their order.

        Raises:
          InvalidRequestError: a prompt or its parameters can't be honoured (the text says which); nothing has run.
          OverloadedError: one of them can't have its first token in time; all are given up.
          EngineDeadError: the engine has failed or was closed.
        """
        self._require_open()
        inputs = []
        for index, prompt in enumerate(as_prompts(prompts)):
            with _naming(f"prompt {index}"):
                inputs.append(self._tokenize(prompt))
        return self._complete(inputs, params, "prompt", progress, service)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | Progress = True,
        **service: Unpack[ServiceOptions],
    ) -> list[Completion]:
        """Answer conversations: as `generate`, with prompts from the model's chat template.

        Args:
          messages: one conversation (a list of messages), or a list of them.
          add_generation_prompt, continue_final_message, tools, template_kwargs: see `Tokenizer.encode_chat`.
        """
        self._require_open()
        conversations: Sequence[Any] = messages
        if messages and isinstance(messages[0], Mapping):
            conversations = [messages]
        tokenizer = self._engine.tokenizer
        inputs = []
        for index, conversation in enumerate(conversations):
            with _naming(f"conversation {index}"):
                token_ids = tokenizer.encode_chat(
                    conversation,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=tools,
                    template_kwargs=template_kwargs,
                )
            inputs.append(PromptTokens(tokenizer.decode(token_ids, skip_special_tokens=False), token_ids))
        return self._complete(inputs, params, "conversation", progress, service)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **service: Unpack[ServiceOptions]
    ) -> Generator[RequestOutput, None, None]:
        """Continue one prompt piece by piece.

        Yields:
          What is new about one of the n choices at a time; the pieces of a choice joined are its answer. The request
          starts with the first piece asked for, runs only while pieces are asked for, and is aborted when the
          generator is closed or dropped early.

        Raises:
          InvalidRequestError: at once, not with the first piece.
        """
        self._require_open()
        item = self._tokenize(prompt)
        request = self._request(item, params or SamplingParams(), service, stream=True)
        self._engine.validate(request)
        return self._stream(request)

    def _stream(self, request: GenerationRequest) -> Generator[RequestOutput, None, None]:
        call = _Call([request])
        try:
            while not call.done:
                yield from self._advance(call)
        finally:
            self._abandon(call)

    def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "mean",
        progress: bool | Progress = True,
        **service: Unpack[ServiceOptions],
    ) -> np.ndarray:
        """A vector for each text, of the model's hidden states: what `/v1/embeddings` answers.

        Args:
          inputs: one or a list, as the prompts of `generate`.
          pooling: the mean of a text's tokens, or its last token, for models trained so.
          progress, service: as for `generate`.

        Returns:
          float32 [N, D], a row of length 1 for each of the N inputs in their order, D the width of the hidden states.

        Raises:
          InvalidRequestError: an input can't be embedded (the text says which); nothing has run.
          OverloadedError, EngineDeadError: as for `generate`.
          GenerationError: the engine could not finish one.
        """
        self._require_open()
        params = SamplingParams(max_tokens=0, temperature=0.0, pooling=pooling)
        requests = []
        for index, item in enumerate(as_prompts(inputs)):
            with _naming(f"input {index}"):
                request = self._request(self._tokenize(item), params, service, stream=False)
                self._engine.validate(request)
            requests.append(request)
        rows = {request.request_id: row for row, request in enumerate(requests)}
        vectors_ND = np.empty((len(requests), self._engine.model_config.hidden_size), np.float32)

        def take(output: RequestOutput) -> None:
            if output.embedding is None:
                raise GenerationError(output.error or "the request was aborted")
            vectors_ND[rows[output.request_id]] = output.embedding

        if requests:
            self._run(requests, "embedding", progress, take)
        return vectors_ND

    def _complete(
        self,
        inputs: list[PromptTokens],
        params: SamplingParams | Sequence[SamplingParams] | None,
        noun: str,
        progress: bool | Progress,
        service: ServiceOptions,
    ) -> list[Completion]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(inputs)
        elif len(params) != len(inputs):
            raise InvalidRequestError(f"{len(params)} sampling parameters for {len(inputs)} {noun}s")
        requests = []
        for index, (item, own) in enumerate(zip(inputs, params, strict=True)):
            request = self._request(item, own, service, stream=False)
            with _naming(f"{noun} {index}"):
                self._engine.validate(request)
            requests.append(request)
        if not requests:
            return []
        drafts = {
            request.request_id: PartialCompletion(item, request.params.n)
            for item, request in zip(inputs, requests, strict=True)
        }
        started = time.perf_counter()
        self._run(requests, "generating", progress, lambda output: drafts[output.request_id].add(output))
        completions = [draft.complete() for draft in drafts.values()]
        if progress is True:
            _print_rate(completions, time.perf_counter() - started)
        return completions

    def _run(
        self,
        requests: list[GenerationRequest],
        what: str,
        progress: bool | Progress,
        take: Callable[[RequestOutput], None],
    ) -> None:
        """Hand all their outputs to `take`. What has not ended by then, for whatever reason, is aborted."""
        call = _Call(requests)
        try:
            with _display(progress) as show:
                show(what, 0, len(requests))
                while not call.done:
                    for output in self._advance(call):
                        take(output)
                    show(what, len(requests) - len(call.unfinished), len(requests))
        finally:
            self._abandon(call)

    def _tokenize(self, prompt: Prompt) -> PromptTokens:
        return tokenize_prompt(prompt, self._engine.tokenizer, max_tokens=self._engine.max_request_tokens)

    def _request(
        self, item: PromptTokens, params: SamplingParams, service: ServiceOptions, *, stream: bool
    ) -> GenerationRequest:
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"params must be SamplingParams, got {type(params).__name__}")
        return GenerationRequest(
            request_id=f"{self._id_prefix}-{next(self._ids)}",
            prompt_token_ids=tuple(item.token_ids),
            params=params,
            stream=stream,
            **service,
        )

    # -- the engine's thread -------------------------------------------------------------------------------------

    def _advance(self, call: _Call) -> list[RequestOutput]:
        """New outputs of `call`; possibly none yet."""
        return self._on_worker(self._advance_on_worker, call)

    def _abandon(self, call: _Call) -> None:
        """Abort what is unfinished. Returns once it is gone."""
        if call.done or self._closed:
            return
        if current_thread().name.startswith("jaxserve-llm"):  # a dropped generator, collected over there
            self._worker.submit(self._abandon_on_worker, call)
        else:
            self._on_worker(self._abandon_on_worker, call)

    def _on_worker[**P, R](self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        self._require_open()
        try:
            future = self._worker.submit(function, *args, **kwargs)
        except RuntimeError as error:  # shut down by another thread just now
            raise EngineDeadError("this LLM is closed") from error
        return future.result()

    def _advance_on_worker(self, call: _Call) -> list[RequestOutput]:
        self._require_open()
        if self._failed:
            raise EngineDeadError("the engine has failed in an earlier step")
        if not call.inbox:
            self._submit_backlog(call)
            if self._engine.has_work():
                self._step()
            elif not call.inbox:
                raise EngineDeadError("the engine lost a request")
        outputs = list(call.inbox)
        call.inbox.clear()
        return outputs

    def _submit_backlog(self, call: _Call) -> None:
        while call.backlog:
            request = call.backlog[0]
            try:
                self._engine.submit(request)
            except QueueFullError:
                if not self._engine.has_work():
                    raise  # it alone is more than the queue takes
                return
            call.backlog.popleft()
            self._routes[request.request_id] = call

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except BaseException:
            self._failed = True
            raise
        for output in outputs:
            owner = self._routes.get(output.request_id)
            if owner is not None:
                owner.receive(output)
                if output.request_id not in owner.unfinished:
                    del self._routes[output.request_id]

    def _abandon_on_worker(self, call: _Call) -> None:
        call.backlog.clear()
        mine = [request_id for request_id, owner in self._routes.items() if owner is call]
        for request_id in mine:
            del self._routes[request_id]
        if self._failed or self._closed:
            return
        for request_id in mine:
            self._engine.abort(request_id)
        if mine and self._engine.has_work():
            self._step()  # frees their blocks now, not with the next call

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End whatever runs (calls in other threads get EngineDeadError) and release the device's memory. Can be
        called twice."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._worker.submit(self._engine.close).result()
        self._worker.shutdown(wait=True)

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise EngineDeadError("this LLM is closed")


class _Call:
    """One call's requests: not yet submitted, not yet finished, and outputs not yet fetched."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self.backlog = deque(requests)
        self.unfinished = {
            request.request_id: request.params.n for request in requests
        }  # id -> choices still open
        self.inbox: deque[RequestOutput] = deque()

    @property
    def done(self) -> bool:
        return not self.unfinished and not self.inbox

    def receive(self, output: RequestOutput) -> None:
        self.inbox.append(output)
        if output.finish_reason is not None:
            self.unfinished[output.request_id] -= 1
            if not self.unfinished[output.request_id]:
                del self.unfinished[output.request_id]


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Puts the name of the item at fault in front of the error's text."""
    try:
        yield
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{name}: {error}", param=error.param, code=error.code) from error


class _Told(NullProgress):
    """A caller's own function."""

    def __init__(self, function: Progress) -> None:
        self._function = function

    def __call__(self, what: str, done: int, total: int) -> None:
        self._function(what, done, total)


def _display(progress: bool | Progress) -> BarProgress | NullProgress:
    if callable(progress):
        return _Told(progress)
    return BarProgress() if progress else NullProgress()


def _print_rate(completions: Sequence[Completion], seconds: float) -> None:
    prompt = sum(len(item.prompt_token_ids) for item in completions)
    output = sum(len(choice.token_ids) for item in completions for choice in item.choices)
    print(
        f"{len(completions)} prompts ({prompt} tokens), {output} tokens generated in {seconds:.1f} s: "
        f"{output / max(seconds, 1e-9):.0f} tokens/s",
        file=sys.stderr,
    )

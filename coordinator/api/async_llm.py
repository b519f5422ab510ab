"""`AsyncLLM`: many requests at once on one pair, for asyncio. The names are vLLM's.

Every request is a text or several (`n`), and each text waits for a lane of the nodes; who gets the
next free lane is decided in `admission.py`. One event loop uses an `AsyncLLM`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from copy import copy
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

from coordinator.api.admission import Admission, Ticket
from coordinator.api.asking import Asking, Prompt
from coordinator.api.config import SpeculationConfig
from coordinator.api.llm import LLM
from coordinator.api.outputs import RequestOutput
from coordinator.api.pair import Pair
from coordinator.api.params import RequestOutputKind, SamplingParams
from coordinator.api.patience import Patience
from coordinator.api.requests import Request, Step, teller
from coordinator.api.vllm import (
    EngineArgs,
    TargetTokenizer,
    check_arguments,
    no_such_method,
    sampling_params_of,
)
from coordinator.api.vllm_metrics import Metric, Totals
from coordinator.text.stream import WAIT_S, Reader, TokenStream
from proto.errors import (
    AwayError,
    BusyError,
    ClosedError,
    ConfigurationError,
    SlipstreamError,
    TextError,
)

MAX_WAITING = 256  # texts that may wait for a lane


# A text may begin; a text has something new; every request is ended; this one is aborted.
News = Ticket | TokenStream | SlipstreamError | None


class AsyncLLM:
    """A target and a drafter, loaded and warm, that serve many requests of one event loop.

    Takes what `LLM` takes, and

    max_waiting  most texts that may wait for a lane; what would exceed it raises BusyError

    Close it, or use it as a context manager (`with`, also around `async` code). Loading blocks.
    """

    def __init__(self, *args: Any, max_waiting: int = MAX_WAITING, **settings: Any) -> None:
        llm = LLM(*args, **settings)
        self._llm = llm  # it closes the pair when nobody has it any more
        self._begin(llm.pair, llm.asking, max_waiting)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Return an AsyncLLM with these arguments, as vLLM's is made."""
        return cls(**engine_args.settings)

    @classmethod
    def of(cls, pair: Pair, speculation: SpeculationConfig, max_waiting: int = MAX_WAITING) -> Self:
        """Return an AsyncLLM for a pair that runs already; closing it closes the pair."""
        made = cls.__new__(cls)
        made._begin(pair, Asking(pair, speculation), max_waiting)
        return made

    def _begin(self, pair: Pair, asking: Asking, max_waiting: int) -> None:
        self.pair = pair
        self.asking = asking
        self.admission = Admission(pair.num_seqs, max_waiting)
        self._news: dict[str, asyncio.Queue[News]] = {}  # by request id
        self._requests: dict[str, Request] = {}  # by request id
        self._waiting: dict[Ticket, asyncio.Queue[News]] = {}  # who is told when it may begin
        self._patience: Patience | None = None  # with a target that is away; None: it is there
        self._totals = Totals(pair.config.target)
        self._is_closed = False
        self._ended: SlipstreamError | None = None  # what ends every request; None: nothing yet

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Return the ids of the requests that are waiting or running, oldest first."""
        return tuple(self._news)

    @property
    def kv_cache_usage(self) -> float:
        """Return the share of the target's KV cache that running texts take, 0 to 1."""
        num_tokens = sum(request.num_kv_tokens for request in self._requests.values())
        return num_tokens / (self.admission.num_lanes * self.pair.max_len)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: RequestOutputKind | None = None,
        client: str = "",
        **of_vllm: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one prompt, and yield outputs as they come; the last one is `finished`.

        Leaving the loop, or cancelling the task, ends the texts on both nodes, as `abort` does.

        output_kind  what each output holds; None: as the sampling parameters say
        client       whose request it is: free lanes are shared out evenly among clients
        of_vllm      other arguments of vLLM's, such as lora_request: their defaults are accepted

        Raises ConfigurationError, BusyError (the queue is full), AwayError (no target is there),
        ClosedError, NodeError. A text that cannot be completed has the finish_reason "error".
        """
        self._check_open()
        check_arguments("generate", of_vllm)
        request = await asyncio.to_thread(self.asking.request, prompt, sampling_params)
        kind = output_kind or request.output_kind
        outputs = self.answer(request, request_id, output_kind=kind, client=client)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def answer(
        self,
        request: Request,
        request_id: str | None = None,
        *,
        output_kind: RequestOutputKind = RequestOutputKind.DELTA,
        client: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue the prompt of a request from `asking`, and yield outputs, as `generate` does.

        Raises ConfigurationError if another request has this id, and what `generate` raises.
        """
        name = request_id or uuid4().hex
        if name in self._news:
            raise ConfigurationError(f"there is a request with the id {name} already")
        request.request_id = name
        steps = self._steps(request, name, client)
        try:
            async for step in steps:
                if step.is_last:
                    self._totals.ended(step.part)
                if output_kind is RequestOutputKind.DELTA:
                    yield step.part
                elif output_kind is RequestOutputKind.CUMULATIVE:
                    yield request.so_far()
                elif request.is_complete:
                    yield request.whole()
        finally:
            await steps.aclose()

    async def abort(self, request_id: str) -> None:
        """End a request, if it still runs: its texts end with the finish_reason "abort".

        A request id that is not known is ignored.
        """
        if (news := self._news.get(request_id)) is not None:
            news.put_nowait(None)

    def check_alive(self) -> None:
        """Raise the error that ended the pair, if it has ended."""
        self.pair.service.check_alive()

    def end(self, error: SlipstreamError) -> None:
        """End every request that waits or runs with this error, and refuse new ones with it.

        What has come of a text until now is still yielded before the error is raised.
        """
        self._ended = error
        for news in self._news.values():
            news.put_nowait(error)

    async def _steps(self, request: Request, name: str, client: str) -> AsyncGenerator[Step, None]:
        self.check_takes()
        tickets = self.admission.ask(client, request.num_texts)
        if tickets is None:
            most = self.admission.max_waiting
            full = f"the queue is full ({most} texts wait at most); try again later"
            if not self.pair.is_ready:
                raise AwayError(f"the target is started again, and {full}")
            raise BusyError(full)
        news: asyncio.Queue[News] = asyncio.Queue()
        notify = teller(asyncio.get_running_loop(), news.put_nowait)
        reader = Reader(time.monotonic(), notify, name)
        running: dict[TokenStream, Ticket] = {}
        self._news[name] = news
        self._requests[name] = request
        self._waiting.update(dict.fromkeys(tickets, news))
        try:
            self._admit()
            while not request.is_complete:
                match await self._next(news):
                    case Ticket() as ticket:
                        running[request.start(reader)] = ticket
                    case TokenStream() as stream if stream in running:
                        step = await read_step(request, stream)
                        if step is not None and step.is_last:
                            self._leave(running.pop(stream))
                        if step is not None:
                            yield step
                    case SlipstreamError() as error:
                        raise copy(error)  # each raise adds to the traceback of what is raised
                    case None:
                        request.want_no_more()
                        for stream in running:
                            yield request.aborted(stream)
                        return
        finally:
            del self._news[name], self._requests[name]
            for stream in running:
                stream.cancel()
            for ticket in tickets:
                self._waiting.pop(ticket, None)
                self._leave(ticket)

    async def _next(self, news: "asyncio.Queue[News]") -> News:
        """Wait for the next item of news and return it. Raises the error that ended the pair."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_S):
                    return await news.get()
            self.check_alive()
            self._check_away(time.monotonic())
            self._admit()

    def _leave(self, ticket: Ticket) -> None:
        self.admission.leave(ticket)
        self._admit()

    def _admit(self) -> None:
        """Give every free lane to a waiting text, and tell its request that the text may begin.

        Targets may have come or gone since the last time.
        """
        self.admission.num_lanes = self.pair.num_seqs
        while (ticket := self.admission.next()) is not None:
            self._waiting.pop(ticket).put_nowait(ticket)

    def check_ready(self) -> None:
        """Raise AwayError (no target is ready), ClosedError, or the error that ended the pair."""
        self.check_takes()
        if not self.pair.is_ready:
            raise AwayError("the target is away; try again later")

    def check_takes(self) -> None:
        """As `check_ready`, but while a lost target is started again, new requests may wait."""
        self._check_open()
        self.check_alive()
        if self.pair.is_ready:
            self._patience = None
        elif not self.pair.service.awaits_target:
            raise AwayError("the target is away; try again later")

    def _check_away(self, now: float) -> None:
        """Raise AwayError if the target is away, and had nothing new to tell for too long."""
        if self.pair.is_ready:
            self._patience = None
            return
        patience = self._patience or Patience(self.pair.config.start_timeout_s, now)
        self._patience = patience
        if patience.is_over(self.pair.states(), now):
            limit_s = patience.limit_s
            raise AwayError(f"the target has been away for {limit_s:.0f} s; try again later")

    def _check_open(self) -> None:
        if self._ended is not None:
            raise copy(self._ended)
        if self._is_closed:
            raise ClosedError("this AsyncLLM was closed; make a new one")

    def close(self) -> None:
        """End both nodes and every text. May be called twice."""
        self._is_closed = True
        self.pair.close()

    shutdown = close  # vLLM's name

    # -- as vLLM's --------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """True if texts can be asked for: it is open, and no error has ended it."""
        return not self._is_closed and self._ended is None

    async def check_health(self) -> None:
        """Raise what `check_ready` raises, if texts cannot be written now."""
        self.check_ready()

    async def get_tokenizer(self, lora_request: None = None) -> TargetTokenizer:
        """Return the target's tokenizer. Raises ConfigurationError if it has none, ClosedError."""
        self._check_open()
        check_arguments("get_tokenizer", {"lora_request": lora_request})
        return TargetTokenizer(self.pair)

    def get_metrics(self) -> list[Metric]:
        """Return figures of all texts so far under vLLM's names, as `LLM.get_metrics` does."""
        return self._totals.metrics()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters in the model's generation_config.json, else our defaults.

        Raises ModelError, ConfigurationError.
        """
        config = self.pair.config
        return sampling_params_of(config.target, config.target_revision)

    if not TYPE_CHECKING:  # a checker shall find a wrong name before the program runs

        def __getattr__(self, name: str) -> Any:
            """Say what to use in place of a method of vLLM's. Raises AttributeError."""
            raise no_such_method(name, "AsyncLLM")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_closed = True
        self.pair.__exit__(kind, error, trace)


AsyncLLMEngine = AsyncLLM  # vLLM's other name


async def read_step(request: Request, stream: TokenStream) -> Step | None:
    """Return the step that a text's next item makes, or None; a failed text gets its last step."""
    try:
        return await request.read_async(stream)
    except TextError as error:
        return request.failed(stream, error)

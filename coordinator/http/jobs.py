"""One HTTP request: its prompts run at once, and they end when the client goes."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from fastapi import Request

from coordinator.api.async_llm import AsyncLLM
from coordinator.api.outputs import RequestOutput
from coordinator.api.params import RequestOutputKind
from coordinator.api.requests import Request as Asked
from coordinator.http.errors import Refusal, RefusedRequestError
from coordinator.http.figures import Figures
from coordinator.http.guard import CLIENT, OWNER
from coordinator.http.keeping import Answers, Kept
from coordinator.http.request_log import Written
from coordinator.http.told import Told
from coordinator.text.session_events import EmitRead

T = TypeVar("T")


@dataclass(slots=True)
class Job:
    """The texts that one HTTP request asked for, from its arrival until all have ended.

    requests  one for each prompt, with `n` texts each, in the order of their index in the answer
    client    whose request it is; clients share the lanes evenly
    told      what the client has got of the answer already
    keeping   all answers that are kept, and this one; None: it is not kept
    progress  True: parts also tell how far prompts were read
    """

    llm: AsyncLLM
    figures: Figures
    name: str
    requests: list[Asked]
    client: str
    told: Told
    keeping: "tuple[Answers, Kept] | None" = None
    progress: bool = False
    begun: float = field(default_factory=time.monotonic)
    written: Written = field(default_factory=Written)

    @property
    def ids(self) -> set[str]:
        """Return the ids under which the requests run."""
        return {self._id(index) for index in range(len(self.requests))}

    def _id(self, index: int) -> str:
        return f"{self.name}-{index}"

    @property
    def is_kept(self) -> bool:
        """True if the answer is kept, so that its client can ask for it again."""
        return self.keeping is not None

    def _outputs(self, index: int, request: Asked) -> AsyncGenerator[RequestOutput, None]:
        """Return what brings the outputs of a prompt's texts."""
        if self.keeping is None:
            kind = RequestOutputKind.DELTA
            name = self._id(index)
            return self.llm.answer(request, name, output_kind=kind, client=self.client)
        answers, kept = self.keeping
        n = kept.asked.n
        num_told = self.told.tokens[index * n : (index + 1) * n]
        return answers.outputs(kept, index, request, num_told)

    async def parts(self) -> AsyncGenerator[tuple[int, RequestOutput | EmitRead], None]:
        """Start all requests; yield (index of the prompt, new output) as outputs come.

        Where progress is wanted, the output may also be how far that prompt was read.

        Raises SlipstreamError. Leaving the loop early ends every text.
        """
        news: asyncio.Queue[tuple[int, RequestOutput | EmitRead | BaseException | None]]
        news = asyncio.Queue()

        async def follow(index: int, request: Asked) -> None:
            if self.progress:
                request.on_read = lambda read: news.put_nowait((index, read))
            outputs = self._outputs(index, request)
            async with aclosing(outputs):
                async for output in outputs:
                    news.put_nowait((index, output))

        def ended(index: int, task: "asyncio.Task[None]") -> None:
            if not task.cancelled():
                news.put_nowait((index, task.exception()))

        with self._reading():
            tasks = [
                asyncio.create_task(follow(index, request))
                for index, request in enumerate(self.requests)
            ]
            for index, task in enumerate(tasks):
                task.add_done_callback(partial(ended, index))
            async with aclosing(self._came(tasks, news)) as came:
                async for one in came:
                    yield one

    def _reading(self) -> AbstractContextManager[None]:
        """Return what to be inside of while the client reads."""
        if self.keeping is None:
            return nullcontext()
        answers, kept = self.keeping
        return answers.read(kept)

    async def _came(
        self,
        tasks: "list[asyncio.Task[None]]",
        news: "asyncio.Queue[tuple[int, RequestOutput | EmitRead | BaseException | None]]",
    ) -> AsyncGenerator[tuple[int, RequestOutput | EmitRead], None]:
        """Yield what these tasks bring until all have ended, and end them."""
        left = len(tasks)
        try:
            while left:
                index, item = await news.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                    continue
                if isinstance(item, RequestOutput):
                    for made in item.outputs:
                        if not self.is_kept:  # else whoever writes it has counted it
                            self.figures.came(made, self.begun)
                        took_s = time.monotonic() - self.begun
                        self.written.came(len(made.token_ids), made.finish_reason, took_s)
                yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def whole(self) -> list[RequestOutput]:
        """Return each prompt's complete output. Raises SlipstreamError, RefusedRequestError."""
        async with aclosing(self.parts()) as parts:
            async for _ in parts:
                pass
        outputs = [request.whole() for request in self.requests]
        for output in outputs:
            for made in output.outputs:
                if made.error is not None:
                    raise RefusedRequestError(Refusal(500, made.error))
        return outputs


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`; if the client goes, cancel it and raise ClientGoneError."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class ClientGoneError(Exception):
    """The client has closed its connection before the answer was complete."""


def client_of(request: Request) -> str:
    """Return whose request it is, as the guard has found out, for sharing out lanes."""
    return str(request.scope.get("state", {}).get(CLIENT, ""))


def owner_of(request: Request) -> str:
    """Return who may read the answer of this request, as the guard has found out."""
    return str(request.scope.get("state", {}).get(OWNER, ""))

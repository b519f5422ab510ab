"""The answers that `serve --journal` keeps: a task writes each, and clients read it.

An answer is known by the id of its request. Whoever repeats the request reads the same texts. What
is written is noted in the journal, so a coordinator that is started again goes on with it. If no
client reads an answer, it is written no longer (but for those that a restart has taken up, whose
clients may come back), and forgotten after a while.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

from coordinator.api.async_llm import AsyncLLM, read_step
from coordinator.api.outputs import RequestOutput
from coordinator.api.requests import Request, teller
from coordinator.http.errors import mistake_of
from coordinator.http.figures import Figures
from coordinator.journal.ledger import KeptAnswer, KeptText
from coordinator.journal.records import Asked, Gone, Ran, Record, TakenUp
from coordinator.journal.shared import SharedText, check_told
from coordinator.text.stream import Reader, TokenStream
from proto.errors import AwayError, BusyError, ClosedError, NodeError, SlipstreamError

logger = logging.getLogger(__name__)

TICK_S = 1.0
AGAIN_S = 1.0  # until an answer that was taken up asks again for a lane
LOOK_S = 0.02
MOST_UNREAD = 1024  # answers that are kept although nobody reads them
MOST_UNREAD_TOKENS = 1 << 21  # of these, in all
NOT_SAME = {"resume", "stream", "stream_options", "return_token_ids", "return_progress"}
GIVEN_UP = "this request may be what ends the server again and again; ask for something else"


class Notes(Protocol):
    """Where records are noted (`Journal`)."""

    answers: dict[str, KeptAnswer]

    def note(self, record: Record, then: Callable[[], None] | None = None) -> None:
        """Note a record, and call `then` once it is on the disk."""


@dataclass(eq=False, slots=True)
class Kept:
    """An answer that is kept.

    requests      one for each prompt, of which no text was started
    texts         of all prompts, one after another
    is_noted      is set once the request is on the disk
    unread_since  when the last client left (monotonic)
    has_begun     it has been written, here or before
    failure       what has ended the writing; None: nothing, or it was begun again
    """

    asked: Asked
    requests: list[Request]
    texts: list[SharedText]
    begun: float
    is_noted: asyncio.Event
    unread_since: float
    num_readers: int = 0
    has_begun: bool = False
    writing: "asyncio.Task[None] | None" = None
    stopping: "asyncio.Task[None] | None" = None  # has written until now
    failure: SlipstreamError | None = None

    @property
    def is_complete(self) -> bool:
        """True if all its texts have ended."""
        return all(text.is_over for text in self.texts)

    @property
    def num_tokens(self) -> int:
        """Return how many tokens its texts have."""
        return sum(text.num_tokens for text in self.texts)

    def is_same(self, path: str, owner: str, body: Mapping[str, Any]) -> bool:
        """True if this request asks for the same answer."""
        same = self.asked.path == path and self.asked.owner == owner
        return same and _essence(self.asked.body) == _essence(body)

    def of(self, index: int) -> list[SharedText]:
        """Return the texts of a prompt."""
        n = self.asked.n
        return self.texts[index * n : (index + 1) * n]

    def fail(self, error: SlipstreamError) -> None:
        """Tell all readers that the writing has ended."""
        self.failure = error
        for text in self.texts:
            text.fail(error)


@dataclass(slots=True)
class Wanted:
    """A request whose answer is to be kept."""

    name: str
    path: str
    owner: str
    client: str
    body: Mapping[str, Any]
    requests: list[Request]
    written: Sequence[tuple[int, ...]] = field(default_factory=list)


class Answers:
    """The answers of one server that are kept.

    again   returns the requests of an answer that the journal has
    keep_s  how long an answer is kept that nobody reads
    """

    def __init__(
        self,
        llm: AsyncLLM,
        figures: Figures,
        notes: Notes,
        again: Callable[[Asked], list[Request]],
        keep_s: float,
    ) -> None:
        self._llm = llm
        self._figures = figures
        self._notes = notes
        self._again = again
        self._keep_s = keep_s
        self._kept: dict[str, Kept] = {}  # by name, oldest first
        self._ticking: asyncio.Task[None] | None = None

    def find(self, name: str) -> Kept | None:
        """Return the answer with this id."""
        return self._kept.get(name)

    # -- beginning --------------------------------------------------------------------------------

    def begin(self, wanted: Wanted) -> Kept:
        """Note a new request; its texts begin with the first reader."""
        seed = wanted.requests[0].seeded()
        requests = [one.again(seed) for one in wanted.requests]
        asked = Asked(
            name=wanted.name,
            at=time.time(),
            path=wanted.path,
            owner=wanted.owner,
            client=wanted.client,
            body=wanted.body,
            prompts=tuple(one.prompt_ids for one in requests),
            n=requests[0].num_texts,
            seed=seed,
        )
        texts = [KeptText() for _ in range(asked.num_texts)]
        for text, tokens in zip(texts, wanted.written, strict=False):
            text.tokens += tokens
        kept = self._made(asked, requests, texts)
        loop, noted = asyncio.get_running_loop(), kept.is_noted
        self._notes.note(asked, lambda: _tell(loop, noted))
        for record in KeptAnswer(asked, texts).records():
            if record is not asked:
                self._notes.note(record)
        return kept

    def _made(self, asked: Asked, requests: list[Request], texts: Sequence[KeptText]) -> Kept:
        shared = [
            SharedText(
                asked.name,
                number,
                text,
                self._notes.note,
                self._llm.check_alive,
                is_late=not requests[number // asked.n].follows_exactly,
            )
            for number, text in enumerate(texts)
        ]
        now = time.monotonic()
        kept = Kept(asked, requests, shared, now, asyncio.Event(), now)
        self._kept[asked.name] = kept
        return kept

    def start(self) -> int:
        """Take up the answers of the journal; return how many are written on.

        Called in the event loop, before clients come.
        """
        num_running = 0
        for answer in list(self._notes.answers.values()):
            num_running += self._take_up(answer)
        self._ticking = asyncio.create_task(self._tick())
        return num_running

    def _take_up(self, answer: KeptAnswer) -> bool:
        """Go on with an answer of the journal; return whether it is written."""
        asked, line = answer.asked, ""
        try:
            requests = [one.again(asked.seed) for one in self._again(asked)]
            if [one.prompt_ids for one in requests] != list(asked.prompts):
                line = "its prompt is read in another way than before"
        except SlipstreamError as error:
            line = str(error)
        if line:
            logger.warning("the answer %s cannot go on: %s", asked.name, line)
            self._notes.note(Gone(asked.name))
            return False
        # Copies: the journal has its own.
        texts = [
            KeptText(list(text.tokens), list(text.logprobs), text.scored, text.end)
            for text in answer.texts
        ]
        kept = self._made(asked, requests, texts)
        kept.is_noted.set()
        kept.has_begun = True
        for index, request in enumerate(requests):
            self._end_complete(kept, index, request, texts)
        if answer.is_given_up:
            for text in kept.texts:
                if not text.is_over:
                    text.give_up(GIVEN_UP)
        if kept.is_complete or not answer.is_running:
            return False
        self._notes.note(TakenUp(asked.name))
        self._write_on(kept)
        return True

    @staticmethod
    def _end_complete(kept: Kept, index: int, request: Request, texts: Sequence[KeptText]) -> None:
        """End those texts that were complete although the journal does not say so."""
        n = kept.asked.n
        for number in range(index * n, (index + 1) * n):
            text = kept.texts[number]
            if text.is_over:
                continue
            try:
                end = request.reviewed_end(tuple(texts[number].tokens))
            except SlipstreamError as error:
                text.give_up(str(error))
                continue
            if end is not None:
                text.end(end)

    # -- reading ----------------------------------------------------------------------------------

    @contextmanager
    def read(self, kept: Kept) -> Iterator[None]:
        """Have a client read an answer while inside: it is written as long as one does."""
        kept.num_readers += 1
        try:
            if kept.writing is None and not kept.is_complete:
                if kept.has_begun:
                    self._notes.note(Ran(kept.asked.name, is_running=True))
                self._write_on(kept)
            yield
        finally:
            kept.num_readers -= 1
            if not kept.num_readers:
                kept.unread_since = time.monotonic()
                if kept.failure is None and not kept.is_complete:
                    self._stop(kept)

    async def outputs(
        self, kept: Kept, index: int, request: Request, num_told: Sequence[int]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield what comes of the texts of a prompt, behind what was told of each already.

        Raises SlipstreamError, also what has ended the writing.
        """
        await kept.is_noted.wait()
        texts = kept.of(index)
        for text, number in zip(texts, num_told, strict=True):
            while text.num_tokens < number and not text.is_over:
                if kept.failure is not None:
                    raise copy(kept.failure)
                await asyncio.sleep(LOOK_S)
            check_told(number, text)
        if kept.failure is not None:
            raise copy(kept.failure)
        if any(num_told):
            request.resume([text.first(one) for text, one in zip(texts, num_told, strict=True)])
        request.request_id = kept.asked.name
        request.share(texts, writes=False)
        news: asyncio.Queue[TokenStream] = asyncio.Queue()
        notify = teller(asyncio.get_running_loop(), news.put_nowait)
        reader = Reader(time.monotonic(), notify, kept.asked.name)
        streams = {request.start(reader) for _ in range(request.num_texts)}
        try:
            while not request.is_complete:
                stream = await news.get()
                if stream in streams and (step := await read_step(request, stream)) is not None:
                    if step.is_last:
                        streams.remove(stream)
                    yield step.part
        finally:
            for stream in streams:
                stream.cancel()

    # -- writing ----------------------------------------------------------------------------------

    def _write_on(self, kept: Kept) -> None:
        kept.failure = None
        kept.writing = asyncio.create_task(self._write(kept))
        kept.writing.add_done_callback(lambda task: self._written(kept, task))

    def _stop(self, kept: Kept) -> None:
        """End the writing of an answer, which keeps its tokens."""
        if kept.writing is not None:
            kept.writing.cancel()
            kept.stopping, kept.writing = kept.writing, None
            self._notes.note(Ran(kept.asked.name, is_running=False))

    def _written(self, kept: Kept, task: "asyncio.Task[None]") -> None:
        if kept.writing is task:
            kept.writing = None
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, SlipstreamError):
            assert isinstance(error, Exception)
            error = NodeError(mistake_of(error).line)
        kept.fail(error)
        # What the end of this process has kept from beginning is asked for by the next one.
        if not kept.has_begun and not isinstance(error, ClosedError):
            self._forget(kept)

    async def _write(self, kept: Kept) -> None:
        """Write the texts that are not complete. Raises what ends them all."""
        is_again = kept.has_begun
        if kept.stopping is not None:
            await asyncio.wait((kept.stopping,))
        while True:
            try:
                await self._write_once(kept)
            except (BusyError, AwayError):
                if not is_again or kept.num_readers:
                    raise
                await asyncio.sleep(AGAIN_S)
            else:
                return

    async def _write_once(self, kept: Kept) -> None:
        async def follow(index: int, request: Request) -> None:
            name, client = f"{kept.asked.name}-{index}", kept.asked.client
            request.share(kept.of(index), writes=True)
            outputs = self._llm.answer(request, name, client=client)
            async with aclosing(outputs):
                async for output in outputs:
                    kept.has_begun = True
                    for made in output.outputs:
                        self._figures.came(made, kept.begun)

        tasks = [
            asyncio.create_task(follow(index, request.again()))
            for index, request in enumerate(kept.requests)
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- forgetting -------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.forget_old(time.monotonic())

    def forget_old(self, now: float) -> None:
        """Forget answers that nobody has read for long, and the oldest of too many."""
        unread = [one for one in self._kept.values() if not one.num_readers]
        unread.sort(key=lambda one: one.unread_since)
        num_tokens = sum(one.num_tokens for one in unread)
        num_left = len(unread)
        for kept in unread:
            is_old = now - kept.unread_since > self._keep_s
            are_many = num_left > MOST_UNREAD or num_tokens > MOST_UNREAD_TOKENS
            if is_old or (are_many and kept.writing is None):
                self._forget(kept)
                num_left -= 1
                num_tokens -= kept.num_tokens

    def _forget(self, kept: Kept) -> None:
        if kept.writing is not None:
            kept.writing.cancel()
        if self._kept.pop(kept.asked.name, None) is not None:
            self._notes.note(Gone(kept.asked.name))


def _essence(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a request decides its answer."""
    return {name: one for name, one in body.items() if name not in NOT_SAME and one is not None}


def _tell(loop: asyncio.AbstractEventLoop, noted: asyncio.Event) -> None:
    """Set an event of the loop, in another thread."""
    try:
        loop.call_soon_threadsafe(noted.set)
    except RuntimeError:
        logger.debug("a request was noted after the server had ended")

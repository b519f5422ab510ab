"""The routes: they make requests for `AsyncLLM` of HTTP requests, and JSON of the outputs.

The way of a request: a route reads its body (`bodies.py`), `asking.py` (in `coordinator/api`) makes
prompts and sampling parameters of it, a `Job` (`jobs.py`) waits for the texts of `AsyncLLM`
(`async_llm.py`; then `requests.py`, `pair.py`, `Service.submit` and `Router`, which tells the
nodes), and `chat.py` or
`completions.py` make the answer of the outputs, streamed by `streams.py`.

Nothing is decided here about texts. A client that goes ends its texts on both nodes: the task that
reads them is cancelled, whether it streams or not.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import cached_property
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from coordinator.api.async_llm import AsyncLLM
from coordinator.api.chat import has_chat_template
from coordinator.api.reasoning import AUTO, Marks, ParserName, marks_of
from coordinator.api.requests import Request as Asked
from coordinator.api.token_names import TokenNames
from coordinator.api.vllm import TargetTokenizer
from coordinator.cluster.node import Health
from coordinator.http import spellings
from coordinator.http.bodies import (
    ChatBody,
    Common,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from coordinator.http.chat import Chat
from coordinator.http.completions import Completions
from coordinator.http.errors import (
    Refusal,
    RefusedRequestError,
    error_response,
    fault_of,
    mistake_of,
    refusal_of,
)
from coordinator.http.figures import Figures, Nodes
from coordinator.http.jobs import ClientGoneError, Job, client_of, owner_of, unless_gone
from coordinator.http.keeping import Answers, Kept, Notes, Wanted
from coordinator.http.large import Apart, LargeRoute, json_response
from coordinator.http.pages import FILES, page_file
from coordinator.http.request_log import WRITTEN
from coordinator.http.streams import event_stream
from coordinator.http.told import Told
from coordinator.journal.records import Asked as Record
from proto.errors import ConfigurationError, SlipstreamError, shown

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_ID = 128
# What the command `status` tells about this machine, which clients of the server need not know.
KEPT_BACK = ("pid", "host", "listens", "logs")
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": words}
    for status, words in {
        400: "the request cannot work; the message says why",
        401: "the API key is missing or wrong",
        403: "a web page elsewhere, or a wrong host name",
        404: "there is no such model",
        405: "another method; `Allow` names those that there are",
        408: "the request came too slowly",
        413: "the request is too large",
        415: "not JSON",
        429: "the queue is full",
        500: "a text could not be completed",
        503: "the target is away",
    }.items()
}


class Routes:
    """The handlers of one HTTP server, for one running pair.

    model    name of the target in the API
    apart    reads large requests
    most     tokens that a request may ask for; 0: any number
    version  of this software
    reasoning_parser  how the target marks its thoughts
    """

    def __init__(
        self,
        llm: AsyncLLM,
        model: str,
        figures: Figures,
        apart: Apart,
        most: int,
        version: str,
        reasoning_parser: ParserName,
    ) -> None:
        self._llm = llm
        self._model = model
        self._names = {model, llm.pair.config.target}
        self._token_names = TokenNames(llm.pair.tokenization)
        self._figures = figures
        self._most = most
        self._version = version
        self._reasoning_parser = reasoning_parser
        self._since = int(time.time())
        self._apart = apart
        self.answers: Answers | None = None  # those that are kept; None: none is

    # -- texts ------------------------------------------------------------------------------------

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Continue one prompt or several. Raises RefusedRequestError, SlipstreamError."""
        self._check(body)
        run = self._apart.run_waiting if body.wants_form else self._apart.run
        name = name_of(request, "cmpl")
        if (kept := await self._kept(name, request)) is None:
            asked = await run(request, self._completions_asked, body)
            job = await self._job(name, asked, body, request)
        else:
            job = self._job_of(kept, body, request)
        return await self._respond(self._completions(job, body), body, request)

    def _completions(self, job: Job, body: CompletionBody) -> Completions:
        echoes = self._echoes(job.requests) if body.echo else []
        return Completions(job, body, self._model, self._token_names, echoes)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answer a conversation with the target's chat template.

        Raises RefusedRequestError, SlipstreamError.
        """
        self._check(body)
        run = self._apart.run_waiting if body.wants_form else self._apart.run
        name = name_of(request, "chatcmpl")
        if (kept := await self._kept(name, request)) is None:
            asked = await run(request, self._chat_asked, body)
            job = await self._job(name, asked, body, request)
        else:
            job = self._job_of(kept, body, request)
        return await self._respond(Chat(job, body, self._model, self._token_names), body, request)

    async def completion_again(self, name: str, request: Request) -> Response:
        """Return the answer of a completion that is kept, or a stream of what follows.

        Raises RefusedRequestError, SlipstreamError.
        """
        kept, body = self._again(name, COMPLETIONS, request), CompletionBody
        wanted = body.model_validate({**kept.asked.body, "stream": wants_stream(request)})
        job = self._job_of(kept, wanted, request)
        return await self._respond(self._completions(job, wanted), wanted, request)

    async def chat_again(self, name: str, request: Request) -> Response:
        """Return the answer of a conversation that is kept, or a stream of what follows.

        Raises RefusedRequestError, SlipstreamError.
        """
        kept = self._again(name, CHAT, request)
        body = ChatBody.model_validate({**kept.asked.body, "stream": wants_stream(request)})
        job = self._job_of(kept, body, request)
        return await self._respond(Chat(job, body, self._model, self._token_names), body, request)

    def _completions_asked(self, body: CompletionBody) -> list[Asked]:
        """Return the requests for the prompts."""
        resume, prompts = body.resumed(), body.prompts()
        if resume is not None and len(prompts) != 1:
            raise ConfigurationError(f"resume goes with one prompt, not with {len(prompts)}")
        if resume is not None and resume.prompt_token_ids is not None:
            prompts = [list(resume.prompt_token_ids)]
        asked = self._llm.asking.requests(
            prompts,
            body.params(self._most),
            body.speculation(self._llm.asking),
            add_special_tokens=body.add_special_tokens is not False,
        )
        self._check_room(asked, body)
        _watch(asked, body)
        return asked

    def _chat_asked(self, body: ChatBody) -> list[Asked]:
        """Return the request for a conversation."""
        resume = body.resumed()
        how = body.params(self._most), body.speculation(self._llm.asking)
        if resume is not None and resume.prompt_token_ids is not None:
            asked = self._llm.asking.requests([list(resume.prompt_token_ids)], *how)
        else:
            asked = self._llm.asking.chat_requests(
                body.conversation(), *how, body.arguments(), body.prompt_form()
            )
        self._check_room(asked, body)
        _watch(asked, body)
        self._expect(asked, body)
        return asked

    def _check_room(self, asked: Sequence[Asked], body: Common) -> None:
        """Raise ConfigurationError if a request states more tokens for an answer than fit."""
        if body.stated_length is None:
            return
        name, stated = body.stated_length
        num_prompt = max((len(one.prompt_ids) for one in asked), default=0)
        room = self._llm.pair.max_len - num_prompt
        if stated > room:
            raise ConfigurationError(
                f"{name} is {stated}, but behind {num_prompt} tokens of prompt there is room for "
                f"{room}; ask for fewer"
            )

    async def _respond(
        self, answer: "Completions | Chat", body: CompletionBody | ChatBody, request: Request
    ) -> Response:
        headers = {"X-Request-ID": answer.job.name}
        answer.job.progress = body.wants_progress
        if not body.stream:
            whole = await unless_gone(request, answer.job.whole())
            if body.logprobs is None or body.logprobs is False:
                return JSONResponse(answer.whole(whole), headers=headers)
            # Those of all tokens may be millions of numbers.
            return await asyncio.to_thread(lambda: json_response(answer.whole(whole), headers))
        events = answer.events()
        # The first event is waited for here: what is refused at once has a status of its own.
        first = await unless_gone(request, _first(events))
        return StreamingResponse(
            event_stream(first, events), media_type="text/event-stream", headers=headers
        )

    def _check(self, body: Common) -> None:
        """Raise RefusedRequestError for another model, SlipstreamError if no text can be queued."""
        self._check_model(body.model or self._model)
        self._llm.check_takes()

    def _check_model(self, name: str) -> None:
        """Raise RefusedRequestError if it is the name of another model than the one served."""
        if name not in self._names:
            line = f"there is no model {shown(name)} here; this one is {self._model}"
            raise RefusedRequestError(Refusal(404, line, "model_not_found"))

    # -- answers that are kept --------------------------------------------------------------------

    def keep(self, notes: Notes, keep_s: float) -> Answers:
        """Keep all answers from now on; return them. Called before clients come."""
        self.answers = Answers(self._llm, self._figures, notes, self._asked_again, keep_s)
        return self.answers

    def _asked_again(self, asked: Record) -> list[Asked]:
        """Return the requests that an answer was made of."""
        if asked.path == COMPLETIONS:
            return self._completions_asked(CompletionBody.model_validate(asked.body))
        # A template may say what day it is: the prompt is what it was.
        given = {"prompt_token_ids": asked.prompts[0], "token_ids": []}
        return self._chat_asked(ChatBody.model_validate({**asked.body, "resume": given}))

    async def _kept(self, name: str, request: Request) -> Kept | None:
        """Return the answer that is kept of a request with this id; None: it is a new one.

        Raises ConfigurationError if another request has the id.
        """
        if self.answers is None:
            return None
        raw = await request.json()
        kept, owner = self.answers.find(name), owner_of(request)
        if kept is not None and not kept.is_same(request.url.path, owner, raw):
            raise ConfigurationError(f"there is another request with the id {shown(name)}")
        return kept

    def _again(self, name: str, path: str, request: Request) -> Kept:
        """Return an answer that is kept. Raises RefusedRequestError, SlipstreamError."""
        self._llm.check_takes()
        kept = None if self.answers is None else self.answers.find(name)
        if kept is None or kept.asked.path != path or kept.asked.owner != owner_of(request):
            why = "" if self.answers is not None else "; the server was started without --journal"
            line = f"no answer with the id {shown(name)} is kept here{why}"
            raise RefusedRequestError(Refusal(404, line))
        return kept

    async def _job(self, name: str, asked: list[Asked], body: Common, request: Request) -> Job:
        """Return the job of a new request. Raises ConfigurationError."""
        resume = body.resumed()
        if resume is not None:
            asked[0].resume(resume.written())
        if self.answers is None:
            job = Job(self._llm, self._figures, name, asked, client_of(request), _told(asked))
            if not job.ids.isdisjoint(self._llm.request_ids):
                raise ConfigurationError(f"there is a request with the id {name} already")
            return self._counted(job, request)
        client, owner = client_of(request), owner_of(request)
        written = () if resume is None else resume.written()
        wanted = Wanted(name, request.url.path, owner, client, await request.json(), asked, written)
        if (kept := await self._kept(name, request)) is not None:  # it came twice at once
            return self._job_of(kept, body, request)
        if last_event_of(request) and not asked[0].has_seed:
            raise ConfigurationError(
                f"no answer with the id {shown(name)} is kept here, and without a seed the same "
                "text cannot be written again"
            )
        return self._job_of(self.answers.begin(wanted), body, request)

    def _job_of(self, kept: Kept, body: Common, request: Request) -> Job:
        """Return the job of a client that reads an answer that is kept."""
        assert self.answers is not None
        num_texts = kept.asked.num_texts
        if not body.stream:
            told = Told.nothing(num_texts)
        elif event := last_event_of(request):
            told = Told.read(event, num_texts)
        elif (resume := body.resumed()) is not None:
            told = Told.behind([len(one) for one in resume.written()], num_texts)
        else:
            told = Told.nothing(num_texts)
        requests = [one.again() for one in kept.requests]
        client, keeping = client_of(request), (self.answers, kept)
        job = Job(self._llm, self._figures, kept.asked.name, requests, client, told, keeping)
        return self._counted(job, request)

    def _counted(self, job: Job, request: Request) -> Job:
        job.written.prompt_tokens = sum(len(one.prompt_ids) for one in job.requests)
        request.scope.setdefault("state", {})[WRITTEN] = job.written
        return job

    def _expect(self, asked: Sequence[Asked], body: ChatBody) -> None:
        """Prepare the texts of answers that may have thoughts and calls. Raises ModelError."""
        marks = self._marks
        names = [] if marks is None else [marks.opening, marks.closing]
        if body.asked_tools().choice == "auto":
            names += spellings.NAMES
        continued = body.conversation()[-1]["content"] if body.continue_final_message else ""
        shown = [name for name in names if name in self._special]
        for one in asked:
            prompt = one.prompt or ""
            # That of an answer that goes on may be known by its ids alone.
            if one.prompt is None and marks is not None:
                prompt = self._token_names.echo(None, one.prompt_ids)[0]
            one.expect(marks, shown, continued or "", prompt)

    @cached_property
    def _marks(self) -> Marks | None:
        """Return how the target marks its thoughts; None: it has none. Raises ModelError."""
        sources = self._llm.pair.chat_template.sources.values()
        return marks_of(self._reasoning_parser, " ".join(sources))

    @cached_property
    def _special(self) -> frozenset[str]:
        """Return the names of the target's special tokens."""
        tokenization = self._llm.pair.tokenization
        return frozenset(() if tokenization is None else tokenization.special_names)

    def _echoes(self, requests: Sequence[Asked]) -> list[tuple[str, list[int]]]:
        """Return the text of each prompt, and where each of its tokens begins in it."""
        return [self._token_names.echo(one.prompt, one.prompt_ids) for one in requests]

    # -- the rest ---------------------------------------------------------------------------------

    async def models(self) -> dict[str, Any]:
        """Return the list of models: the one that is served."""
        return {"object": "list", "data": [self._served()]}

    async def one_model(self, name: str) -> dict[str, Any]:
        """Return the model that is served. Raises RefusedRequestError for another one."""
        self._check_model(name)
        return self._served()

    def _served(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._since,
            "owned_by": "slipstream",
            "root": self._model,
            "parent": None,
            "max_model_len": self._llm.pair.max_len,
            "has_chat_template": has_chat_template(self._llm.pair),
        }

    async def tokenize(self, body: TokenizeBody, request: Request) -> Response:
        """Return token ids of a text, or of a conversation as the chat route reads it.

        Raises ConfigurationError, ModelError, BusyError, RefusedRequestError.
        """
        self._check_model(body.model or self._model)
        return await self._apart.run(request, self._tokenized, body)

    def _tokenized(self, body: TokenizeBody) -> Response:
        pair = self._llm.pair
        if (body.prompt is None) == (body.messages is None):
            raise ConfigurationError("give either prompt or messages")
        if body.prompt is not None:
            tokenizer = TargetTokenizer(pair)
            ids = tokenizer.encode(
                body.prompt, add_special_tokens=body.add_special_tokens is not False
            )
        else:
            body.asked_tools()  # what the chat route refuses is refused here
            form = body.prompt_form()
            ids = list(pair.encode_chat(body.conversation(), body.arguments(), form)[1])
        made = {"count": len(ids), "max_model_len": pair.max_len, "tokens": ids}
        if body.return_token_strs:
            made["token_strs"] = TargetTokenizer(pair).convert_ids_to_tokens(ids)
        return json_response(made)

    async def detokenize(self, body: DetokenizeBody, request: Request) -> Response:
        """Return the text of token ids.

        Raises ConfigurationError if there is no tokenizer, BusyError, RefusedRequestError.
        """
        self._check_model(body.model or self._model)
        return await self._apart.run(request, self._detokenized, body)

    def _detokenized(self, body: DetokenizeBody) -> Response:
        return json_response({"prompt": TargetTokenizer(self._llm.pair).decode(body.tokens)})

    async def health(self) -> Response:
        """Answer 200 if texts can be written now. Raises AwayError, ClosedError, NodeError."""
        self._llm.check_ready()
        return Response()

    async def status(self) -> dict[str, Any]:
        """Return the state of the coordinator, its nodes and links, as `status` shows it."""
        # In a thread of its own: where the coordinator's loop hangs, this takes two seconds.
        found = await asyncio.to_thread(self._llm.pair.service.status)
        told = _for_clients(found)
        if "nodes" in told:
            told["nodes"] = [_for_clients(node) for node in told["nodes"]]
        return told

    async def version(self) -> dict[str, str]:
        """Return the version of this software."""
        return {"version": self._version}

    async def metrics(self) -> Response:
        """Return all figures in Prometheus' text format."""
        service = self._llm.pair.service
        registry = service.registry
        trips = {registry.name(node): node.round_trips.now_s for node in registry.present}
        nodes = Nodes(
            [node.role for node in registry.nodes if node.health is Health.READY],
            service.restarts,
            registry.losses,
            {name: seconds for name, seconds in trips.items() if seconds is not None},
        )
        admission = self._llm.admission
        text = self._figures.text(
            num_running=admission.num_running,
            num_waiting=admission.num_waiting,
            num_lanes=self._llm.pair.num_seqs,
            max_len=self._llm.pair.max_len,
            kv_cache_usage=self._llm.kv_cache_usage,
            nodes=nodes,
        )
        return Response(text, media_type=self._figures.content_type)


def _for_clients(state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a state that clients are told; of a model's folder only the last part."""
    told = {name: value for name, value in state.items() if name not in KEPT_BACK}
    if "model" in told:
        told["model"] = told["model"].rstrip("/").rpartition("/")[2]
    return told


def _watch(asked: Sequence[Asked], body: Common) -> None:
    """Let the texts tell of their speculation, if the request wants it."""
    if body.wants_events:
        for one in asked:
            one.watch()


def _told(asked: Sequence[Asked]) -> Told:
    """Return what was told elsewhere of the texts of these requests."""
    numbers = [one.num_resumed_of(index) for one in asked for index in range(one.num_texts)]
    return Told.behind(numbers, len(numbers))


async def _first(events: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any] | None:
    """Return the first event; None: there is none."""
    return await anext(events, None)


def name_of(request: Request, prefix: str) -> str:
    """Return the id of a request: the one that it brings, or a new one."""
    given = request.headers.get("x-request-id", "")
    is_name = 0 < len(given) <= MAX_ID and given.isascii() and given.isprintable()
    return given if is_name else f"{prefix}-{uuid4().hex}"


def last_event_of(request: Request) -> str:
    """Return the id of the last event that a client has got, as it says; "": it says none."""
    given = request.headers.get("last-event-id", "")
    return given or request.query_params.get("starting_after", "")


def wants_stream(request: Request) -> bool:
    """True if a client that asks again for an answer wants a stream of it."""
    stream = request.query_params.get("stream", "").lower()
    return stream == "true" or (stream != "false" and bool(last_event_of(request)))


# -- app -------------------------------------------------------------------------------------------


def make_app(
    llm: AsyncLLM,
    model: str,
    figures: Figures,
    *,
    most: int = 0,
    version: str = "",
    reasoning_parser: ParserName = AUTO,
) -> FastAPI:
    """Return the application: the routes and error handlers, without the guard in front of them."""
    app = FastAPI(title="Slipstream", version=version or "?", docs_url=None, redoc_url=None)
    app.router.route_class = LargeRoute
    app.state.apart = apart = Apart()
    app.state.routes = routes = Routes(llm, model, figures, apart, most, version, reasoning_parser)
    _add_routes(app, routes)

    def answered(refusal: Refusal) -> JSONResponse:
        figures.refused(refusal.status)
        return error_response(refusal)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return answered(Refusal(400, fault_of(error.errors(), error.body)))

    @app.exception_handler(SlipstreamError)
    async def ours(_: Request, error: SlipstreamError) -> JSONResponse:
        return answered(refusal_of(error))

    @app.exception_handler(RefusedRequestError)
    async def refused(_: Request, error: RefusedRequestError) -> JSONResponse:
        return answered(error.refusal)

    @app.exception_handler(ClientGoneError)
    async def gone(_: Request, __: ClientGoneError) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def mistaken(_: Request, error: Exception) -> JSONResponse:
        return answered(mistake_of(error))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        line = str(error.detail)
        if error.status_code == 404:
            line = f"there is no {request.url.path} here"
        return answered(Refusal(error.status_code, line, headers=dict(error.headers or {})))

    return app


def _add_routes(app: FastAPI, routes: Routes) -> None:
    """Add the routes of the API, and the page with its files."""
    handlers: dict[str, tuple[str, Callable[..., Any]]] = {
        COMPLETIONS: ("POST", routes.completions),
        CHAT: ("POST", routes.chat),
        # Ids may have slashes.
        f"{COMPLETIONS}/{{name:path}}": ("GET", routes.completion_again),
        f"{CHAT}/{{name:path}}": ("GET", routes.chat_again),
        "/tokenize": ("POST", routes.tokenize),
        "/detokenize": ("POST", routes.detokenize),
        "/v1/models": ("GET", routes.models),
        "/v1/models/{name:path}": ("GET", routes.one_model),  # a name may have slashes
        "/health": ("GET", routes.health),
        "/metrics": ("GET", routes.metrics),
        "/version": ("GET", routes.version),
        "/status": ("GET", routes.status),
    }
    forms: dict[str, type[Response]] = {"/health": Response, "/metrics": PlainTextResponse}
    for path, (method, handler) in handlers.items():
        app.add_api_route(
            path,
            handler,
            methods=[method],
            responses=ERRORS,
            response_model=None,
            response_class=forms.get(path, JSONResponse),
        )

    async def page(request: Request) -> Response:
        return page_file(request.url.path)

    for path in FILES:
        app.add_route(path, page, methods=["GET"])

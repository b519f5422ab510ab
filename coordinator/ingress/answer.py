"""One answer, wherever it is written (pure).

Theory of operation
-------------------
With a seed the tokens of an answer follow from its request. So an answer that one server has begun
goes on at another one, if that gets the very same request and the tokens so far (`resume`):

    asked()        what the next server is asked
    heard(event)   an event of its stream -> the event as the client gets it; None: nothing for it
    broke()        the stream has broken off; `asked` says what to ask another server

The client sees one stream: the name and time of the first server's chunks, and each token once. Of
a choice that is complete (where `n` is above 1), the next server only tells why it has ended; the
client knows, so that is left out.

An answer to several prompts cannot go on elsewhere, and one that does not stream is asked for anew.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

Json = dict[str, Any]

LOST = 503  # the status in an event that says that a server ends
HEAD = ("id", "created")  # fields of a chunk that stay those of the first server


class _Resume(BaseModel):
    """What a request brings of an answer that was begun before."""

    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | list[list[int]]


class _StreamOptions(BaseModel):
    include_usage: bool = False


class Wanted(BaseModel):
    """What of a request matters here, read as the servers read it. Raises ValidationError."""

    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    seed: int | None = None
    return_token_ids: bool | None = None
    prompt: Any = None
    resume: _Resume | None = None

    @property
    def num_texts(self) -> int:
        """Return how many choices the answer has."""
        return max(1, self.n or 1)

    @property
    def has_one_prompt(self) -> bool:
        """True unless the request is for texts behind several prompts."""
        several = isinstance(self.prompt, list) and len(self.prompt) > 1
        return not (several and isinstance(self.prompt[0], str | list))

    def before(self) -> list[list[int]]:
        """Return the tokens of each choice that the request itself brings."""
        given: list[Any] = self.resume.token_ids if self.resume else []
        lists = given if given and isinstance(given[0], list) else [given]
        return [*lists, *([] for _ in range(self.num_texts - len(lists)))]


class Answer:
    """The answer to a request of /v1/completions or /v1/chat/completions.

    streams     the client wants a stream
    has_begun   the client has got something that a second server would say otherwise
    num_tokens  how many tokens have come
    """

    def __init__(self, body: Mapping[str, Any], seed: int) -> None:
        """Take the request; `seed` is used if it has none. Raises ValidationError."""
        self._wanted = Wanted.model_validate(body)
        self.streams = bool(self._wanted.stream)
        self.may_move = self._wanted.has_one_prompt
        self.has_begun = False
        self.num_tokens = 0
        self._body = dict(body)
        if self._wanted.seed is None:
            self._body["seed"] = seed
        if self.streams:
            self._body["return_token_ids"] = True
        self._tells_ids = bool(self._wanted.return_token_ids)
        self._before = self._wanted.before()
        given = self._wanted.resume
        self._prompt_ids: list[int] = list(given.prompt_token_ids or ()) if given else []
        self._head: Json = {}
        self._ids: defaultdict[int, list[int]] = defaultdict(list)  # by choice, of this answer
        self._told: set[int] = set()  # choices that have had a chunk
        self._complete: set[int] = set()  # choices whose end the client has seen
        self._left_out: set[int] = set()  # choices that were complete when a stream broke off

    @property
    def is_whole(self) -> bool:
        """True if the client has got everything but the mark of the end."""
        options = self._wanted.stream_options
        owes_usage = options is not None and options.include_usage
        return len(self._complete) >= self._wanted.num_texts and not owes_usage

    def asked(self) -> Json:
        """Return the body of the request to the next server."""
        if not any(self._ids.values()):
            return self._body
        lists = [self._written(index) for index in range(self._wanted.num_texts)]
        resume: Json = {"token_ids": lists if len(lists) > 1 else lists[0]}
        if self._prompt_ids:
            resume["prompt_token_ids"] = self._prompt_ids
        return {**self._body, "resume": resume}

    def _written(self, index: int) -> list[int]:
        """Return the tokens of a choice so far, those before this answer included."""
        return [*self._before[index], *self._ids[index]]

    def broke(self) -> None:
        """Note that the stream has broken off."""
        self._left_out = set(self._complete)

    def heard(self, event: Json) -> Json | None:
        """Note an event of the stream; return it as the client gets it, None if it gets none."""
        if "choices" not in event:
            return event
        if "prompt_progress" in event and self.has_begun:
            return None  # another server reads the prompt
        self._head = self._head or {name: event[name] for name in HEAD if name in event}
        self._note_prompt(event)
        choices = [self._note(choice) for choice in event["choices"] if self._is_new(choice)]
        if event["choices"] and not choices:
            return None
        self.has_begun = self.has_begun or bool(choices)
        told = {**event, **self._head, "choices": choices}
        if not self._tells_ids:
            told.pop("prompt_token_ids", None)
        return told

    def _is_new(self, choice: Json) -> bool:
        """Return False for what the client has seen: a complete choice, or a choice's beginning."""
        index = choice["index"]
        is_beginning = "role" in choice.get("delta", {}) and not choice.get("token_ids")
        return index not in self._left_out and not (is_beginning and index in self._told)

    def _note_prompt(self, event: Json) -> None:
        if not self._prompt_ids:
            said = (event, *event["choices"])
            found = next(
                (one["prompt_token_ids"] for one in said if one.get("prompt_token_ids")), ()
            )
            self._prompt_ids = list(found)

    def _note(self, choice: Json) -> Json:
        """Note a part of a choice; return it as the client gets it."""
        index, ids = choice["index"], choice.get("token_ids") or []
        self._told.add(index)
        self._ids[index] += ids
        self.num_tokens += len(ids)
        if choice.get("finish_reason") is not None:
            self._complete.add(index)
        if self._tells_ids:
            return choice
        return {
            key: one for key, one in choice.items() if key not in ("token_ids", "prompt_token_ids")
        }


def says_it_ends(event: Json) -> bool:
    """True if an event says that its server ends, so that another one is to be asked."""
    error = event.get("error")
    return "choices" not in event and isinstance(error, dict) and error.get("status") == LOST

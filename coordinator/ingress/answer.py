"""One answer, wherever it is written (pure).

Theory of operation
-------------------
With a seed the tokens of an answer follow from its request. So an answer that one server has begun
goes on at another one, if that gets the very same request and the tokens so far (`resume`):

    asked()        what the next server is asked
    heard(event)   an event of its stream -> the event as the client gets it; None: nothing for it
    broke()        the server is lost; `asked` says what to ask another one

The client sees one stream: the name and time of the first server's chunks, and each token once. A
choice that is complete (where `n` is above 1) is asked for anew with the others, because no server
goes on behind its end; what comes of it is left out.

An answer to several prompts cannot go on elsewhere, and one that does not stream is asked for anew.
"""

from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

Json = dict[str, Any]

LOST = 503  # the status in an event that says that a server ends
HEAD = ("id", "created")  # fields of a chunk that stay those of the first server


class Answer:
    """The answer to a request of /v1/completions or /v1/chat/completions.

    streams    the client wants a stream
    has_begun  the client has got something that a second server would say otherwise
    """

    def __init__(self, body: Mapping[str, Any], seed: int) -> None:
        """Take the request; `seed` is used if it has none."""
        self.streams = body.get("stream") is True
        self.has_begun = False
        self._tells_ids = body.get("return_token_ids") is True
        self._body = dict(body)
        if self._body.get("seed") is None:
            self._body["seed"] = seed
        if self.streams:
            self._body["return_token_ids"] = True
        prompt = body.get("prompt")
        is_list = isinstance(prompt, list) and len(prompt) > 1
        self.may_move = not (is_list and isinstance(prompt[0], str | list))  # type: ignore[index]
        num_texts = body.get("n")
        self._num_texts = num_texts if isinstance(num_texts, int) and num_texts > 0 else 1
        given = body.get("resume")
        self._given: Json | None = given if isinstance(given, dict) else None
        self._head: Json = {}
        self._prompt_ids: list[int] = []
        self._ids: defaultdict[int, list[int]] = defaultdict(list)  # by choice, of this answer
        self._told: set[int] = set()  # choices that have had a chunk
        self._complete: set[int] = set()  # choices whose end the client has seen
        self._left_out: set[int] = set()  # choices that were complete when a server was lost

    def asked(self) -> Json:
        """Return the body of the request to the next server."""
        if not any(self._ids.values()):
            return self._body
        lists = [self._written(index) for index in range(self._num_texts)]
        resume: Json = {"token_ids": lists if len(lists) > 1 else lists[0]}
        if self._prompt_ids:
            resume["prompt_token_ids"] = self._prompt_ids
        return {**self._body, "resume": resume}

    def _written(self, index: int) -> list[int]:
        """Return the tokens of a choice so far, those before this answer included."""
        if index in self._left_out:
            return []
        return [*self._before(index), *self._ids[index]]

    def _before(self, index: int) -> list[int]:
        """Return the tokens that the request itself brings of a choice."""
        given: Any = self._given.get("token_ids") if self._given else None
        if not isinstance(given, list):
            return []
        if self._num_texts > 1:
            given = given[index] if index < len(given) else []
        return given if isinstance(given, list) else []

    def broke(self) -> None:
        """Note that the server is lost."""
        self._left_out = set(self._complete)

    def heard(self, event: Json) -> Json | None:
        """Note an event of the stream; return it as the client gets it, None if it gets none."""
        told = deepcopy(event)
        if "choices" not in told:
            return told
        self._head = self._head or {name: told[name] for name in HEAD if name in told}
        told |= self._head
        self._note_prompt(told)
        choices = [choice for choice in told["choices"] if self._is_new(choice)]
        if told["choices"] and not choices:
            return None
        self.has_begun = self.has_begun or bool(choices)
        told["choices"] = choices
        for choice in choices:
            self._note(choice)
        return told

    def _is_new(self, choice: Json) -> bool:
        """Return False for what the client has seen: a complete choice, or a choice's beginning."""
        index = choice["index"]
        is_beginning = "role" in choice.get("delta", {}) and not choice.get("token_ids")
        return index not in self._left_out and not (is_beginning and index in self._told)

    def _note_prompt(self, told: Json) -> None:
        found = told.get("prompt_token_ids")
        if not self._tells_ids:
            told.pop("prompt_token_ids", None)
        for choice in told["choices"]:
            found = choice.get("prompt_token_ids") or found
            if not self._tells_ids:
                choice.pop("prompt_token_ids", None)
        self._prompt_ids = self._prompt_ids or list(found or ())

    def _note(self, choice: Json) -> None:
        index = choice["index"]
        self._told.add(index)
        self._ids[index] += choice.get("token_ids") or []
        if choice.get("finish_reason") is not None:
            self._complete.add(index)
        if not self._tells_ids:
            choice.pop("token_ids", None)


def says_it_ends(event: Json) -> bool:
    """True if an event says that its server ends, so that another one is to be asked."""
    error = event.get("error")
    return "choices" not in event and isinstance(error, dict) and error.get("status") == LOST

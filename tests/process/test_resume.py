"""An answer that was begun goes on at another server: the rest is what would have come."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from coordinator.api.pair import Pair
from tests.process.served import Served, serving

pytestmark = pytest.mark.process

PROMPT = "def read_lines(path):\n    "
CHAT = [{"role": "user", "content": "Write a loop."}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 7},
    "penalties": {
        "temperature": 0.8,
        "seed": 7,
        "presence_penalty": 0.9,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.2,
    },
    "fewest": {"temperature": 0.8, "seed": 3, "min_tokens": 30, "ignore_eos": False},
    "two": {"temperature": 0.8, "seed": 7, "n": 2},
    "logprobs": {"temperature": 0.8, "seed": 7, "logprobs": 2},
    "pattern": {"temperature": 0.8, "seed": 5, "structured_outputs": {"regex": "(ab|c d){4,20}"}},
    "echo": {"temperature": 0.8, "seed": 7, "echo": True},
}


@pytest.fixture(scope="module")
def server(embedded: Pair) -> Iterator[Served]:
    with serving(embedded) as served:
        yield served


class Read:
    """What the chunks of a stream have said, by choice: ids, text, logprobs, its reason."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = defaultdict(list)
        self.text: dict[int, str] = defaultdict(str)
        self.logprobs: dict[int, list[float]] = defaultdict(list)
        self.offsets: dict[int, list[int]] = defaultdict(list)
        self.reason: dict[int, str] = {}
        self.prompt_ids: list[int] = []

    def add(self, chunk: dict[str, Any]) -> "Read":
        """One more."""
        self.prompt_ids = chunk.get("prompt_token_ids") or self.prompt_ids
        for choice in chunk["choices"]:
            index = choice["index"]
            self.prompt_ids = choice.get("prompt_token_ids") or self.prompt_ids
            self.ids[index] += choice.get("token_ids", [])
            told = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            self.text[index] += told
            if probs := choice.get("logprobs"):
                self.logprobs[index] += probs["token_logprobs"]
                self.offsets[index] += probs["text_offset"]
            if choice["finish_reason"] is not None:
                self.reason[index] = choice["finish_reason"]
        return self


def read(chunks: list[dict[str, Any]]) -> Read:
    found = Read()
    for chunk in chunks:
        found.add(chunk)
    return found


def resumed(
    server: Served, path: str, body: dict[str, Any], chunks: list[dict[str, Any]], cut: int
) -> tuple[Read, Read]:
    """What came until the cut, and what another request sends of the rest."""
    before = read(chunks[:cut])
    lists = [before.ids[index] for index in range(body.get("n", 1))]
    resume = {
        "prompt_token_ids": before.prompt_ids,
        "token_ids": lists if len(lists) > 1 else lists[0],
    }
    return before, read(server.events(path, **body, resume=resume))


def check_every_cut(server: Served, path: str, body: dict[str, Any]) -> None:
    """A stream is cut behind some of its chunks, and the rest is what it would have been."""
    body = {**body, "return_token_ids": True}
    chunks = server.events(path, **body)
    whole = read(chunks)
    assert whole.prompt_ids
    is_last = [any(one["finish_reason"] for one in chunk["choices"]) for chunk in chunks]
    end = is_last.index(True)  # the tokens of this text have come before
    for cut in {1, 2, end // 3, end // 2, end - 1, end}:
        before, rest = resumed(server, path, body, chunks, cut)
        for index in whole.ids:
            assert before.ids[index] + rest.ids[index] == whole.ids[index], cut
            assert before.text[index] + rest.text[index] == whole.text[index], cut
            assert before.logprobs[index] + rest.logprobs[index] == pytest.approx(
                whole.logprobs[index], abs=1e-4
            )
            assert before.offsets[index] + rest.offsets[index] == whole.offsets[index]
        assert rest.reason == whole.reason


@pytest.mark.parametrize("kind", COMPLETIONS)
def test_the_rest_of_a_completion_is_what_it_would_have_been(server: Served, kind: str) -> None:
    body = {"ignore_eos": True, "max_tokens": 40, "prompt": PROMPT, **COMPLETIONS[kind]}
    check_every_cut(server, "/v1/completions", body)


def test_a_stop_string_that_begins_before_the_cut_ends_the_text(server: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    text = server.complete(**body)["choices"][0]["text"]
    stop = text[25:33]
    assert len(stop) == 8
    body |= {"stop": [stop], "return_token_ids": True}
    chunks = server.events("/v1/completions", **body)
    whole = read(chunks)
    assert whole.text[0] == text[: text.index(stop)]
    for cut in range(1, len(chunks) - 1):
        before, rest = resumed(server, "/v1/completions", body, chunks, cut)
        assert before.text[0] + rest.text[0] == whole.text[0]
        assert rest.reason == {0: "stop"}


@pytest.mark.parametrize(
    "more",
    [{}, {"n": 2}, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}],
    ids=["text", "two", "schema"],
)
def test_the_rest_of_a_chat_is_what_it_would_have_been(
    server: Served, more: dict[str, Any]
) -> None:
    body = {"messages": CHAT, "max_tokens": 30, "temperature": 0.8, "seed": 4, **more}
    check_every_cut(server, "/v1/chat/completions", body)


def test_a_whole_answer_has_all_of_the_text_and_counts_all_tokens(server: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0.8, "seed": 9, "ignore_eos": True}
    body["return_token_ids"] = True
    whole = server.complete(**body)
    choice = whole["choices"][0]
    assert len(choice["token_ids"]) == 30
    rest = server.complete(**body, resume={"token_ids": choice["token_ids"][:11]})
    assert rest["choices"] == whole["choices"]
    assert rest["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"resume": {"token_ids": [99_999_999]}}, "token id 99999999: the target has ids from 0"),
        (
            {"resume": {"token_ids": [5] * 21}},
            "21 tokens are written already, but",
        ),
        ({"resume": {"token_ids": [[5], [6]]}}, "2 lists of token ids for 1 texts"),
        ({"resume": {"token_ids": [5], "seed": 3}}, "resume.seed"),
        ({"resume": {"token_ids": [5]}, "temperature": 0.8}, "goes on as it began only with its"),
        ({"resume": {"token_ids": [5]}, "logprobs": 1}, "resume with logprobs goes with stream"),
        ({"resume": {"token_ids": [5]}, "prompt": ["a", "b"]}, "resume goes with one prompt"),
        ({"resume": {"token_ids": [5, 7]}, "stop_token_ids": [5]}, "token id 5 ends the text"),
    ],
)
def test_what_cannot_go_on_is_refused_with_one_line(
    server: Served, more: dict[str, Any], line: str
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0.0, **more}
    answer = server.post("/v1/completions", **body)
    assert answer.status_code == 400, answer.text
    said = answer.json()["error"]["message"]
    assert line in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "form",
    [
        {"structured_outputs": {"regex": "[0-9]{4}-[0-9]{2}"}},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ],
)
def test_tokens_that_do_not_fit_the_form_are_refused(server: Served, form: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0.0, **form}
    whole = server.complete(**body, return_token_ids=True)["choices"][0]["token_ids"]
    free = server.complete(prompt=PROMPT, max_tokens=9, return_token_ids=True, temperature=0.0)
    others = free["choices"][0]["token_ids"]
    for fitting in (0, 1):
        written = [*whole[:fitting], *others]
        answer = server.post("/v1/completions", **body, resume={"token_ids": written})
        assert answer.status_code == 400, answer.text
        said = answer.json()["error"]["message"]
        assert f" of {len(written)} does not fit" in said
        assert said.endswith("; send only those before it")
    if len(whole) > 2:
        rest = server.complete(**body, resume={"token_ids": whole[:2]}, return_token_ids=True)
        assert rest["choices"][0]["token_ids"] == whole  # not streamed, it is the whole answer


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("end", ["length", "stop_token", "stop_string"])
def test_an_answer_that_is_complete_already_tells_why_it_has_ended(
    server: Served, path: str, end: str
) -> None:
    said = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": CHAT}
    body = {**said, "max_tokens": 20, "temperature": 0.8, "seed": 6, "ignore_eos": True}
    body["return_token_ids"] = True
    free = server.post(path, **body).json()["choices"][0]
    if end == "stop_token":
        body["stop_token_ids"] = [free["token_ids"][9]]
    if end == "stop_string":
        text = free["text"] if "text" in free else free["message"]["content"]
        body["stop"] = [text[12:15]]
    whole = server.post(path, **body).json()
    choice = whole["choices"][0]
    assert choice["finish_reason"] == ("length" if end == "length" else "stop")
    assert (len(choice["token_ids"]) < 20) == (end != "length")

    told = server.post(path, **body, resume={"token_ids": choice["token_ids"]})
    assert told.status_code == 200, told.text
    assert told.json()["choices"] == whole["choices"]
    assert told.json()["usage"] == whole["usage"]

    rest = read(server.events(path, **body, resume={"token_ids": choice["token_ids"]}))
    assert (rest.ids[0], rest.reason[0]) == ([], choice["finish_reason"])


def test_tokens_behind_a_stop_string_are_refused(server: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
    choice = server.complete(**body, return_token_ids=True)["choices"][0]
    stop = choice["text"].strip()[:2]
    answer = server.post(
        "/v1/completions", **body, stop=stop, resume={"token_ids": choice["token_ids"][:20]}
    )
    assert answer.status_code == 400
    assert "ends the text among the tokens that are written already" in answer.text

"""Where a server says that it can be tried, in lines that can be pasted."""

import json
import shlex

import pytest

from coordinator.cli.serve import KEY, ways_in
from coordinator.http.bodies import ChatBody, CompletionBody


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://0.0.0.0:8000", "http://127.0.0.1:8000"),
        ("http://[::]:8000", "http://[::1]:8000"),
        ("http://10.1.2.3:65535", "http://10.1.2.3:65535"),
    ],
)
@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
def test_the_page_and_a_request_that_works_as_it_stands(
    url: str, shown: str, *, is_chat: bool, has_keys: bool
) -> None:
    lines = ways_in(url, has_keys=has_keys, is_chat=is_chat)
    assert all(len(line) <= 80 for line in lines)
    assert lines[0] == f"the page: {shown}/"
    assert (KEY in lines[1]) is has_keys
    program, place, *options = shlex.split("\n".join(lines[2:]).replace("\\\n", ""))
    route = "chat/completions" if is_chat else "completions"
    assert (program, place) == ("curl", f"{shown}/v1/{route}")
    pairs = zip(*[iter(options)] * 2, strict=True)
    headers = [value for flag, value in pairs if flag == "--header"]
    assert headers == [f"Authorization: Bearer {KEY}"] * has_keys + [
        "Content-Type: application/json"
    ]
    assert options[-2] == "--data"
    body = json.loads(options[-1])
    if is_chat:
        assert [one.role for one in ChatBody(**body).messages] == ["user"]
    else:
        assert CompletionBody(**body).params(0).max_tokens == 48

"""One stream for the client, from however many servers: each token once, and nothing of ours."""

from typing import Any

import pytest
from pydantic import ValidationError

from coordinator.ingress.answer import Answer, says_it_ends

Json = dict[str, Any]
SEED = 99


def completion(
    *ids: int, index: int = 0, reason: str | None = None, name: str = "one", prompt: Any = None
) -> Json:
    """A chunk of a server that was asked for token ids."""
    choice: Json = {"index": index, "text": "".join(map(chr, ids)), "finish_reason": reason}
    choice |= {"token_ids": list(ids), "prompt_token_ids": prompt}
    return {"id": name, "created": len(name), "model": "m", "choices": [choice]}


def chat(delta: Json, *ids: int, name: str = "one", **fields: Any) -> Json:
    choice: Json = {"index": 0, "delta": delta, "finish_reason": None}
    if ids:
        choice["token_ids"] = list(ids)
    return {"id": name, "created": 1, "model": "m", "choices": [choice], **fields}


def answer(**body: Any) -> Answer:
    return Answer({"prompt": "a", "stream": True, **body}, SEED)


def test_a_server_is_asked_for_what_lets_another_one_go_on() -> None:
    assert answer().asked() == {
        "prompt": "a",
        "stream": True,
        "seed": SEED,
        "return_token_ids": True,
    }
    assert answer(seed=7, temperature=0.8).asked()["seed"] == 7
    whole = Answer({"prompt": "a"}, SEED)
    assert whole.asked() == {"prompt": "a", "seed": SEED}
    assert not whole.streams


def test_the_client_gets_no_ids_that_it_has_not_asked_for() -> None:
    told = answer().heard(completion(65, 66, prompt=[1, 2]))
    assert told is not None
    (choice,) = told["choices"]
    assert choice == {"index": 0, "text": "AB", "finish_reason": None}
    told = answer(return_token_ids=True).heard(completion(65, prompt=[1, 2]))
    assert told is not None
    assert told["choices"][0]["token_ids"] == [65]
    assert told["choices"][0]["prompt_token_ids"] == [1, 2]


def test_the_next_server_goes_on_behind_what_came() -> None:
    one = answer()
    one.heard(completion(65, 66, prompt=[1, 2]))
    one.heard(completion(67))
    one.broke()
    assert one.asked()["resume"] == {"token_ids": [65, 66, 67], "prompt_token_ids": [1, 2]}
    told = one.heard(completion(68, name="another", reason="stop"))
    assert told is not None
    assert (told["id"], told["created"]) == ("one", 3)
    assert told["choices"][0]["finish_reason"] == "stop"
    one.broke()
    assert one.asked()["resume"]["token_ids"] == [65, 66, 67, 68]


def test_a_server_may_only_tell_why_an_answer_has_ended() -> None:
    one = answer()
    one.heard(completion(65, 66, prompt=[1, 2]))
    one.broke()
    assert one.asked()["resume"]["token_ids"] == [65, 66]
    told = one.heard(completion(name="another", reason="length"))
    assert told is not None
    assert told["choices"][0]["finish_reason"] == "length"
    assert one.is_whole


def test_before_the_first_token_another_server_is_asked_the_same() -> None:
    one = answer()
    one.broke()
    assert "resume" not in one.asked()
    assert not one.has_begun


def test_an_answer_that_was_resumed_before_goes_on_behind_both() -> None:
    one = answer(resume={"prompt_token_ids": [1], "token_ids": [64]})
    assert one.asked()["resume"] == {"prompt_token_ids": [1], "token_ids": [64]}
    one.heard(completion(65, prompt=[1]))
    one.broke()
    assert one.asked()["resume"] == {"prompt_token_ids": [1], "token_ids": [64, 65]}
    two = answer(n=2, resume={"token_ids": [[64], [70]]})
    two.heard(completion(71, index=1))
    two.broke()
    assert two.asked()["resume"] == {"token_ids": [[64], [70, 71]]}


def test_a_choice_that_is_complete_is_not_told_again() -> None:
    one = answer(n=2)
    one.heard(completion(65, index=0, prompt=[1]))
    one.heard(completion(70, index=1, reason="stop"))
    one.broke()
    assert one.asked()["resume"]["token_ids"] == [[65], [70]]
    assert one.heard(completion(70, index=1, reason="stop")) is None
    told = one.heard(completion(66, index=0, reason="length"))
    assert told is not None
    assert told["choices"][0]["text"] == "B"


def test_a_chat_says_once_whose_words_they_are() -> None:
    one = answer()
    begun = {"role": "assistant", "content": ""}
    assert one.heard(chat(begun, prompt_token_ids=[1, 2])) == chat(begun)
    one.broke()
    assert "resume" not in one.asked()
    assert one.heard(chat(begun, name="another", prompt_token_ids=[1, 2])) is None
    assert one.heard(chat({"content": "A"}, 65, name="another")) == chat({"content": "A"})
    one.broke()
    assert one.asked()["resume"] == {"token_ids": [65], "prompt_token_ids": [1, 2]}


def test_usage_and_progress_pass() -> None:
    one = answer()
    for event in (
        {"id": "one", "created": 1, "choices": [], "usage": {"completion_tokens": 3}},
        {"id": "one", "created": 1, "choices": [], "prompt_progress": {"processed": 3}},
        {"error": {"message": "no"}},
    ):
        assert one.heard(event) == event
    assert not one.has_begun
    one.heard(completion(65))
    assert one.heard({"id": "one", "choices": [], "prompt_progress": {"processed": 1}}) is None


def test_an_answer_to_several_prompts_cannot_move() -> None:
    assert answer().may_move
    assert answer(prompt=["a"]).may_move
    assert answer(prompt=[1, 2, 3]).may_move
    assert not answer(prompt=["a", "b"]).may_move
    assert not answer(prompt=[[1], [2]]).may_move


@pytest.mark.parametrize(
    "broken", [{"n": 1.5}, {"stream": "perhaps"}, {"resume": {"token_ids": "a"}}]
)
def test_what_the_servers_refuse_is_not_read(broken: Json) -> None:
    with pytest.raises(ValidationError):
        answer(**broken)


def test_values_are_read_as_the_servers_read_them() -> None:
    assert answer(stream="true").streams
    assert answer(stream=1, return_token_ids="yes").asked()["return_token_ids"] is True
    two = answer(n="2")
    two.heard(completion(65))
    assert two.asked()["resume"]["token_ids"] == [[65], []]
    one = answer(n=0, resume={"token_ids": [[64]]})
    one.heard(completion(65))
    assert one.asked()["resume"]["token_ids"] == [64, 65]


def test_the_ids_of_a_prompt_that_the_client_knows_are_kept() -> None:
    """No server says them again to whoever says them."""
    one = answer(resume={"prompt_token_ids": [7], "token_ids": [64]})
    one.heard(completion(65))
    assert one.asked()["resume"] == {"prompt_token_ids": [7], "token_ids": [64, 65]}


def test_an_answer_is_whole_before_the_mark_of_its_end() -> None:
    one, two = answer(), answer(n=2, stream_options={"include_usage": True})
    one.heard(completion(65, reason="stop"))
    assert one.is_whole
    two.heard(completion(65, reason="stop"))
    two.heard(completion(65, index=1, reason="stop"))
    assert not two.is_whole, "it owes its usage"


def test_only_the_end_of_a_server_moves_a_stream() -> None:
    assert says_it_ends({"error": {"status": 503, "message": "the server has ended"}})
    assert not says_it_ends({"error": {"status": 500}})
    assert not says_it_ends({"error": "no"})
    assert not says_it_ends({**completion(65), "error": {"status": 503}})

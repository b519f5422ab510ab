"""What was said, as messages, and what of it fits."""

from collections.abc import Sequence

import pytest

from coordinator.cli.chat.conversation import Conversation, Message, TooLongError


def encode(messages: Sequence[Message]) -> tuple[str, tuple[int, ...]]:
    """A token for each letter of what was said."""
    text = "".join(message["content"] for message in messages)
    return text, tuple(map(ord, text))


def held(*turns: tuple[str, str], system: str = "") -> Conversation:
    conversation = Conversation(system)
    for question, answer in turns:
        conversation.ask(question)
        conversation.answered(answer)
    return conversation


def test_messages_are_what_was_said_in_its_order() -> None:
    conversation = held(("a", "b"), ("c", " d\n"), system="s")
    conversation.ask("e")
    said = [("system", "s"), ("user", "a"), ("assistant", "b")]
    said += [("user", "c"), ("assistant", " d\n"), ("user", "e")]
    assert conversation.messages == [{"role": role, "content": text} for role, text in said]


def test_without_a_system_message_there_is_none() -> None:
    conversation = held(("a", "b"))
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]


def test_answers_in_a_plain_transcript_lose_the_blanks_around_them() -> None:
    conversation = Conversation(is_script=True)
    conversation.ask("a")
    conversation.answered(" b\n")
    assert conversation.messages[-1]["content"] == "b"


def test_a_question_that_is_withdrawn_was_never_asked() -> None:
    conversation = held(("a", "b"))
    before = conversation.messages
    conversation.ask("c")
    assert conversation.withdraw() == "c"
    assert conversation.messages == before
    conversation.ask("d")
    assert conversation.messages[-1]["content"] == "d"


def test_what_does_not_fit_is_said_and_nothing_is_lost() -> None:
    conversation = held(("aaaa", "bbbb"))
    conversation.ask("cc")
    before = conversation.messages
    with pytest.raises(TooLongError, match="has 10 tokens with this message, but the target takes"):
        conversation.rendered(encode, 10)
    assert conversation.messages == before
    assert conversation.rendered(encode, 11).prompt == "aaaabbbbcc"


def test_the_oldest_turns_go_until_an_answer_has_room() -> None:
    conversation = held(("aaaa", "bbbb"), ("cc", "dd"), ("e", "f"), system="s")
    conversation.ask("g")
    # A quarter of 16 is free behind "sefg" and "ccdd".
    rendered, num_dropped = conversation.shortened(encode, 16, 100)
    assert (rendered.prompt, num_dropped) == ("sccddefg", 1)
    assert rendered.ids == tuple(map(ord, "sccddefg"))
    rendered, num_dropped = conversation.shortened(encode, 10, 100)
    assert (rendered.prompt, num_dropped) == ("sccddefg", 0)
    rendered, num_dropped = conversation.shortened(encode, 9, 100)
    assert (rendered.prompt, num_dropped) == ("sefg", 1)


def test_no_more_goes_than_the_longest_answer_needs() -> None:
    conversation = held(("aaaa", "bbbb"))
    conversation.ask("c")
    assert conversation.shortened(encode, 100, 91)[1] == 0  # a quarter is less than 91
    assert conversation.shortened(encode, 10, 1)[1] == 0
    assert conversation.shortened(encode, 10, 2)[1] == 1


def test_a_message_that_is_too_long_by_itself_drops_nothing() -> None:
    conversation = held(("a", "b"), ("c", "d"), system="s")
    conversation.ask("e" * 9)
    before = conversation.messages
    with pytest.raises(TooLongError, match="has 10 tokens without anything that was said before"):
        conversation.shortened(encode, 10, 5)
    assert conversation.messages == before


def test_turns_are_forgotten_and_the_system_message_stays() -> None:
    conversation = held(("a", "b"), ("c", "d"), system="s")
    assert conversation.drop_oldest()
    assert [message["content"] for message in conversation.messages] == ["s", "c", "d"]
    conversation.reset()
    assert [message["content"] for message in conversation.messages] == ["s"]
    assert not conversation.drop_oldest()
    assert conversation.num_turns == 0

"""Lines as messages and commands."""

import pytest

from coordinator.cli.chat.conversation import (
    COMMANDS,
    Command,
    Entry,
    Lines,
    Say,
    Unknown,
    help_lines,
)


def entries(*lines: str) -> list[Entry]:
    reader = Lines()
    found = [reader.push(line) for line in lines]
    assert not reader.is_open
    return [entry for entry in found if entry is not None]


def test_a_line_is_a_message_and_an_empty_one_is_nothing() -> None:
    assert entries(" a b ", "", "   ", "c") == [Say("a b"), Say("c")]


@pytest.mark.parametrize(
    "lines",
    [
        ('"""a', "", " b", 'c"""'),
        ('  """', "a", "", " b", "c", '"""  '),
        ("a\\", "\\", " b\\", "c"),
    ],
)
def test_a_message_may_have_several_lines(lines: tuple[str, ...]) -> None:
    assert entries(*lines) == [Say("a\n\n b\nc")]


def test_a_fence_may_begin_and_end_in_one_line() -> None:
    assert entries('"""a"""', '""""""', "b") == [Say("a"), Say("b")]


def test_inside_of_a_fence_nothing_is_a_command() -> None:
    assert entries('"""', "/quit", "a\\", '"""') == [Say("/quit\na\\")]


def test_commands_are_known_by_all_of_their_names() -> None:
    assert entries("/help", "/?", "/clear", "/exit", "/system  be brief ") == [
        Command("help"),
        Command("help"),
        Command("reset"),
        Command("quit"),
        Command("system", "be brief"),
    ]
    assert entries("/q", "/QUIT", "/Exit") == [Command("quit")] * 3
    assert entries(*(f"/{name}" for name in COMMANDS)) == [Command(name) for name in COMMANDS]


def test_what_only_looks_like_a_command_is_no_message_but_for_a_space() -> None:
    assert entries("/etc/passwd is what?", "/") == [Unknown("etc/passwd"), Unknown("")]
    assert entries(" /etc/passwd is what?") == [Say("/etc/passwd is what?")]


def test_a_message_that_goes_on_is_open_until_it_ends_or_is_discarded() -> None:
    reader = Lines()
    assert not reader.is_open
    assert reader.push("a\\") is None
    assert reader.is_open
    assert reader.finish() == Say("a")
    assert reader.push('"""b') is None
    reader.discard()
    assert not reader.is_open
    assert reader.push("c") == Say("c")
    assert reader.finish() is None


def test_the_help_names_every_command_in_lines_of_a_terminal() -> None:
    lines = help_lines()
    assert [line.split()[0] for line in lines[: len(COMMANDS)]] == [f"/{name}" for name in COMMANDS]
    assert max(map(len, lines)) <= 80

"""Lines that fit."""

import shlex

from coordinator.cli.wrapping import continued, fitted, wrapped


def test_a_command_goes_on_behind_a_backslash_and_reads_the_same() -> None:
    command = "  run --model a/large --flag 'two words here' --out /tmp/there last"
    for width in (20, 30, 40, 80):
        lines = continued(command, width)
        assert shlex.split("\n".join(lines).replace("\\\n", "")) == shlex.split(command)
        assert all(len(line) <= width or len(line.split()) <= 5 for line in lines)
    assert continued(command, 80) == [command]
    assert continued("  run --model a/large last", 22) == [
        *("  run \\", "      --model a/large \\", "      last")
    ]


def test_what_is_no_command_stays_as_it_is() -> None:
    assert continued("  that isn't one, it only looks so", 10) == [
        "  that isn't one, it only looks so"
    ]
    assert continued("", 10) == [""]


def test_text_breaks_between_words_and_long_words_stay_whole() -> None:
    assert wrapped("one two three", 8) == ["one two", "  three"]
    assert wrapped("/a/path/that/is/long x", 8) == ["/a/path/that/is/long", "  x"]
    assert wrapped("", 8) == [""]
    assert fitted("  as it  is\none two three four", 11) == "  as it  is\none two\n  three\n  four"

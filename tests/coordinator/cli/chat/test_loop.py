"""A conversation on a pair without processes: what is asked, shown, said and kept."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.api.config import SpeculationConfig
from coordinator.api.params import SamplingParams
from coordinator.cli.chat.answer import LineInterruptedError
from coordinator.cli.chat.conversation import Conversation, Message, TooLongError
from coordinator.cli.chat.loop import Chat, ChatSettings
from coordinator.cli.chat.screen import TWICE
from proto.errors import ConfigurationError, NodeError
from proto.messages import Role
from tests.coordinator.api.scripted import Script, ScriptedPair

CTRL_C = LineInterruptedError("")


class TalkingPair(ScriptedPair):
    """Answers with the numbers 1, 2, ... of its turns, twice each."""

    def __init__(self, max_len: int) -> None:
        super().__init__(1)
        self._max_len = max_len
        self.prompts: list[str] = []
        self.arguments: list[Mapping[str, Any]] = []
        self.begin = self.answer

    def answer(self, script: Script) -> None:
        number = len(self.asked) + 1
        script.add(number)
        script.add(number)
        script.end()

    def encode_chat(
        self, messages: Sequence[Message], arguments: Mapping[str, Any]
    ) -> tuple[str, tuple[int, ...]]:
        """A token for each letter."""
        text = "|".join(message["content"] for message in messages)
        self.arguments.append(arguments)
        self.prompts.append(text)
        return text, tuple(map(ord, text))

    def check(self, prompt: tuple[int, ...]) -> None:
        """They are letters."""

    def how_longer(self) -> str:
        """As if nobody had asked for so little."""
        return "raise --max-model-len"

    def hello(self, _: Role) -> SimpleNamespace:
        """As far as is asked."""
        return SimpleNamespace(max_model_len=self._max_len)


class Typed:
    """A screen on which a test types. `stops_at`: Ctrl-C once so many answers have begun."""

    def __init__(self, *lines: str | Exception, is_person: bool = True, stops_at: int = 0) -> None:
        self.is_person = is_person
        self.shown = ""
        self.notes: list[str] = []
        self._lines = iter(lines)
        self._stops_at = stops_at
        self._num_answers = 0
        self._stop: Callable[[], None] | None = None

    def read(self, *, is_more: bool) -> str | None:
        line = next(self._lines, None)
        if isinstance(line, Exception):
            raise line
        return line

    @contextmanager
    def answering(self, stop: Callable[[], None]) -> Iterator[None]:
        self._num_answers += 1
        if self._num_answers == self._stops_at:
            self._stop = stop
        yield
        self._stop = None

    def waiting(self, words: str) -> AbstractContextManager[Callable[[str], object]]:
        return nullcontext(lambda _words: None)

    def write(self, text: str) -> None:
        self.shown += text
        if self._stop is not None:
            self._stop()

    def end_answer(self, *, is_empty: bool) -> None:
        self.shown += "\n"

    def note(self, line: str) -> None:
        self.notes.append(line)


def talk(
    screen: Typed,
    max_len: int = 1000,
    *,
    system: str = "",
    drops: bool = False,
    pair: TalkingPair | None = None,
) -> TalkingPair:
    pair = pair or TalkingPair(max_len)
    settings = ChatSettings(
        SpeculationConfig(), SamplingParams(), drops, {"enable_thinking": False}
    )
    Chat(pair.as_pair(), Conversation(system), settings, screen).run()
    return pair


def test_every_turn_is_asked_behind_all_that_was_said() -> None:
    screen = Typed("a", "b", "c")
    pair = talk(screen, system="s")
    assert pair.prompts == ["s|a", "s|a|1,1|b", "s|a|1,1|b|2,2|c"]
    assert screen.shown == "1,1\n2,2\n3,3\n"
    assert pair.arguments == [{"enable_thinking": False}] * 3
    assert all("tokens/s" in note and "of 1000 tokens" in note for note in screen.notes[1::2])


def test_figures_are_for_a_person_only() -> None:
    screen = Typed("a", is_person=False)
    talk(screen)
    assert screen.shown == "1,1\n"
    assert not any("tokens/s" in note for note in screen.notes)


def test_an_answer_that_is_stopped_stays_as_far_as_it_was_written() -> None:
    pair = TalkingPair(1000)

    def slowly(script: Script) -> None:
        script.add(7)
        if pair.asked:
            script.end()

    pair.begin = slowly
    screen = Typed("a", "b", stops_at=1)
    talk(screen, pair=pair)
    assert pair.prompts == ["a", "a|7|b"]
    assert screen.shown == "7\n7\n"
    assert screen.notes[0] == "stopped; what was written stays part of the conversation"
    assert not pair.asked[0].is_cancelled


def test_an_answer_that_is_stopped_before_its_first_token_was_never_asked_for() -> None:
    pair = TalkingPair(1000)
    pair.begin = lambda script: pair.answer(script) if pair.asked else None

    class Impatient(Typed):
        @contextmanager
        def answering(self, stop: Callable[[], None]) -> Iterator[None]:
            if not pair.asked:
                stop()
            yield

    screen = Impatient("a", "b")
    talk(screen, pair=pair)
    assert pair.prompts == ["a", "b"]
    assert pair.asked[0].is_cancelled
    assert screen.notes[0].startswith("stopped before the first token")


def test_what_does_not_fit_is_asked_again_once_turns_are_dropped() -> None:
    screen = Typed("aaaa", "bbbb", "cccc", "/drop")
    pair = talk(screen, max_len=20)
    # "aaaa|1,1|bbbb|2,2|cccc" has 22 letters.
    assert pair.prompts[2] == "aaaa|1,1|bbbb|2,2|cccc"
    assert pair.prompts[-1] == "bbbb|2,2|cccc"
    (line,) = [note for note in screen.notes if "nothing is lost" in note]
    assert line.startswith("the conversation has 22 tokens with this message, but the target takes")
    assert "the oldest 1 turn forgotten, to make room" in screen.notes
    assert screen.shown == "1,1\n2,2\n3,3\n"


def test_oldest_turns_are_dropped_where_that_was_asked_for() -> None:
    screen = Typed("aaaa", "bbbb", "cccc", is_person=False)
    pair = talk(screen, max_len=20, drops=True)
    assert pair.prompts[-1] == "bbbb|2,2|cccc"
    assert screen.shown == "1,1\n2,2\n3,3\n"


@pytest.mark.parametrize("settings", [{}, {"drops": True}])
def test_a_message_that_never_fits_does_not_offer_to_drop_turns(settings: dict[str, bool]) -> None:
    screen = Typed("a" * 30)
    talk(screen, max_len=20, **settings)
    (line,) = screen.notes
    assert line.endswith("; shorten it, or raise --max-model-len")


def test_an_answer_that_fills_the_context_says_so() -> None:
    screen = Typed("a" * 18, "/drop", "b")
    assert talk(screen, max_len=20).prompts == ["a" * 18, "b"]
    assert screen.notes[0].startswith("the conversation is full: /drop")
    assert screen.notes[2] == "forgotten; 0 turns left"


def test_a_pipe_ends_with_what_cannot_be_answered() -> None:
    screen = Typed("a", "/nothing", "b", is_person=False)
    with pytest.raises(ConfigurationError, match="there is no command /nothing; /help"):
        talk(screen)
    assert screen.shown == "1,1\n"
    with pytest.raises(TooLongError, match="30 tokens"):
        talk(Typed("a" * 30, is_person=False), max_len=20)


def test_commands_change_what_is_asked() -> None:
    screen = Typed(
        "/system be brief", "a", "/reset", "/system", "b", '/system ""', "c", "/quit", "d"
    )
    pair = talk(screen)
    assert pair.prompts == ["be brief|a", "be brief|b", "b|2,2|c"]
    assert "be brief" in screen.notes


def test_a_turn_is_dropped_by_hand() -> None:
    screen = Typed("/drop", "a", "b", "/drop", "c")
    pair = talk(screen)
    assert pair.prompts[-1] == "b|2,2|c"
    assert screen.notes[0] == "there is no turn to forget"
    assert "forgotten; 1 turn left" in screen.notes


def test_ctrl_c_twice_on_empty_lines_ends_the_conversation() -> None:
    screen = Typed(CTRL_C, "a", CTRL_C, LineInterruptedError("half"), CTRL_C, CTRL_C, "b")
    pair = talk(screen)
    assert pair.prompts == ["a"]
    assert screen.notes.count(TWICE) == 3


def test_ctrl_c_throws_the_lines_of_a_message_away() -> None:
    screen = Typed('"""a', CTRL_C, "b")
    assert talk(screen).prompts == ["b"]
    assert TWICE not in screen.notes


def test_a_message_that_the_end_of_input_cuts_is_asked() -> None:
    assert talk(Typed('"""a', "b")).prompts == ["a\nb"]


def test_the_end_of_the_nodes_ends_the_conversation_on_a_line_of_its_own() -> None:
    pair = TalkingPair(1000)

    def dies(script: Script) -> None:
        script.add(7)
        script.fail(NodeError("the target has ended"))

    pair.begin = dies
    screen = Typed("a", "b")
    with pytest.raises(NodeError, match="the target has ended"):
        talk(screen, pair=pair)
    assert screen.shown == "7\n"
    assert pair.prompts == ["a"]

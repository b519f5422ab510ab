"""The ledger: the file says all that it must, however often it is written anew, and is bounded."""

from collections.abc import Sequence
from random import Random

import pytest

from coordinator.journal.ledger import (
    AGAIN_S,
    MOST_STARTS,
    Action,
    Append,
    Compact,
    KeptAnswer,
    Ledger,
)
from coordinator.journal.records import (
    Asked,
    Came,
    Ended,
    Gone,
    Head,
    Ran,
    Record,
    Scored,
    TakenUp,
    line_of,
    read,
)
from proto.messages import Logprobs

HEAD = Head("target", 100)


def asked(name: str, n: int = 1) -> Asked:
    return Asked(name, 0.0, "/v1/completions", "", "", {}, ((1, 2, 3),), n, 7)


class File:
    """The file as a writer leaves it: a dumb one."""

    def __init__(self, ledger: Ledger) -> None:
        self.content, self.num_compacted = b"", 0
        self.do([ledger.compact()])

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Compact):
                self.content, self.num_compacted = action.content, self.num_compacted + 1
            else:
                self.content += action.line

    def answers(self) -> dict[str, KeptAnswer]:
        """What a restarted coordinator finds."""
        found = read(self.content)
        assert found.head == HEAD
        assert not found.garbled
        ledger = Ledger(HEAD, 1 << 30)
        ledger.replay(found.records)
        return ledger.answers


def said(answers: dict[str, KeptAnswer]) -> dict[str, object]:
    """All of them, without how it is stored."""
    return {
        name: (
            one.asked,
            one.is_running,
            one.num_starts,
            [(text.tokens, text.probs(), text.scored, text.end) for text in one.texts],
        )
        for name, one in answers.items()
    }


class Dumb:
    """What must be found: each answer's texts as lists."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[list[int]]] = {}

    def note(self, record: Record) -> None:
        if isinstance(record, Asked):
            self.tokens[record.name] = [[] for _ in range(record.num_texts)]
        elif isinstance(record, Gone):
            del self.tokens[record.name]
        elif isinstance(record, Came):
            text = self.tokens[record.name][record.text]
            text[record.at :] = record.tokens


def drawn(random: Random, dumb: Dumb, number: int) -> Record:
    """Some record that may follow."""
    names = list(dumb.tokens)
    if not names or random.random() < 0.05:
        return asked(f"a{number}", n=random.choice((1, 2)))
    name = random.choice(names)
    text = random.randrange(len(dumb.tokens[name]))
    have = len(dumb.tokens[name][text])
    match random.randrange(20):
        case 0:
            return Gone(name)
        case 1:
            return Ran(name, is_running=random.random() < 0.5)
        case 2:
            return TakenUp(name)
        case 3:
            return Ended(name, text, "stop")
        case 4:
            return Scored(name, text, Logprobs((1,), (-0.5,), (1,)))
        case 5:
            at = random.randint(0, have)
            return Came(name, text, at, (random.randrange(100),))
    return Came(name, text, have, tuple(random.choices(range(100), k=random.randint(1, 4))))


@pytest.mark.parametrize("seed", range(30))
def test_the_file_says_at_any_time_what_the_ledger_knows(seed: int) -> None:
    random, dumb = Random(seed), Dumb()
    ledger = Ledger(HEAD, 1 << 20, least_bytes=random.choice((100, 2000)))
    file = File(ledger)
    for number in range(400):
        record = drawn(random, dumb, number)
        dumb.note(record)
        file.do(ledger.note(record))
        if number % 20 == 0:
            assert said(file.answers()) == said(ledger.answers)
            found = {
                name: [one.tokens for one in kept.texts] for name, kept in file.answers().items()
            }
            assert found == dumb.tokens
            live = sum(one.num_bytes for one in ledger.answers.values())
            assert len(file.content) <= max(2000, 2 * live) + 300
    assert file.num_compacted > 1


def test_log_probabilities_stay_with_their_tokens_where_tokens_are_replaced() -> None:
    ledger = Ledger(HEAD, 1 << 20)
    file = File(ledger)

    def probs(*ids: int) -> Logprobs:
        return Logprobs(ids, tuple(-float(one) for one in ids), (1,) * len(ids))

    for record in (
        asked("a"),
        Came("a", 0, 0, (9,)),  # written elsewhere, without any
        Came("a", 0, 1, (5, 6, 7), probs(5, 6, 7)),
        Came("a", 0, 2, (8, 4), probs(8, 4)),
    ):
        file.do(ledger.note(record))
    for content in (file.content, ledger.compact().content):
        file.content = content
        (text,) = file.answers()["a"].texts
        assert text.tokens == [9, 5, 8, 4]
        assert text.probs() == probs(5, 8, 4)


def test_what_would_need_too_much_room_is_not_noted_and_leaves_the_others_alone() -> None:
    ledger = Ledger(HEAD, len(line_of(asked("a"))) + 10)
    file = File(ledger)
    file.do(ledger.note(asked("a")))
    assert not ledger.has_room(asked("b"))
    assert ledger.note(asked("b")) == []
    assert ledger.note(Came("b", 0, 0, (1,))) == []
    file.do(ledger.note(Came("a", 0, 0, (1,))))
    assert list(file.answers()) == ["a"]
    ledger.note(Gone("a"))
    assert ledger.has_room(asked("b"))


def test_after_a_failure_nothing_is_appended_until_the_whole_file_is_written_again() -> None:
    ledger = Ledger(HEAD, 1 << 20)
    file = File(ledger)
    file.do(ledger.note(asked("a")))
    ledger.failed(100.0)
    assert ledger.is_broken
    assert ledger.note(Came("a", 0, 0, (1, 2))) == []
    assert ledger.tick(100.0 + AGAIN_S - 0.1) == []
    actions = ledger.tick(100.0 + AGAIN_S)
    assert [type(action) for action in actions] == [Compact]
    file.do(actions)
    assert file.answers()["a"].texts[0].tokens == [1, 2]
    assert not ledger.is_broken
    assert [type(action) for action in ledger.note(Came("a", 0, 2, (3,)))] == [Append]


def test_an_answer_that_brings_no_token_after_restarts_is_given_up() -> None:
    ledger = Ledger(HEAD, 1 << 20)
    ledger.note(asked("a"))
    for _ in range(MOST_STARTS - 1):
        ledger.note(TakenUp("a"))
    assert not ledger.answers["a"].is_given_up
    ledger.note(Came("a", 0, 0, (1,)))
    for _ in range(MOST_STARTS):
        ledger.note(TakenUp("a"))
    assert ledger.answers["a"].is_given_up

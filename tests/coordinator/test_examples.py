"""The worked examples of the literature (2211.17192, 2302.01318) on the real machines."""

from coordinator.cli.speculation_view import SpeculationView
from coordinator.text.metrics import origins
from coordinator.text.session_events import Emit
from proto.messages import (
    FinishReason,
    Limits,
)
from tests.coordinator.trio import Trio
from tests.coordinator.words import Words
from tests.policies import pipelined, synchronous

PROMPT = (1, 2, 3)
STOP = 0
WORDS = {10: "The cat", 11: " sat", 12: " on", 13: " the", 14: " mat", 15: " sofa"}
WORDS |= {16: "\n", STOP: ""}
SENTENCE = (10, 11, 12, 13, 14)


def at_positions(tokens: tuple[int, ...]) -> dict[int, int]:
    """Tokens after the prompt by position; end-of-text ever after."""
    text = PROMPT + tokens + (STOP,) * 64
    return dict(enumerate(text))


def sentence(drafted: tuple[int, ...], num_tokens: int) -> list[Emit]:
    """The passes that make SENTENCE."""
    trio = Trio(
        PROMPT,
        target=at_positions(SENTENCE),
        drafter=at_positions(drafted),
        policy=synchronous(4),
        limits=Limits(len(PROMPT) + num_tokens, (STOP,)),
    )
    return trio.run()


def shown(emits: list[Emit], *, in_colour: bool) -> list[str]:
    words = Words(WORDS)
    view = SpeculationView(words, in_colour=in_colour)
    return [view.push(emit, "".join(words.pieces(emit.tokens))) for emit in emits] + [
        view.finish("")
    ]


def test_a_pass_that_accepts_four_drafts_makes_five_tokens() -> None:
    emits = sentence((10, 11, 12, 13), num_tokens=5)
    assert emits == [Emit((10, 11, 12, 13, 14), 4, 4, ())]
    assert origins(emits[0]) == ("draft:model",) * 4 + ("bonus",)
    assert shown(emits, in_colour=False) == ["The cat sat on the{+ mat", "+}"]
    assert shown(emits, in_colour=True) == [
        "\x1b[32mThe cat sat on the\x1b[0m\x1b[94m mat\x1b[0m",
        "",
    ]


def test_a_pass_that_corrects_the_third_draft_makes_three_tokens() -> None:
    emits = sentence((10, 11, 15, 16), num_tokens=6)[:1]
    assert emits == [Emit((10, 11, 12), 2, 4, (15, 16))]
    assert origins(emits[0]) == ("draft:model", "draft:model", "recovered")
    assert shown(emits, in_colour=False) == ["The cat sat[- sofa⏎-]{+ on", "+}"]
    assert shown(emits, in_colour=True) == [
        "\x1b[32mThe cat sat\x1b[0m\x1b[31;9m sofa⏎\x1b[0m\x1b[94m on\x1b[0m",
        "",
    ]


def test_an_accepted_end_of_text_has_no_token_after_it() -> None:
    trio = Trio(
        PROMPT,
        target=at_positions((10, 11)),
        drafter=at_positions((10, 11)),
        policy=synchronous(4),
        limits=Limits(64, (STOP,)),
    )
    (emit,) = trio.run()
    assert trio.finish is not None
    assert trio.finish.reason is FinishReason.STOP
    assert emit.tokens == (10, 11, STOP)
    assert origins(emit) == ("draft:model",) * 3


def test_every_token_of_a_pipelined_text_has_an_origin() -> None:
    target = tuple(10 + i % 5 for i in range(40))
    drafted = tuple(token if i % 7 else 15 for i, token in enumerate(target))
    trio = Trio(
        PROMPT,
        target=at_positions(target),
        drafter=at_positions(drafted),
        policy=pipelined(4, 16),
        limits=Limits(len(PROMPT) + 40, (STOP,)),
    )
    emits = trio.run()
    tokens = [token for emit in emits for token in emit.tokens]
    where = [origin for emit in emits for origin in origins(emit)]
    assert tokens == list(target)
    assert len(where) == len(tokens)
    assert where.count("draft:model") == trio.counts.num_accepted > 10
    assert where.count("recovered") == sum(bool(emit.rejected) for emit in emits) > 3
    assert "".join(shown(emits, in_colour=False)).count("[-") == where.count("recovered")

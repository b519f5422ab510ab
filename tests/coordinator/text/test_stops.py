"""Stop strings, across tokens and chunks, and what a text is charged that ends at one."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.outputs import Assembly, Logprob
from coordinator.text.detokenization import Ending, StopStrings
from coordinator.text.metrics import Metrics, PassFigures, SessionCounts
from coordinator.text.session_events import Emit
from proto.messages import Logprobs
from tests.coordinator.words import Words

texts = st.text(alphabet="abc", max_size=20)
strings = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3)


def dumb(text: str, stops: list[str], *, is_shown: bool) -> tuple[str, str | None]:
    """Look at every beginning of the text, the shortest first."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if is_shown else end - len(stop)], stop
    return text, None


@given(texts, st.lists(st.integers(0, 20)), strings, st.booleans())
def test_any_chunking_gives_the_same_text(
    text: str,
    cuts: list[int],
    stops: list[str],
    is_shown: bool,  # noqa: FBT001
) -> None:
    held = StopStrings(stops, is_shown=is_shown)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown = "".join(held.push(text[low:high]) for low, high in pairwise(bounds)) + held.finish()
    assert (shown, held.found) == dumb(text, stops, is_shown=is_shown)


@given(texts, strings)
def test_nothing_is_shown_that_a_stop_string_may_take_back(text: str, stops: list[str]) -> None:
    held = StopStrings(stops, is_shown=False)
    shown = ""
    for sign in text:
        shown += held.push(sign)
        assert dumb(text, stops, is_shown=False)[0].startswith(shown)


@given(texts, texts, strings)
def test_what_may_not_stop_is_passed_on_and_may_still_begin_a_stop_string(
    exempt: str, text: str, stops: list[str]
) -> None:
    held = StopStrings(stops, is_shown=True)
    shown = "".join(held.push(sign, may_stop=False) for sign in exempt)
    shown += held.push(text) + held.finish()
    ends = range(len(exempt) + 1, len(exempt + text) + 1)
    end = next((e for e in ends if any((exempt + text)[:e].endswith(s) for s in stops)), None)
    assert shown == (exempt + text)[:end]


def test_a_common_beginning_is_held_back_no_longer_than_needed() -> None:
    held = StopStrings(["\n\n", "END"], is_shown=False)
    assert [held.push(piece) for piece in ("a\n", "b E", "N", "d", "\n", "\n", "c")] == [
        *("a", "\nb ", "", "ENd", "", "", "")
    ]
    assert held.found == "\n\n"
    assert held.finish() == ""


METRICS = Metrics.of(
    SessionCounts(num_passes=1),
    started=0.0,
    emitted=[(1.0, 1)],
    drafter_lost_at=None,
    queued_s=0.0,
    num_spec_tokens=0,
)
WORDS = Words({1: "one", 2: " two", 3: " three", 9: "."})
ROWS = Logprobs((1, 2, 2, 3, 3, 3), (-1.0, -0.5, -2.0, -0.25, -0.125, -0.125), (2, 3, 1))


def assembly(**values: object) -> Assembly:
    return Assembly("p", (5, 6), 7, WORDS, ending=Ending(**values))  # type: ignore[arg-type]


def test_everything_is_trimmed_at_the_stop_string() -> None:
    made = assembly(strings=("e t",))
    emit, part = made.cut(Emit((1, 2, 3), 2, 3, (8,), ROWS))
    assert emit == Emit((1, 2), 2, 3, (8,), ROWS.part(0, 2))
    assert part.outputs[0].text == "on"
    assert made.is_stopped
    last = made.finish("length", METRICS)
    assert last.finished
    whole = made.whole().outputs[0]
    assert (whole.text, whole.token_ids, whole.token_origins) == (
        "on",
        [1, 2],
        ("draft:model",) * 2,
    )
    assert (whole.finish_reason, whole.stop_reason) == ("stop", "e t")
    assert whole.logprobs == [
        {1: Logprob(-1.0, 2, "one"), 2: Logprob(-0.5, 1, " two")},
        {2: Logprob(-2.0, 3, " two"), 3: Logprob(-0.25, 1, " three")},
    ]
    assert whole.cumulative_logprob == -3.0


@pytest.mark.parametrize(("is_shown", "text"), [(False, "one"), (True, "one.")])
def test_a_stop_token_is_in_the_ids_and_in_the_text_only_if_it_is_wanted(
    is_shown: bool,  # noqa: FBT001
    text: str,
) -> None:
    made = assembly(stop_ids={9}, named_ids={9}, is_shown=is_shown)
    made.push(Emit((1, 9), 0, 0, ()))
    made.finish("stop", METRICS)
    whole = made.whole().outputs[0]
    assert (whole.text, whole.token_ids, whole.stop_reason) == (text, [1, 9], 9)


def test_the_reason_of_the_models_own_end_is_not_named() -> None:
    made = assembly(stop_ids={9}, strings=("x",))
    made.push(Emit((1, 9), 0, 0, ()))
    assert made.finish("stop", METRICS).outputs[0].stop_reason is None


def test_text_that_was_held_back_comes_at_the_end() -> None:
    made = assembly(strings=("one two.",))
    assert made.push(Emit((1, 2), 0, 0, ())).outputs[0].text == ""
    last = made.finish("length", METRICS).outputs[0]
    assert (last.text, last.finish_reason, last.stop_reason) == ("one two", "length", None)


def test_a_stop_string_counts_only_after_min_tokens() -> None:
    made = assembly(strings=("two",), min_tokens=2)
    made.push(Emit((1, 2), 0, 0, ()))
    assert not made.is_stopped
    made.push(Emit((3, 2, 1), 0, 0, ()))
    assert made.is_stopped
    made.finish("stop", METRICS)
    assert made.whole().outputs[0].token_ids == [1, 2, 3, 2]


def test_counts_of_the_first_tokens_leave_out_what_came_after() -> None:
    counts = SessionCounts()
    for num_tokens, num_accepted in ((3, 2), (4, 3), (1, 0)):
        counts.count(PassFigures(num_tokens, num_accepted, 3, 1, 0, 10, 20, 5, 4, "ready"))
    first = counts.until(5)
    assert (first.num_passes, first.num_drafted, first.num_accepted) == (2, 6, 4)
    assert first.acceptance == Counter({(3, 2): 2})
    assert (first.model_us, first.host_us, first.causes) == (40, [5, 5], Counter(ready=2))
    assert counts.until(8) == counts

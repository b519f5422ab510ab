"""Chains, trees, roll-backs and what is fed anew, against rows that are computed plainly."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.choice.coupling import rank_scored
from engine.choice.sampling import Sampling
from engine.cpu_library import library
from engine.heads.eagle import EagleExecutor
from engine.layout.slots import Feed, Move, SlotMap
from tests.engine.heads.checkpoints import EAGLE_LAYOUTS, VOCAB
from tests.engine.heads.conftest import LoadHead, feature
from tests.engine.heads.paths import (
    CAPACITY,
    Paths,
    as_bytes,
    assert_close,
    compare,
    features_of,
    run,
)
from tests.engine.heads.plain import Given
from tests.engine.random_session import Drawn, Path, RandomSession


@pytest.mark.parametrize("layout", EAGLE_LAYOUTS)
def test_a_greedy_chain_is_what_the_papers_say(layout: str, eagle: LoadHead) -> None:
    loaded, plain = eagle(layout)
    executor = EagleExecutor(loaded, CAPACITY)
    slots: SlotMap[int] = SlotMap(CAPACITY)
    tokens = [5, 9, 120, 33, 7, 61]
    given: list[Given] = [None, *(feature(i, loaded.feature_size) for i in range(1, len(tokens)))]
    prompt = replace(slots.feed_prefix(tokens), features=tuple(map(as_bytes, given)))
    logits = executor.run(prompt, (len(tokens) - 1,))[0]
    for step in range(6):
        last = plain.rows(tokens, given)[-1]  # all of the text, from scratch
        assert last is not None
        assert_close(logits, plain.logits(last))
        tokens.append(int(logits.argmax()))
        given.append(b"")
        parent = None if step == 0 else step - 1
        feed = slots.feed((), [(step, parent, tokens[-1], len(tokens) - 1)])
        logits = executor.run(feed, (0,))[0]
    assert len(set(tokens[6:])) > 1


@pytest.mark.parametrize("layout", EAGLE_LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_trees_and_roll_backs_with_what_is_known_of_each_row(
    layout: str, seed: int, eagle: LoadHead
) -> None:
    loaded, head = eagle(layout)
    executor = EagleExecutor(loaded, CAPACITY)
    session = RandomSession(seed, SlotMap(CAPACITY), vocab=VOCAB, prompt_len=70, max_rows=6)
    num_moves, num_there, num_absent = compare(executor, session.steps(20), Paths(head), seed)
    assert num_moves >= 2
    assert num_there > 60
    assert num_absent > 3


def test_a_row_that_is_fed_anew_replaces_what_was_predicted(eagle: LoadHead) -> None:
    loaded, head = eagle("eagle3")
    executor, slots, plain = EagleExecutor(loaded, CAPACITY), SlotMap[Path](CAPACITY), Paths(head)
    text: Path = (4, 8, 15, 16)
    known: list[Given] = [None, *(features_of(loaded, text[: i + 1]) for i in range(1, 4))]
    run(executor, Drawn(slots.feed_prefix(text), [text[: i + 1] for i in range(4)]), known, plain)
    drafts: list[Path] = [(*text, 23), (*text, 23, 42), (*text, 99)]
    nodes = [
        (drafts[0], None, 23, 4),
        (drafts[1], drafts[0], 42, 5),
        (drafts[2], None, 99, 4),
    ]
    predicted: list[Given] = [b""] * 3  # the second needs the first, which runs before it
    run(executor, Drawn(slots.feed((), nodes), drafts), predicted, plain)
    assert slots.advance(drafts[:2], ()) is None
    where, paths = (4, 5), drafts[:2]
    true: list[Given] = [features_of(loaded, path) for path in paths]
    anew = Feed((23, 42), where, where, 4, (1, 3))
    before = executor.run(replace(anew, features=(b"", b"")), (1,))[0]
    assert run(executor, Drawn(anew, paths), true, plain) == 2
    after = executor.run(replace(anew, features=tuple(map(as_bytes, true))), (1,))[0]
    assert not torch.allclose(before[before.isfinite()], after[after.isfinite()], atol=0.01)
    path = (*drafts[1], 7)
    assert run(executor, Drawn(slots.feed((), [(path, None, 7, 6)]), [path]), [b""], plain) == 1


def test_a_row_that_is_given_nothing_is_seen_by_nobody(eagle: LoadHead) -> None:
    loaded, head = eagle("eagle")
    executor, plain = EagleExecutor(loaded, CAPACITY), Paths(head)
    text = (1, 2, 3, 4, 5)
    paths = [text[: i + 1] for i in range(5)]
    where = tuple(range(5))
    feed = Feed(text, where, where, 0, None)
    # The third is absent, the fourth starts anew, and the first has nothing before it.
    given: list[Given] = [features_of(loaded, p) for p in paths]
    given[2] = None
    assert run(executor, Drawn(feed, paths), given, plain) == 3
    # What follows an absent row is absent, until something is given again.
    given[3] = b""
    assert run(executor, Drawn(feed, paths), given, plain) == 2
    # Without any features nothing is there, and what was there is gone.
    assert run(executor, Drawn(feed, paths), [b""] * 5, plain) == 0
    row = Feed((6,), (5,), (5,), 5, (1,))
    assert run(executor, Drawn(row, [(*text, 6)]), [b""], plain) == 0
    assert run(executor, Drawn(row, [(*text, 6)]), [features_of(loaded, (*text, 6))], plain) == 1


@pytest.mark.parametrize("layout", ["eagle", "speculators eagle3"])
def test_texts_in_several_lanes_do_not_see_each_other(layout: str, eagle: LoadHead) -> None:
    loaded, head = eagle(layout)
    executor = EagleExecutor(loaded, CAPACITY, num_lanes=3)
    sessions = [
        RandomSession(
            lane, SlotMap(CAPACITY, lane=lane), vocab=VOCAB, prompt_len=9 + lane, max_rows=1 + lane
        )
        for lane in range(3)
    ]
    plain = [Paths(head) for _ in sessions]
    num_moves = 0
    for steps in zip(*(session.steps(12, shorten=False) for session in sessions), strict=False):
        moves = [step for step in steps if isinstance(step, Move)]
        passes = [step for step in steps if isinstance(step, Drawn)]
        num_moves += len(moves)
        if moves:
            executor.move(*moves)
        if not passes:
            continue
        feeds, wanted = [], []
        for step in passes:
            # Some are given what is before them, some take what is predicted: waves differ.
            given = [features_of(loaded, p) if len(p) % 3 else b"" for p in step.paths]
            feeds.append(replace(step.feed, features=tuple(map(as_bytes, given))))
            pairs = zip(step.paths, given, strict=True)
            wanted += [plain[step.feed.lane].feed(path, one) for path, one in pairs]
        asks = [range(len(feed.tokens)) for feed in feeds]
        for got, want in zip(executor.run_together(feeds, asks), wanted, strict=True):
            if want is not None:
                assert_close(got, want)
    assert num_moves > 1


class Operators(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_no_operator_of_a_pass_of_several_lanes_makes_the_host_wait(eagle: LoadHead) -> None:
    executor = EagleExecutor(eagle("eagle3")[0], CAPACITY, num_lanes=3)
    given = bytes(executor.loaded.feature_bytes)
    feeds = [
        Feed((5,) * n, (7,) * n, tuple(range(7, 7 + n)), 7, tuple(1 << i for i in range(n)), lane)
        for lane, n in ((0, 1), (2, 3))
    ]
    feeds = [replace(feed, features=(given,) * len(feed.tokens)) for feed in feeds]
    laid_out = executor.lay_out(feeds, [range(1), range(3)])
    with Operators() as ran:
        executor.forward(laid_out)
    # On a GPU each of them reads there how large its result is.
    waits = "repeat_interleave.self_Tensor", "repeat_interleave.Tensor", "nonzero.default"
    assert not {f"aten.{name}" for name in waits} & ran.names


def test_a_prefix_is_copied_with_its_states_and_what_it_lacks(eagle: LoadHead) -> None:
    loaded, head = eagle("eagle")
    executor, plain = EagleExecutor(loaded, CAPACITY, num_lanes=2), Paths(head)
    text = (1, 2, 3, 4)
    where, paths = (0, 1, 2, 3), [text[: i + 1] for i in range(4)]
    given: list[Given] = [None, None, *(features_of(loaded, path) for path in paths[2:])]
    run(executor, Drawn(Feed(text, where, where, 0, None), paths), given, plain)
    executor.copy_prefix(0, 1, 4)
    row = Feed((9,), (4,), (4,), 4, (1,), lane=1)
    assert run(executor, Drawn(row, [(*text, 9)]), [b""], plain) == 1


def test_rows_come_in_the_order_asked_and_only_those(eagle: LoadHead) -> None:
    loaded, _ = eagle("eagle")
    executor = EagleExecutor(loaded, CAPACITY)
    where = tuple(range(4))
    given = tuple(as_bytes(feature(i, loaded.feature_size)) for i in range(4))
    feed = Feed((1, 2, 3, 4), where, where, 0, (1, 3, 7, 15), features=given)
    every = executor.run(feed, where)
    assert torch.allclose(executor.run(feed, (3, 1)), every[[3, 1]], atol=1e-5)
    # The last takes what is predicted before it, so it runs after the others.
    waves = replace(feed, features=(*given[:3], b""))
    every = executor.run(waves, where)
    assert torch.allclose(executor.run(waves, (3, 0, 2)), every[[3, 0, 2]], atol=1e-5)
    assert executor.run(waves, ()).shape == (0, VOCAB)


def test_only_tokens_of_the_draft_vocabulary_are_drafted(eagle: LoadHead) -> None:
    loaded, plain = eagle("eagle3")
    executor = EagleExecutor(loaded, CAPACITY)
    given = (None, as_bytes(feature(1, loaded.feature_size)))
    logits = executor.run(Feed((1, 2), (0, 1), (0, 1), 0, None, features=given), (1,))
    can = set(plain.weights["targets"].tolist())
    for sampling in (Sampling(), Sampling(1.0), Sampling(2.0, top_p=0.9)):
        (ids,), (scores,) = rank_scored(logits, sampling, 7, 0, [2], 30)
        assert len(ids) > 5
        assert set(ids) <= can
        assert all(score > -1e6 for score in scores)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_features_come_in_the_number_type_of_the_target(dtype: str, eagle: LoadHead) -> None:
    loaded, plain = eagle("eagle3")
    kind = getattr(torch, dtype)
    rounded = feature(3, loaded.feature_size).to(kind)
    data = rounded.view(torch.uint8).numpy().tobytes()
    executor = EagleExecutor(replace(loaded, feature_dtype=dtype), CAPACITY)
    logits = executor.run(Feed((1,), (1,), (1,), 1, (1,), features=(data,)), (0,))[0]
    row = plain.row([None], 1, rounded.float())
    assert row is not None
    assert_close(logits, plain.logits(row))


def test_features_of_a_chunk_are_joined_once_and_not_copied_again(eagle: LoadHead) -> None:
    loaded, _ = eagle("eagle")
    given = tuple(as_bytes(feature(i, loaded.feature_size)) for i in range(3))
    feed = Feed((1, 2, 3), (1, 2, 3), (1, 2, 3), 1, None, features=given)
    (wave,), _, _ = EagleExecutor(loaded, CAPACITY)._slots.waves((feed,), ((2,),))
    features = loaded.features_of(wave.features, 3)
    assert torch.equal(features, torch.stack([feature(i, loaded.feature_size) for i in range(3)]))
    assert isinstance(wave.features, bytearray)
    wave.features[:] = bytes(len(wave.features))
    assert not features.any()


def test_a_warm_executor_has_forgotten_what_it_warmed_up_with(eagle: LoadHead) -> None:
    loaded, head = eagle("eagle")
    executor, plain = EagleExecutor(loaded, CAPACITY), Paths(head)
    seconds = executor.warm_up((1, 2, 4))
    assert sorted(seconds) == [1, 2, 4]
    assert all(took > 0 for took in seconds.values())
    plain.rows[3,] = plain.rows[3, 4] = None
    row = Feed((5,), (2,), (2,), 2, (1,))
    assert run(executor, Drawn(row, [(3, 4, 5)]), [b""], plain) == 0
    assert run(executor, Drawn(row, [(3, 4, 5)]), [features_of(loaded, (3, 4, 5))], plain) == 1


def test_a_lane_of_a_head_is_wiped(eagle: LoadHead) -> None:
    loaded, _ = eagle("eagle")
    executor = EagleExecutor(loaded, CAPACITY, num_lanes=2)
    feature = bytes(loaded.feature_bytes)
    row = Feed((9,), (1,), (1,), 0, (2,), lane=1, before=(0,), features=(feature,))
    want = executor.run(row, (0,))
    executor._cache.fill_(float("nan"))
    executor._states.fill_(float("nan"))
    assert not executor.run(row, (0,))[0, 0].isfinite()
    executor.wipe(1, 0)
    assert torch.equal(executor.run(row, (0,)), want)


def test_a_head_is_computed_by_our_own_layer_where_that_can_be(
    eagle: LoadHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library(compiles=False) is None:
        pytest.skip("this process has no library")
    loaded, _ = eagle("eagle3")
    executor, runs = EagleExecutor(loaded, CAPACITY), Mock()
    assert executor._own is not None
    runs.side_effect = executor._own.run
    monkeypatch.setattr(executor._own, "run", runs)
    where = tuple(range(5))
    given = tuple(as_bytes(feature(i, loaded.feature_size)) for i in range(4))
    executor.run(Feed((1, 2, 3, 4, 5), where, where, 0, None, features=(None, *given)), (4,))
    assert runs.call_count == 1
    # Between rows that hold something one holds nothing: for torch's operators.
    hole = Feed((6,), (5,), (5,), 5, (1,), features=(None,), before=(4,))
    executor.run(hole, ())
    behind = Feed((7,), (6,), (6,), 6, (1,), features=(given[0],), before=(5,))
    assert executor.run(behind, (0,)).isfinite().any()
    assert runs.call_count == 1

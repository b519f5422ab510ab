"""What a GPU is asked for in a pass, and that nothing is recorded once a model is loaded.

The GPU is played (`stand_in.py`).
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.forward.flex_attention
import engine.forward.graphs
from engine.checkpoint.model import load_model
from engine.choice.coupling import (
    chain_choice,
    chain_inputs,
    choose,
    rank_scored,
    rare_choices,
    usual_chains,
    usual_choices,
)
from engine.choice.coupling_on_gpu import chosen_there
from engine.choice.logprobs import report
from engine.choice.sampling import Sampling
from engine.device import fetch
from engine.forward.forward import Output
from engine.forward.fused import FusedBackend
from engine.layout.slots import Feed
from engine.loading import make_executor
from engine.model_executor import ModelExecutor
from tests.engine.flex_forms import always, spelt_out
from tests.engine.stand_in import (
    BLOCKING,
    CAPTURE,
    DOWNLOAD,
    KERNEL,
    LAUNCH,
    UPLOAD,
    WAIT,
    StandIn,
    device,
)
from tests.engine.test_slot_cache import difference
from tests.tiny_models import make_model

__all__ = ["device"]  # a fixture
NUM_LANES, CAPACITY = 8, 600
ROW_COUNTS = (1, 4)
CHILDREN, CHAINS = (1, 3), (4, 2)
MOST_KERNELS = 100  # of a choice
SAMPLINGS = (
    Sampling(),
    Sampling(0.8),
    Sampling(1.1, top_p=0.95),
    Sampling(0.7, top_k=40),
    Sampling(0.7, top_k=12, top_p=0.8),
)
# Of a kind that is not recorded.
RARE_SAMPLINGS = (
    Sampling(0.8, min_p=0.05),
    Sampling(0.8, top_k=100),
    Sampling(1.0, top_k=100, top_p=0.9, min_p=0.02),
)


@pytest.fixture(params=["masked", "split"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which attention recordings have."""
    if request.param == "split":
        monkeypatch.setattr(engine.forward.graphs, "SPLIT_DEVICES", ("cpu",))
        monkeypatch.setattr(engine.forward.flex_attention, "_compiled", lambda: spelt_out)
        monkeypatch.setattr(engine.forward.flex_attention, "quickest", always("split"))
    return str(request.param)


def ready(
    folder: Path, *, num_lanes: int = NUM_LANES, children: Sequence[int] = CHILDREN
) -> ModelExecutor:
    """Loaded and warm, as a drafter; children (): as a target."""
    made = make_executor(
        load_model(str(folder), dtype="float32"),
        CAPACITY,
        num_lanes=num_lanes,
        backend="graphs",
        row_counts=ROW_COUNTS,
    )
    made.warm_up(
        (1,),
        choices=usual_choices(children),
        rare=rare_choices(children),
        chains=CHAINS if children else (),  # a target makes no steps
        chained=usual_chains() if children else (),
    )
    return made


def a_step(start: int, num_rows: int, lane: int = 0) -> Feed:
    where = tuple(range(start, start + num_rows))
    masks = tuple((2 << i) - 1 for i in range(num_rows))
    return Feed((5,) * num_rows, where, where, start, masks, lane)


def test_a_pass_is_two_uploads_two_launches_and_a_download(
    form: str, device: StandIn, tmp_path: Path
) -> None:
    target = ready(make_model("llama", tmp_path), num_lanes=3, children=())
    for sampling in SAMPLINGS:
        for lane, start, num_rows in ((0, 3, 1), (1, 300, 4), (2, 40, 3)):
            laid_out = target.lay_out([a_step(start, num_rows, lane)], [range(num_rows)])
            with device.watch() as noted:
                logits = target.forward(laid_out).logits
                choose(logits, sampling, 7, 0, range(num_rows))
            assert noted == [UPLOAD, LAUNCH, UPLOAD, LAUNCH, DOWNLOAD, WAIT]


def test_a_level_of_a_tree_asks_for_no_more(form: str, device: StandIn, tmp_path: Path) -> None:
    drafter = ready(make_model("llama", tmp_path), num_lanes=3)
    for sampling in SAMPLINGS:
        laid_out = drafter.lay_out([a_step(70, 3, 2)], [range(3)])
        with device.watch() as noted:
            logits = drafter.forward(laid_out).logits
            rank_scored(logits, sampling, 7, 0, range(3), 3, num_valid=150)
        assert noted == [UPLOAD, LAUNCH, UPLOAD, LAUNCH, DOWNLOAD, WAIT]


def test_rows_behind_others_are_chosen_from_where_they_lie(
    form: str, device: StandIn, tmp_path: Path
) -> None:
    drafter = ready(make_model("llama", tmp_path, scale=0.5), num_lanes=3)
    feed = a_step(70, 4, 2)
    wanted = rank_scored(drafter.run(feed, (2, 3)), Sampling(0.8), 7, 0, (5, 6), 3, num_valid=150)
    laid_out = drafter.lay_out([feed], [(2, 3)])
    with device.watch() as noted:
        logits = drafter.forward(laid_out).logits
        found = rank_scored(logits, Sampling(0.8), 7, 0, (5, 6), 3, num_valid=150)
    assert noted == [UPLOAD, LAUNCH, UPLOAD, LAUNCH, DOWNLOAD, WAIT]
    assert found == wanted


@pytest.mark.parametrize("sampling", SAMPLINGS[1:3], ids=str)
def test_a_chain_of_steps_is_one_upload_and_one_launch_in_any_lane(
    sampling: Sampling, form: str, device: StandIn, tmp_path: Path
) -> None:
    drafter = ready(make_model("llama", tmp_path, scale=0.5), num_lanes=3)
    for lane, start in ((0, 30), (2, 280)):
        feeds = [
            Feed((5,), (start + i,), (start + i,), start, ((2 << i) - 1,), lane) for i in range(4)
        ]
        choice = chain_choice(sampling, num_valid=150)
        inputs = chain_inputs(sampling, 3, 1, range(start + 1, start + 5), num_valid=150)
        assert drafter.can_chain(feeds, choice)
        assert not drafter.can_chain(feeds[:3], choice), "of so many steps there is none"
        with device.watch() as noted:
            tokens, _ = chosen_there(drafter.run_chain(feeds, choice, inputs))()
        assert noted == [UPLOAD, LAUNCH, DOWNLOAD, WAIT]
        token = 5
        for feed, found in zip(feeds, tokens, strict=True):
            one = Feed((token,), feed.positions, feed.slots, start, feed.masks, lane)
            logits = drafter.run(one, (0,))
            where = [feed.positions[0] + 1]
            ((token,),), _ = rank_scored(logits, sampling, 3, 1, where, 1, num_valid=150)
            assert token == found
    assert drafter.num_late == 0


@pytest.mark.parametrize("children", [(), (3,)], ids=["target", "drafter"])
def test_nothing_is_recorded_and_nothing_blocks_once_a_model_is_loaded(
    children: Sequence[int], form: str, device: StandIn, tmp_path: Path
) -> None:
    num_lanes = 5  # more than a power of two
    graphs = ready(make_model("llama", tmp_path), num_lanes=num_lanes, children=children)
    num_captures = device.num_captures
    draw = random.Random(1)
    seen = set()
    with device.watch() as noted:
        for _ in range(60):
            lanes = draw.sample(range(num_lanes), draw.randint(1, num_lanes))
            feeds = [a_step(draw.randint(0, CAPACITY - 5), draw.randint(1, 4), i) for i in lanes]
            asks = [range(draw.randrange(len(feed.tokens)), len(feed.tokens)) for feed in feeds]
            logits = graphs.forward(graphs.lay_out(feeds, asks)).logits
            start = 0
            for ask in asks:
                rows = logits[start : start + len(ask)]
                sampling = draw.choice(SAMPLINGS + RARE_SAMPLINGS)
                start += len(ask)
                if children:
                    count = draw.choice(children)
                    rank_scored(rows, sampling, 7, 0, range(len(ask)), count, num_valid=150)
                else:
                    choose(rows, sampling, 7, 0, range(len(ask)))
            seen.add(len(lanes))
    assert seen == set(range(1, num_lanes + 1))
    assert device.num_captures == num_captures
    assert not {CAPTURE, BLOCKING} & set(noted)
    assert (graphs.num_late, graphs.num_uncaptured) == (0, 0)


def test_what_heads_beside_a_target_choose_is_recorded_at_load(
    device: StandIn, tmp_path: Path
) -> None:
    loaded = load_model(str(make_model("llama", tmp_path)), dtype="float32")
    target = make_executor(loaded, CAPACITY, backend="graphs", row_counts=ROW_COUNTS)
    target.warm_up((1,), choices=usual_choices(()), beside=usual_choices((3,)))
    num_captures = device.num_captures
    with device.watch() as noted:
        logits = target.run(a_step(3, 4), range(4))  # a copy, as those of a head are elsewhere
        rank_scored(logits, Sampling(0.8), 7, 0, range(4), 3, num_valid=150)
    assert noted.count(LAUNCH) == 2, "of the pass, and of the choice"
    assert noted.count(KERNEL) < 10
    assert (device.num_captures, target.num_late) == (num_captures, 0)


def test_log_probabilities_are_a_download_and_no_row(device: StandIn, tmp_path: Path) -> None:
    target = ready(make_model("llama", tmp_path), num_lanes=1, children=())
    logits = target.forward(target.lay_out([a_step(3, 4)], [range(4)])).logits
    with device.watch() as noted:
        report(logits, (5, 6, 7, 8), 3)
    assert [what for what in noted if what != KERNEL] == [DOWNLOAD, WAIT]


def test_memory_for_features_is_pinned_before_a_text_comes(device: StandIn, tmp_path: Path) -> None:
    target = make_executor(
        load_model(str(make_model("llama", tmp_path)), dtype="float32"),
        CAPACITY,
        backend="graphs",
        row_counts=(1,),
        layers=(1, 0),
    )
    target.pads_prompts = True
    target.warm_up(())
    locked = list(device.locked)
    for length in (CAPACITY, 1, 3, 70, 300):
        where = tuple(range(length))
        feed = Feed((5,) * length, where, where, 0, None)
        features = target.forward(target.lay_out([feed], [()]), (1, 0)).features
        assert features is not None
        assert fetch(features).shape == (length, 2 * 64)
    assert device.locked == locked


@pytest.mark.parametrize("num_lanes", [1, 3])
def test_nothing_is_recorded_of_prompts_and_of_rows_with_penalties(
    num_lanes: int, device: StandIn, tmp_path: Path
) -> None:
    target = ready(make_model("llama", tmp_path), num_lanes=num_lanes, children=())
    where = tuple(range(70))
    for _ in range(4):
        logits = target.run(Feed(where, where, where, 0, None), (69,))
        changed = target.run(a_step(70, 4), range(4)) - 1.0
        for sampling in SAMPLINGS:
            choose(logits, sampling, 7, 0, (70,))
            choose(changed, sampling, 7, 0, range(71, 75))
    assert (target.num_late, target.num_uncaptured) == (0, 0)


@pytest.mark.parametrize("sampling", RARE_SAMPLINGS, ids=str)
def test_a_rare_choice_is_made_kernel_by_kernel_however_often_it_comes(
    sampling: Sampling, device: StandIn, tmp_path: Path
) -> None:
    target = ready(make_model("llama", tmp_path), num_lanes=1, children=())
    num_captures = device.num_captures
    logits = target.forward(target.lay_out([a_step(3, 4)], [range(4)])).logits
    for _ in range(4):
        with device.watch() as noted:
            choose(logits, sampling, 7, 0, (4, 5, 6, 7))
        assert [what for what in noted if what != KERNEL] == [DOWNLOAD, WAIT]
        # Of some microseconds each: the choice takes far less than a recording would.
        assert 30 < noted.count(KERNEL) < MOST_KERNELS
    assert (device.num_captures, target.num_late) == (num_captures, 0)


@pytest.mark.parametrize("lanes", [(7,), (6, 0, 3), (1, 2, 4, 6, 7)])
def test_a_recording_serves_any_lanes(
    lanes: tuple[int, ...], form: str, device: StandIn, tmp_path: Path
) -> None:
    folder = make_model("llama", tmp_path, scale=0.5)
    graphs = ready(folder, children=())
    alone = make_executor(load_model(str(folder), dtype="float32"), CAPACITY, backend="reference")
    cache = graphs._backend.cache  # type: ignore[union-attr]
    cache.fill_(float("nan"))  # whoever reads of another lane has no numbers
    feeds, wants = [], []
    for lane in lanes:
        length, num_rows = 40 + 70 * lane, 1 + lane % 4
        graphs.wipe(lane, 0)
        where = tuple(range(length))
        for executor, into in ((graphs, lane), (alone, 0)):
            prompt = tuple((lane + 3 * i) % 190 for i in where)
            executor.run(Feed(prompt, where, where, 0, None, into), ())
        feeds.append(a_step(length, num_rows, lane))
        wants.append(alone.run(a_step(length, num_rows), range(num_rows)))
    unused = next(lane for lane in (*range(NUM_LANES),) if lane not in lanes)
    for lane in range(NUM_LANES):
        if lane not in lanes:  # fills a pass up, and has been wiped as whatever a text leaves is
            graphs.wipe(lane, 0)
    cache[:, :, graphs.lanes.first_slot(unused) + 5] = 1e30
    asks = [range(len(feed.tokens)) for feed in feeds]
    got = graphs.run_together(feeds, asks)
    assert difference(got, torch.cat(wants)) < 1e-5
    assert graphs.num_late == 0


@pytest.mark.parametrize("counts", [(5,), (32,), (33,), (64,), (20, 3), (60, 64, 1), (4, 30, 31)])
def test_passes_larger_than_recordings_have_numbers_of_rows_that_ran_at_load(
    counts: tuple[int, ...], device: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows: list[int] = []
    forward = FusedBackend.forward

    def spy(self: FusedBackend, rows: torch.Tensor, *args: Any, **options: Any) -> Output:
        num_rows.append(rows.shape[1])
        return forward(self, rows, *args, **options)

    monkeypatch.setattr(FusedBackend, "forward", spy)
    folder = make_model("llama", tmp_path, scale=0.5)
    graphs = ready(folder, num_lanes=4, children=())
    at_load = {rows for rows in num_rows if rows in (32, 64, 128, 256)}
    assert (graphs.num_late, graphs.num_uncaptured) == (0, 0)
    alone = make_executor(load_model(str(folder), dtype="float32"), CAPACITY, backend="reference")
    feeds = [a_step(0, count, lane) for lane, count in enumerate(counts)]
    num_rows.clear()
    asks = [range(count // 3, count) for count in counts]
    got = graphs.run_together(feeds, asks)
    wants = [alone.run(a_step(0, len(ask) + ask.start), ask) for ask in asks]
    assert difference(got, torch.cat(wants)) < 1e-5
    assert len(num_rows) == 1
    assert set(num_rows) <= at_load
    assert graphs.num_uncaptured == 1


def test_memory_of_recordings_outlives_whatever_else_runs(device: StandIn, tmp_path: Path) -> None:
    graphs = ready(make_model("llama", tmp_path), children=())
    attention = graphs._backend._fused._attention  # type: ignore[union-attr]
    shapes = [(lanes, rows) for lanes in (1, 2, 4, 8) for rows in ROW_COUNTS]
    rooms = [attention.room(shape) for shape in shapes]
    places = [room.look.beside.data_ptr() for room in rooms]
    assert len(set(places)) == len(shapes)
    for number in range(100):  # layouts that nothing is recorded of
        counts = (5 + number // 10, 1 + number % 10)
        feeds = [a_step(3, count, lane) for lane, count in enumerate(counts)]
        graphs.run_together(feeds, [(0,)] * 2)
    assert [attention.room(shape) for shape in shapes] == rooms
    assert [room.look.beside.data_ptr() for room in rooms] == places
    assert not {id(look) for looks in attention._looks.values() for look in looks} & {
        id(room.look) for room in rooms
    }

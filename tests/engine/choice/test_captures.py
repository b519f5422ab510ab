"""Choices as recordings, and steps of a draft in one of them: the same as kernel by kernel."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.choice.first_uses
import engine.forward.graphs
from engine.checkpoint.model import load_model
from engine.choice.coupling import chain_choice, chain_inputs, rank_scored, row_keys
from engine.choice.coupling_on_gpu import (
    Choice,
    _captures,
    capture_on,
    choice_of,
    choose_there,
    chosen_there,
    rank_there,
    record_choices,
)
from engine.choice.logit_graphs import Captures, Compute
from engine.choice.processors import BannedWords, Bias, MinTokens, Penalties
from engine.choice.sampling import Sampling
from engine.forward.forward import Layers
from engine.forward.graphs import RanShort
from engine.layout.slots import Feed
from engine.loading import make_executor
from engine.model_executor import ModelExecutor
from engine.room import FEWEST_PROMPT_ROWS
from tests.engine.choice.test_device_choice import SETTINGS, some_logits
from tests.engine.forward.test_graphs import NUM_SLOTS, recordings
from tests.engine.stand_in import StandIn, device
from tests.tiny_models import make_model

__all__ = ["device", "recordings"]  # fixtures
CPU = torch.device("cpu")


class Recorder:
    """Computes again on the tensors that it was given first."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0
        self.is_broken = False

    def __call__(
        self, compute: Compute, integers: torch.Tensor, *, is_warm: bool = False
    ) -> Compute:
        if self.is_broken:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.num_recorded += 1
        there = integers.clone()

        def replay(integers: torch.Tensor) -> torch.Tensor:
            self.num_replayed += 1
            there.copy_(integers)
            return compute(there)

        return replay


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """What records choices on the CPU from now on."""
    made = Recorder()
    capture_on(CPU, Captures(made))
    yield made
    capture_on(CPU, None)


def record(sampling: Sampling) -> None:
    """As at load: what `choices` makes of one setting."""
    kinds = (choice_of(sampling, 1.0, None), choice_of(sampling, 1.0, None, 3))
    record_choices(kinds, some_logits(4, 500), (4,))


def choices(sampling: Sampling, seeds: Sequence[int]) -> list[object]:
    found: list[object] = []
    for seed in seeds:
        logits, keys = some_logits(4, 500, seed), row_keys(seed, 0, range(seed, seed + 4))
        warmer = Sampling(
            sampling.temperature * (1 + seed / 10), sampling.top_k, sampling.top_p, sampling.min_p
        )
        found.append(choose_there(logits, warmer, keys)())
        found.append(rank_there(logits, warmer, keys, 3, beta=1.0)())
    return found


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_recorded_choices_are_those_that_are_not(sampling: Sampling, recorder: Recorder) -> None:
    seeds = range(5)
    wanted = choices(sampling, seeds)
    assert (recorder.num_recorded, recorder.num_replayed) == (0, 0), "nothing is unless it is asked"
    record(sampling)
    record(sampling)
    assert choices(sampling, seeds) == wanted
    # One for each of the two, whatever the keys and the temperature.
    assert (recorder.num_recorded, recorder.num_replayed) == (2, 2 * len(seeds))


def test_choices_that_cannot_be_recorded_are_made_all_the_same(recorder: Recorder) -> None:
    recorder.is_broken = True
    record(Sampling(0.8))
    found = choices(Sampling(0.8), range(3))
    recorder.is_broken = False
    assert choices(Sampling(0.8), range(3)) == found
    assert (recorder.num_recorded, recorder.num_replayed) == (0, 0)
    capture_on(CPU, None)
    assert found == choices(Sampling(0.8), range(3))


def executor(folder: Path) -> ModelExecutor:
    loaded = load_model(str(folder), dtype="float32")
    return make_executor(loaded, NUM_SLOTS, backend="graphs", row_counts=(1,))


@pytest.mark.parametrize(
    ("sampling", "start"),
    [(Sampling(), 254), (Sampling(0.8), 40), (Sampling(1.0, top_k=20), 40)],
    ids=str,
)
def test_a_chain_of_steps_is_the_steps_one_by_one(
    sampling: Sampling, start: int, tmp_path: Path, recordings: list[int]
) -> None:
    """Also across a length at which another recording takes over (256 slots)."""
    graphs = executor(make_model("llama", tmp_path, scale=0.5))
    prompt = tuple(7 * i % 90 for i in range(start))
    where = tuple(range(start))
    graphs.run(Feed(prompt, where, where, 0, None), ())
    feeds = [Feed((5,), (start + i,), (start + i,), start, ((2 << i) - 1,)) for i in range(3)]
    positions = [start + 1 + i for i in range(3)]
    token, tokens, scores = 5, [], []
    for feed, position in zip(feeds, positions, strict=True):
        one = Feed((token,), feed.positions, feed.slots, feed.prefix_len, feed.masks)
        ((token,),), ((score,),) = rank_scored(
            graphs.run(one, (0,)), sampling, 3, 1, [position], 1, num_valid=90
        )
        tokens.append(token)
        scores.append(score)
    assert len(set(tokens)) > 1
    num_recorded = len(recordings)
    choice = chain_choice(sampling, num_valid=90)
    inputs = chain_inputs(sampling, 3, 1, positions, num_valid=90)
    for _ in range(2):
        made = chosen_there(graphs.run_chain(feeds, choice, inputs))()
        assert made[0] == tokens
        assert made[1] == pytest.approx(scores, abs=1e-4)
    assert len(recordings) == num_recorded + 1


def test_a_chain_that_cannot_be_recorded_is_not_offered(
    tmp_path: Path, recordings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = executor(make_model("llama", tmp_path, scale=0.5))
    feeds = [Feed((5,), (i,), (i,), 0, ((2 << i) - 1,)) for i in range(2)]
    choice = chain_choice(Sampling())
    inputs = chain_inputs(Sampling(), 0, 0, [1, 2])
    assert not graphs.can_chain(feeds, choice)
    wanted = graphs.run_chain(feeds, choice, inputs).clone()
    assert graphs.can_chain(feeds, choice)
    backend = graphs._backend
    assert isinstance(backend, engine.forward.graphs.GraphBackend)
    backend._chains.clear()

    def fails(*_: object, **__: object) -> Compute:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(backend, "_record", fails)
    assert torch.equal(graphs.run_chain(feeds, choice, inputs), wanted)
    assert not graphs.can_chain(feeds, choice)


@pytest.mark.parametrize("fixed_rows", [None, 4])
def test_prompts_are_filled_up_so_that_kernels_see_few_numbers_of_rows(
    fixed_rows: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(str(make_model("llama", tmp_path, scale=0.5)), dtype="float32")
    plain = ModelExecutor(loaded, NUM_SLOTS, backend="reference")
    padded = ModelExecutor(loaded, NUM_SLOTS, num_lanes=2, fixed_rows=fixed_rows, row_counts=(1,))
    padded.pads_prompts = True
    padded.set_total(NUM_SLOTS if fixed_rows else None)
    seen: list[int] = []
    forward = padded._backend.forward  # type: ignore[union-attr]

    def spy(rows: torch.Tensor, *args: object, **options: object) -> object:
        seen.append(rows.shape[1])
        return forward(rows, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(padded._backend, "forward", spy)
    start = 0
    for length in (1, 3, 64, 65, 100):
        where = tuple(range(start, start + length))
        feed = Feed(tuple(i * 5 % 80 for i in where), where, where, start, None)
        for ask in ((length - 1,), range(length)):
            got, want = padded.run(replace(feed, lane=1), ask), plain.run(feed, ask)
            assert got.shape == want.shape
            assert float((got - want).abs().max()) < 1e-4
        start += length
    assert set(seen) == {FEWEST_PROMPT_ROWS, 128}


@pytest.mark.parametrize(
    ("capacity", "fixed_rows", "num_lanes", "expected"),
    [
        (64, None, 1, {64}),
        (300, None, 2, {64, 128, 256, 512}),
        (300, 4, 1, {64, 128, 256, 512}),
        (300, 4, 2, {64, 128, 256, 512}),
    ],
)
def test_prompts_of_all_numbers_of_rows_are_run_before_a_text_comes(
    capacity: int,
    fixed_rows: int | None,
    num_lanes: int,
    expected: set[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = load_model(str(make_model("llama", tmp_path)), dtype="float32")
    executor = ModelExecutor(
        *(loaded, capacity),
        num_lanes=num_lanes,
        fixed_rows=fixed_rows,
        row_counts=(1,),
        layers=(1,),
    )
    executor.pads_prompts = True
    seen: list[tuple[int, Layers]] = []
    forward = executor._backend.forward  # type: ignore[union-attr]

    def spy(rows: torch.Tensor, *args: object, layers: Layers, **options: object) -> object:
        seen.append((rows.shape[1], layers))
        return forward(rows, *args, layers=layers, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(executor._backend, "forward", spy)
    executor.warm_up((), choices=())
    assert set(seen) == {(num_rows, layers) for num_rows in expected for layers in ((), (1,))}
    assert not any(part.any() for part in executor._backend.cache.parts())  # type: ignore[union-attr]
    # The longest first, whose memory the others reuse; and so again, where it was given back.
    sizes = [num_rows for num_rows, _ in seen]
    assert sizes == sorted(sizes, reverse=True)
    total, first = executor._total, list(seen)
    seen.clear()
    executor.warm_up_prompts()
    assert (seen, executor._total) == (first, total)
    assert not any(part.any() for part in executor._backend.cache.parts())  # type: ignore[union-attr]


def test_what_few_texts_ask_of_a_gpu_is_run_before_a_text_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(str(make_model("llama", tmp_path)), dtype="float32")
    executor = ModelExecutor(loaded, 64, num_lanes=2, row_counts=(1, 4))
    executor.pads_prompts = True
    monkeypatch.setattr(type(executor._backend), "row_counts", (1, 4), raising=False)
    seen: dict[str, list[int]] = {}

    def watch(owner: object, name: str) -> None:
        right = getattr(owner, name)

        def spy(first: Any, *args: Any, **options: Any) -> object:
            rows = args[-1] if name == "there" else first
            seen.setdefault(name, []).append(len(rows) if torch.is_tensor(rows) else rows)
            return right(first, *args, **options)

        monkeypatch.setattr(owner, name, spy)

    for name in ("judge_there", "candidates_there", "report_there"):
        watch(engine.choice.first_uses, name)
    for name in ("not_finite", "copy"):
        watch(executor._backend, name)
    kinds = (BannedWords, MinTokens, Bias, Penalties)
    for kind in kinds:
        watch(kind, "there")
    executor.warm_up((), choices=())
    for name in ("judge_there", "report_there", "there"):
        assert set(seen[name]) == {1, 4}, "libraries have kernels of their own for one row"
    assert len(seen["there"]) == 2 * len(kinds)
    assert {*seen} == {
        "judge_there",
        "candidates_there",
        "report_there",
        "there",
        "not_finite",
        "copy",
    }
    assert not any(part.any() for part in executor._backend.cache.parts())  # type: ignore[union-attr]


def test_recordings_share_a_stream_which_is_left_whatever_happens(device: StandIn) -> None:
    record = engine.forward.graphs.recorder(CPU)
    rows = torch.zeros(5, 1, dtype=torch.int64)
    for _ in range(3):
        assert torch.equal(record(lambda there: there + 1, rows)(rows + 4), rows + 5)
        assert device.current is device.usual
    assert len(device.streams) == 1, "each stream keeps a workspace"
    assert device.captured_on is device.streams[0]
    assert device.num_captures == 3
    device.raises = True
    with pytest.raises(RuntimeError, match="previous error"):
        record(lambda there: there + 1, rows)
    assert device.current is device.usual


@pytest.mark.parametrize(("options", "num_runs"), [({}, 3), ({"is_warm": True}, 1)])
def test_what_is_warm_is_recorded_at_once(
    options: dict[str, bool], num_runs: int, device: StandIn
) -> None:
    ran: list[int] = []

    def compute(there: torch.Tensor) -> torch.Tensor:
        ran.append(len(ran))
        return there + 1

    rows = torch.zeros(5, 1, dtype=torch.int64)
    replay = engine.forward.graphs.recorder(CPU)(compute, rows, **options)
    assert torch.equal(replay(rows + 4), rows + 5)
    assert len(ran) == num_runs


def test_lack_of_memory_in_a_run_before_a_recording_says_so(device: StandIn) -> None:
    # Other ranks wait in the sums of such a run, and not in those of a capture.
    def compute(there: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    record, rows = engine.forward.graphs.recorder(CPU), torch.zeros(5, 1, dtype=torch.int64)
    with pytest.raises(RanShort, match="out of memory"):
        record(compute, rows)
    with pytest.raises(torch.OutOfMemoryError):
        record(compute, rows, is_warm=True)
    assert device.current is device.usual


def test_recordings_share_a_pool_until_a_capture_in_it_has_failed(device: StandIn) -> None:
    record = engine.forward.graphs.recorder(CPU)
    rows = torch.zeros(5, 1, dtype=torch.int64)
    before = [record(lambda there: there + 1, rows) for _ in range(2)]
    with pytest.raises(RuntimeError, match="when stream is capturing"):
        record(lambda there: there + int(there.sum()), rows)
    after = [record(lambda there: there + 1, rows) for _ in range(2)]
    for replay in before + after:
        assert torch.equal(replay(rows + 4), rows + 5)
    first, _, third, _ = device.pools
    assert device.pools == [first, first, third, third]
    assert first != third


def test_what_waits_for_the_host_cannot_be_recorded(device: StandIn) -> None:
    record = engine.forward.graphs.recorder(CPU)
    with pytest.raises(RuntimeError, match="when stream is capturing"):
        record(lambda there: there + int(there.sum()), torch.ones(4, dtype=torch.int64))
    assert device.current is device.usual


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "kernel by kernel"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_choice_has_as_many_rows_whether_it_is_recorded_or_not(
    *, is_recorded: bool, in_place: bool
) -> None:
    # A GPU's kernels, and so the last bits of a sum, are chosen by the number of rows.
    num_rows: list[int] = []

    def work(logits: torch.Tensor, integers: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(logits))
        return logits + integers[: len(logits), None]

    place = torch.zeros(4, 5)
    recorder = Recorder()
    captures = Captures(recorder if is_recorded else None, (1, 4), place)
    logits = place[1:3] if in_place else torch.empty(2, 5)
    captures.record("work", work, logits, torch.tensor([7, 8, 9]))
    assert recorder.num_recorded == is_recorded
    for _ in range(4):
        logits.copy_(torch.randn(2, 5))
        found = captures.run("work", work, logits, torch.tensor([7, 8, 9]))
        assert torch.equal(found, logits + torch.tensor([[7], [8]]))
    assert set(num_rows) == {4}


@pytest.mark.parametrize("backend", ["fused", "reference"])
@pytest.mark.parametrize("fixed_rows", [None, 4])
def test_a_backend_without_recordings_records_no_choice_also_behind_one_with_them(
    backend: str, fixed_rows: int | None, device: StandIn, tmp_path: Path
) -> None:
    loaded = load_model(str(make_model("llama", tmp_path)), dtype="float32")
    ModelExecutor(loaded, NUM_SLOTS, backend="graphs", row_counts=(1,))
    other = ModelExecutor(loaded, NUM_SLOTS, backend=backend, fixed_rows=fixed_rows)
    num_captures = device.num_captures
    found = []
    for num_rows in (4, 1, 2) * 4:
        logits = some_logits(4, 199, 0)[:num_rows]
        found.append(choose_there(logits, Sampling(0.8), row_keys(3, 0, range(num_rows)))())
    assert device.num_captures == num_captures
    assert found[3:] == found[:-3]
    assert other.backend == backend
    captures = _captures.get(CPU)
    assert (captures is None) is (fixed_rows is None), "left by the backend that was there before"


def test_reproducible_choices_have_the_rows_of_a_pass(
    device: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(str(make_model("llama", tmp_path)), dtype="float32")
    ModelExecutor(loaded, NUM_SLOTS, backend="fused", fixed_rows=4)
    seen: list[int] = []
    of = Choice.of

    def spied(choice: Choice, logits: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        seen.append(len(logits))
        return of(choice, logits, inputs)

    monkeypatch.setattr(Choice, "of", spied)
    for num_rows in (1, 2, 4):
        logits = some_logits(4, 199, 0)[:num_rows]
        choose_there(logits, Sampling(0.8), row_keys(3, 0, range(num_rows)))()
    assert seen == [4, 4, 4]

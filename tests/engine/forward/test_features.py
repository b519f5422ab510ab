"""A forward hands out hidden states of all its rows, if asked: transformers' own."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.checkpoint.families import FUSED
from engine.checkpoint.model import load_model
from engine.errors import ModelError
from engine.forward.forward import LAST, Layers, Output
from engine.forward.graphs import GraphBackend
from engine.layout.slots import Feed
from engine.loading import Engine, load_engine, make_executor
from engine.model_executor import ModelExecutor
from tests.engine.conftest import Load
from tests.engine.forward.test_graphs import recordings  # noqa: F401 (a fixture)
from tests.engine.test_slot_cache import TOLERANCE, difference
from tests.tiny_models import SUPPORTED, make_model

LAYERS = (2, LAST, 0)  # of models of three
OTHERS = (1,)
SIZE = 64
TEXT = tuple(i * i % 199 for i in range(40))
NUM_BEFORE = 30


def chunk(shift: int = 0) -> Feed:
    """The first tokens of a text, each `shift` larger."""
    where = tuple(range(NUM_BEFORE))
    return Feed(tuple((token + shift) % 199 for token in TEXT[:NUM_BEFORE]), where, where, 0, None)


def rows(count: int, shift: int = 0) -> Feed:
    """The next `count` tokens, as a chain behind them."""
    where = tuple(range(NUM_BEFORE, NUM_BEFORE + count))
    tokens = tuple((TEXT[i] + shift) % 199 for i in where)
    return Feed(tokens, where, where, NUM_BEFORE, tuple((2 << i) - 1 for i in range(count)))


def transformers_own(folder: str, layers: Layers = LAYERS, shift: int = 0) -> torch.Tensor:
    """The features [40, len(layers) * SIZE] of a plain forward."""
    ids = torch.tensor([[(token + shift) % 199 for token in TEXT]])
    with torch.inference_mode():
        out = load_model(folder).model(ids, use_cache=False, output_hidden_states=True)
    return torch.cat([out.hidden_states[layer][0] for layer in layers], dim=1)


def forward(
    executor: ModelExecutor, feeds: Sequence[Feed], asks: Sequence[Sequence[int]], layers: Layers
) -> Output:
    """Lay a pass out and run it; the logits stay when the next one runs."""
    out = executor.forward(executor.lay_out(feeds, asks), layers)
    return Output(out.logits.clone(), out.features)


def error(out: Output, want: torch.Tensor) -> float:
    """The largest difference of any row of any layer, relative to its largest number."""
    assert out.features is not None
    assert out.features.shape == want.shape
    parts = zip(out.features.split(SIZE, 1), want.split(SIZE, 1), strict=True)
    return max(difference(got, of_layer) for got, of_layer in parts)


def check(executor: ModelExecutor, want: torch.Tensor, layers: Layers = LAYERS) -> None:
    """Hold a prefill and passes of several rows to `want`: all rows, whoever's logits are asked."""
    out = forward(executor, [chunk()], [(29, 3)], layers)
    assert error(out, want[:NUM_BEFORE]) < TOLERANCE
    assert len(out.logits) == 2
    for count, ask in ((1, (0,)), (3, (1,)), (2, ()), (3, (2, 1, 0)), (4, (3,))):
        feed = rows(count)
        out = forward(executor, [feed], [ask], layers)
        assert error(out, want[NUM_BEFORE : NUM_BEFORE + count]) < TOLERANCE
        plain = forward(executor, [feed], [ask], ())
        assert plain.features is None
        assert out.logits.shape == plain.logits.shape == (len(ask), 199)
        assert not ask or difference(out.logits, plain.logits) < TOLERANCE


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_the_reference_gives_them(architecture: str, load: Load) -> None:
    loaded = load(architecture)
    check(ModelExecutor(loaded, 128), transformers_own(loaded.name))


@pytest.mark.parametrize("architecture", FUSED)
def test_the_fused_forward_gives_them(architecture: str, tmp_path: Path) -> None:
    folder = str(make_model(architecture, tmp_path, scale=0.5))
    executor = make_executor(load_model(folder), 128, backend="fused", layers=LAYERS)
    check(executor, transformers_own(folder))
    check(executor, transformers_own(folder, (1, 2)), (1, 2))


@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_rows_that_fill_a_pass_up_have_none(backend: str, load: Load) -> None:
    loaded = load("qwen3")
    executor = ModelExecutor(loaded, 128, fixed_rows=5, backend=backend)
    executor.set_total(128)
    check(executor, transformers_own(loaded.name))


@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_a_prompt_that_is_filled_up_has_those_of_its_tokens(backend: str, load: Load) -> None:
    loaded = load("llama")
    executor = ModelExecutor(loaded, 128, backend=backend, row_counts=(1,))
    executor.pads_prompts = True
    check(executor, transformers_own(loaded.name))


def test_they_are_what_enters_a_layer_and_what_the_output_matrix_multiplies(load: Load) -> None:
    loaded = load("llama")
    seen: list[torch.Tensor] = []
    parts = (loaded.model.model.layers[1], loaded.model.lm_head)
    hooks = [
        part.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].clone()))
        for part in parts
    ]
    with torch.inference_mode():
        loaded.model(torch.tensor([TEXT]), use_cache=False)
    for hook in hooks:
        hook.remove()
    want = torch.cat(seen, dim=1)
    for backend in ("reference", "fused"):
        out = forward(ModelExecutor(loaded, 128, backend=backend), [chunk()], [()], (1, LAST))
        assert error(out, want[:NUM_BEFORE]) < TOLERANCE


@pytest.mark.parametrize(
    ("backend", "fixed_rows"),
    [("reference", None), ("reference", 4), ("fused", None), ("fused", 4), ("graphs", None)],
)
@pytest.mark.usefixtures("recordings")
def test_those_of_several_lanes_come_feed_by_feed(
    backend: str, fixed_rows: int | None, load: Load
) -> None:
    loaded = load("qwen3")
    executor = ModelExecutor(
        loaded,
        128,
        num_lanes=4,
        fixed_rows=fixed_rows,
        backend=backend,
        row_counts=(2, 4),
        layers=LAYERS,
    )
    executor.set_total(128)
    feeds, wants = [], []
    for lane, count in ((3, 1), (0, 3), (1, 2)):
        shift = 7 * lane
        forward(executor, [replace(chunk(shift), lane=lane)], [()], ())
        feeds.append(replace(rows(count, shift), lane=lane))
        own = transformers_own(loaded.name, shift=shift)
        wants.append(own[NUM_BEFORE : NUM_BEFORE + count])
    out = forward(executor, feeds, [(), (1, 0), (1,)], LAYERS)
    assert error(out, torch.cat(wants)) < TOLERANCE
    assert out.logits.shape == (3, 199)
    forward(executor, feeds, [(), (), ()], ())
    again = forward(executor, feeds[1:], [(0,), ()], LAYERS)
    assert error(again, torch.cat(wants[1:])) < TOLERANCE


def test_recordings_hand_out_what_is_said_at_load(
    load: Load,
    recordings: list[int],  # noqa: F811
) -> None:
    loaded = load("llama")
    graphs = ModelExecutor(loaded, 128, backend="graphs", row_counts=(1, 2, 4), layers=LAYERS)
    graphs.warm_up(())
    assert len(recordings) == 3, "with hidden states and without they are the same"
    check(graphs, transformers_own(loaded.name))
    assert (len(recordings), graphs.num_uncaptured) == (3, 0)
    check(graphs, transformers_own(loaded.name, OTHERS), OTHERS)
    assert len(recordings) == 3
    assert graphs.num_uncaptured == 5  # decode passes


def test_a_pass_without_a_recording_hands_them_out_all_the_same(
    load: Load,
    recordings: list[int],  # noqa: F811
) -> None:
    loaded = load("llama")
    graphs = ModelExecutor(loaded, 128, backend="graphs", row_counts=(1, 2, 4), layers=LAYERS)
    assert isinstance(graphs._backend, GraphBackend)
    graphs._backend.is_loading = False
    check(graphs, transformers_own(loaded.name))
    assert recordings == []


class Operators(TorchDispatchMode):
    """Lists the operators that run, and the shapes that they give."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, object]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        made = func(*args, **(kwargs or {}))
        self.ran.append((str(func), getattr(made, "shape", None)))
        return made


def operators(executor: ModelExecutor, layers: Layers) -> list[tuple[str, object]]:
    """What a decode pass of which one row is asked runs, the second time."""
    forward(executor, [chunk()], [()], ())
    step = executor.lay_out([rows(4)], [(3,)])
    executor.forward(step, layers)
    with Operators() as listed:
        executor.forward(step, layers)
    return listed.ran


@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_a_pass_that_asks_for_none_runs_nothing_more(backend: str, load: Load) -> None:
    without, ready = (
        ModelExecutor(load("llama"), 128, backend=backend, row_counts=(4,), layers=layers)
        for layers in ((), LAYERS)
    )
    assert operators(ready, ()) == operators(without, ())
    assert len(operators(ready, LAYERS)) > len(operators(ready, ()))


@pytest.mark.parametrize(("layers", "wrong"), [((0, 3), 3), ((-2,), -2)])
def test_layers_that_a_model_has_not_are_refused_with_a_line(
    layers: Layers, wrong: int, load: Load
) -> None:
    loaded = load("llama")
    words = rf"there is no layer {wrong}, only 0 to 2 and -1 \(after"
    for make in (ModelExecutor, make_executor):
        with pytest.raises(ModelError, match=words):
            make(loaded, 64, layers=layers)
    with pytest.raises(ModelError, match=words):
        forward(ModelExecutor(loaded, 64, backend="fused"), [rows(1)], [(0,)], layers)
    with pytest.raises(ModelError, match=words):
        engine_for(loaded.name, layers)


def engine_for(folder: str, layers: Layers) -> Engine:
    """Load a model for texts of 64 tokens."""
    return load_engine(
        folder,
        revision=None,
        dtype="float32",
        device="cpu",
        max_len=64,
        fixed_rows=None,
        warm_rows=(1,),
        say=print,
        layers=layers,
    )


def test_an_engine_is_loaded_for_them(load: Load) -> None:
    loaded = load("llama")
    made = engine_for(loaded.name, LAYERS)
    assert made.executor.layers == LAYERS
    check(made.executor, transformers_own(loaded.name))

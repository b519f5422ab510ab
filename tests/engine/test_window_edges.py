"""Where a window or a chunk ends: inside a tree, behind a roll-back, inside a copied beginning.

The truth is transformers' own forward over each row's whole path. The models see 16 tokens.
"""

from collections.abc import Callable
from pathlib import Path as Folder
from typing import Any

import pytest

from engine.checkpoint.model import load_model
from engine.layout.slots import Feed, SlotMap
from engine.model_executor import ModelExecutor
from tests.engine.random_session import Path
from tests.engine.recomputed import from_scratch
from tests.engine.test_slot_cache import difference
from tests.families import PROMPTS, WINDOW, load, make_family

TOLERANCE = 1e-4
PROMPT, SHORT, LONG = PROMPTS[1], PROMPTS[0], PROMPTS[2]
Ready = Callable[[str], tuple[ModelExecutor, Any]]
MODELS = ("mistral-window", "gemma3_text", "llama4_text")


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Ready:
    """ready(name): an executor of two lanes, and transformers' own model of the same weights."""
    made: dict[str, Folder] = {}

    def get(name: str) -> tuple[ModelExecutor, Any]:
        if name not in made:
            made[name] = make_family(name, tmp_path_factory.mktemp(name))
        loaded = load_model(str(made[name]), dtype="float32")
        return ModelExecutor(loaded, 160, num_lanes=2), load(made[name])

    return get


def opened(executor: ModelExecutor, text: Path, lane: int = 0) -> SlotMap[Path]:
    """Return the layout of a lane in which a text has been read."""
    slots: SlotMap[Path] = SlotMap(executor.capacity, lane=lane, windows=executor.windows)
    executor.run(slots.feed_prefix(text), ())
    return slots


def chain(slots: SlotMap[Path], text: Path, tokens: Path) -> tuple[Feed, list[Path]]:
    """Return the pass of a chain of drafts after a text or one of its nodes, and the paths."""
    paths = [(*text, *tokens[: i + 1]) for i in range(len(tokens))]
    nodes: list[tuple[Path, Path | None, int, int]] = []
    for path in paths:
        parent = path[:-1] if path[:-1] in slots or nodes else None
        nodes.append((path, parent, path[-1], len(path) - 1))
    return slots.feed((), nodes), paths


def error(executor: ModelExecutor, model: Any, step: tuple[Feed, list[Path]]) -> float:
    """Run a pass; return the largest relative error of its rows."""
    feed, paths = step
    return difference(executor.run(feed, range(len(paths))), from_scratch(model, paths))


@pytest.mark.parametrize("name", MODELS)
def test_a_tree_may_be_deeper_than_a_window(name: str, ready: Ready) -> None:
    executor, model = ready(name)
    slots = opened(executor, PROMPT)
    assert error(executor, model, chain(slots, PROMPT, LONG[: WINDOW + 4])) < TOLERANCE
    # From the end of this chain on, and from a node within it.
    deep = (*PROMPT, *LONG[: WINDOW + 4])
    for node in (deep, deep[:-7]):
        step = chain(slots, node, SHORT)
        assert step[0].near, "the window hides ancestors"
        assert error(executor, model, step) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_ancestors_before_the_window_would_show_in_the_logits(name: str, ready: Ready) -> None:
    executor, model = ready(name)
    slots = opened(executor, PROMPT)
    slots.windows = ()
    assert error(executor, model, chain(slots, PROMPT, LONG[: WINDOW + 4])) > 100 * TOLERANCE


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_kept", [0, 2, WINDOW + 1])
def test_a_roll_back_over_the_edge_of_a_window_loses_no_token(
    num_kept: int, name: str, ready: Ready
) -> None:
    executor, model = ready(name)
    slots = opened(executor, PROMPT)
    executor.run(chain(slots, PROMPT, LONG[: WINDOW + 4])[0], ())
    text = (*PROMPT, *LONG[:num_kept])
    path = [text[: i + 1] for i in range(len(PROMPT), len(text))]
    assert slots.advance(path, ()) is None
    assert error(executor, model, chain(slots, text, SHORT)) < TOLERANCE
    # Back to where the text was shorter than a window, and on from there.
    slots.truncate(WINDOW - 5)
    again = (*PROMPT[: WINDOW - 5], *SHORT)
    feed = slots.feed(again[slots.prefix_len :])
    paths = [again[: i + 1] for i in range(WINDOW - 5, len(again))]
    assert error(executor, model, (feed, paths)) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [WINDOW - 3, WINDOW, 2 * WINDOW + 5])
def test_a_window_may_cut_a_copied_beginning(length: int, name: str, ready: Ready) -> None:
    executor, model = ready(name)
    opened(executor, LONG)
    executor.copy_prefix(0, 1, length)
    executor.wipe(0, 0)  # from now on the copy is alone
    slots: SlotMap[Path] = SlotMap(executor.capacity, lane=1, windows=executor.windows)
    slots.adopt(length)
    text = LONG[:length]
    for tokens in (PROMPT[:6], PROMPT[6:]):
        step = chain(slots, text, tokens)
        assert error(executor, model, step) < TOLERANCE
        text = step[1][-1]

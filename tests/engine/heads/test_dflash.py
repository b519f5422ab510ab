"""DFlash heads against blocks that are computed plainly, and against transformers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path as Folder
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from engine.errors import ModelError
from engine.heads.dflash import DFlash
from engine.heads.dflash_executor import DFlashExecutor
from engine.heads.head_loading import LoadedHead, load_head, load_head_engine
from engine.heads.stated import refuse_odd_config
from engine.layout.slots import Feed, Move, SlotMap
from proto.head_kinds import HeadKind, head_kind
from tests.dflash import BLOCK, EPSILON, FORMS, MASK, NUM_LAYERS, THETA, Plain, checkpoint
from tests.engine.heads.checkpoints import HIDDEN, VOCAB
from tests.engine.heads.paths import TOLERANCE, features_of
from tests.engine.random_session import Drawn, Path, RandomSession

CAPACITY = 256
Loaded = tuple[LoadedHead, Plain]


@pytest.fixture(scope="module")
def head(target: Folder, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    """head(form): a head in float32, and the same plainly."""
    made: dict[str, Loaded] = {}

    def get(form: str) -> Loaded:
        if form not in made:
            saved = checkpoint(form)
            folder = saved.save(tmp_path_factory.mktemp("dflash"))
            tensors = load_file(target / "model.safetensors")
            own = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
            loaded = load_head(str(folder), target=str(target), dtype="float32")
            made[form] = loaded, Plain(form, saved.files, *own)
        return made[form]

    return get


class Texts:
    """What the head should say behind the last token of each lane whose features are known."""

    def __init__(self, loaded: LoadedHead, plain: Plain) -> None:
        self._loaded, self._plain = loaded, plain
        self._known: dict[int, dict[Path, torch.Tensor]] = {}  # by lane: features before a path
        self._said: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}

    def run(self, executor: DFlashExecutor, steps: list[tuple[Drawn, set[int]]]) -> int:
        """Run a pass of several lanes; `steps` say which rows have a feature. Compare its rows."""
        feeds, asks = [], []
        for step, given in steps:
            features = [
                features_of(self._loaded, path).numpy().tobytes() if row in given else b""
                for row, path in enumerate(step.paths)
            ]
            feeds.append(replace(step.feed, features=tuple(features)))
            asks.append(range(len(step.paths)))
            self._note(step, given)
        got = executor.run_together(feeds, asks)
        paths = [(step.feed.lane, path) for step, _ in steps for path in step.paths]
        count = 0
        for row, (lane, path) in zip(got, paths, strict=True):
            if lane not in self._said:
                assert not row.any()
                continue
            length, logits, states = self._said[lane]
            place = min(max(0, len(path) - length), BLOCK - 2)
            want = self._plain.drafted(path[-1], logits[place], states[place])
            real = want.isfinite()
            assert (row[real] - want[real]).abs().max() < TOLERANCE * want[real].abs().max()
            assert row.argmax() == want.argmax()
            assert bool((row[~real] < -1e30).all())
            count += 1
        return count

    def _note(self, step: Drawn, given: set[int]) -> None:
        """Note what is known, and what follows behind the last row with a feature."""
        lane = step.feed.lane
        known = self._known.setdefault(lane, {})
        for row, path in enumerate(step.paths):
            known.pop(path, None)
            if row in given:
                known[path] = features_of(self._loaded, path)
        if not given:
            return
        last = step.paths[max(given)]
        rows = []
        for length in range(len(last), 0, -1):
            if last[:length] not in known:
                break
            rows.append(known[last[:length]])
        # As if the text began with the first token that is known: only distances matter.
        logits, states = self._plain.behind(last[-1], torch.stack(rows[::-1]))
        self._said[lane] = len(last), logits, states


def committed(step: Drawn, text_len: int) -> set[int]:
    """The rows of a pass that are of the text itself, but for its first token."""
    return {row for row, path in enumerate(step.paths) if 1 < len(path) <= text_len}


@pytest.mark.parametrize("form", FORMS)
def test_blocks_behind_a_text_that_grows_and_is_rolled_back(
    form: str, head: Callable[[str], Loaded]
) -> None:
    loaded, plain = head(form)
    executor, texts = DFlashExecutor(loaded, CAPACITY), Texts(loaded, plain)
    session = RandomSession(1, SlotMap(CAPACITY), vocab=VOCAB, prompt_len=30, max_rows=6)
    num_moves = num_rows = 0
    for step in session.steps(10):
        if isinstance(step, Move):
            executor.move(step)
            num_moves += 1
        else:
            given = committed(step, len(session.text))
            num_rows += texts.run(executor, [(step, given)])
    assert num_moves > 1
    assert num_rows > 40


def test_two_texts_in_one_pass_and_a_beginning_that_is_copied(
    head: Callable[[str], Loaded],
) -> None:
    loaded, plain = head("first")
    executor, texts = DFlashExecutor(loaded, 64, num_lanes=2), Texts(loaded, plain)
    prompt = tuple(range(10, 22))
    where = tuple(range(12))
    first = Drawn(Feed(prompt, where, where, 0, None), [prompt[: n + 1] for n in where])
    texts.run(executor, [(first, set(range(1, 12)))])
    executor.copy_prefix(0, 1, 10)
    other = (*prompt[:10], 3, 4)
    rest = Drawn(Feed(other[10:], (10, 11), (10, 11), 10, None, lane=1), [other[:11], other[:12]])
    texts._known[1] = {path: one for path, one in texts._known[0].items() if len(path) <= 10}
    texts.run(executor, [(rest, {0, 1})])
    both = [
        (
            Drawn(
                Feed((5, 9), (12, 13), (12, 13), 12, (1, 3), lane=lane),
                [(*text, 5), (*text, 5, 9)],
            ),
            {0},
        )
        for lane, text in ((0, prompt), (1, other))
    ]
    assert texts.run(executor, both) == 4


def test_what_was_lost_and_what_stands_before_it_is_not_seen(
    head: Callable[[str], Loaded],
) -> None:
    loaded, plain = head("first")
    executor, texts = DFlashExecutor(loaded, 64), Texts(loaded, plain)
    text, where = tuple(range(20)), tuple(range(20))
    step = Drawn(Feed(text, where, where, 0, None), [text[: n + 1] for n in where])
    assert texts.run(executor, [(step, set(range(1, 20)) - {8})]) == 20


def test_the_block_is_transformers_own(target: Folder, head: Callable[[str], Loaded]) -> None:
    loaded, plain = head("first")
    config = MuseGlimmerAssistantConfig(
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        layer_types=["full_attention"] * NUM_LAYERS,
        target_layer_ids=[0, 2],
        block_size=BLOCK,
        mask_token_id=MASK,
    )
    theirs: Any = MuseGlimmerAssistantModel(config).float().eval()
    renamed = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }
    theirs.load_state_dict({renamed.get(name, name): one for name, one in plain.weights.items()})
    text = torch.randn(23, 2 * HIDDEN, generator=torch.Generator().manual_seed(3))
    block = torch.stack([plain.embeddings[5], *[plain.embeddings[MASK]] * (BLOCK - 1)])
    with torch.inference_mode():
        out = theirs(noise_embeds=block[None], context_hidden_states=text[None])
    want = out.last_hidden_state[0, 1:] @ plain.lm_head.T
    executor = DFlashExecutor(loaded, 64)
    where = tuple(range(24))
    features = (None, *(one.numpy().tobytes() for one in text))
    got = executor.run(Feed((5,) * 24, where, where, 0, None, features=features), (23,))
    assert (got[0] - want[0]).abs().max() < TOLERANCE * want[0].abs().max()
    rows = Feed((1, 2, 3), (24, 25, 26), (24, 25, 26), 24, (1, 3, 7))
    drafts = executor.run(rows, range(3))
    assert (drafts - want[1:]).abs().max() < TOLERANCE * want.abs().max()


def test_an_engine_of_it_drafts_no_further_than_a_block(target: Folder, tmp_path: Folder) -> None:
    folder = checkpoint("second").save(tmp_path)
    engine = load_head_engine(
        str(folder),
        revision=None,
        target=str(target),
        target_revision=None,
        dtype="auto",
        device="cpu",
        max_len=64,
        warm_rows=(1, 2),
        say=lambda _: None,
    )
    loaded = engine.loaded
    assert isinstance(loaded, LoadedHead)
    assert (loaded.kind, loaded.layers, loaded.depth) == (HeadKind.DFLASH, (1, -1), BLOCK - 1)
    assert loaded.num_parameters == sum(one.numel() for one in checkpoint("second").files.values())
    assert loaded.slot_bytes == 2 * NUM_LAYERS * 2 * 16 * 4


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"block_size": 1}, "block_size is 1; it must be a whole number from 2 to 64"),
        ({"block_size": 65}, "from 2 to 64"),
        ({"mask_token_id": None}, "mask_token_id is null; it must be a whole number from 0 on"),
        ({"mask_token_id": 500}, "mask_token_id is 500, and .* has 199 embeddings"),
        ({"target_layer_ids": [0, 3]}, "features of layers that .*, which has 3, does not have"),
        ({"target_layer_ids": [0, 0]}, "does not have"),
        ({"target_layer_ids": None}, "does not have"),
        ({"selector_rank": 4}, "conv_kernel_size is null"),
        (
            {
                **dict.fromkeys(("conv_kernel_size", "selector_rank", "selector_top_k"), 2),
                "conv_group_size": 15,
            },
            "15, does not divide hidden_size, 64",
        ),
        ({"output_multiplier": "1"}, "output_multiplier must be a number"),
    ],
)
def test_an_odd_block_is_refused_in_a_line(
    change: dict[str, Any], line: str, target: Folder, tmp_path: Folder
) -> None:
    saved = checkpoint()
    config = saved.config | {"dflash_config": saved.config["dflash_config"] | change}
    folder = replace(saved, config=config).save(tmp_path)
    with pytest.raises(ModelError, match=line) as caught:
        load_head(str(folder), target=str(target))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"num_target_layers": 4}, "num_target_layers is 4, but .* has 3"),
        ({"hidden_size": 32}, "hidden_size is 32, but that of .* is 64"),
        ({"layer_types": ["full_attention"]}, "layer_types is .* each of its 2 layers"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is null"),
        ({"num_hidden_layers": 3}, "lacks the tensor layers.2"),
        ({"num_hidden_layers": 1}, "nobody here knows its tensor layers.1"),
        ({"hidden_act": "gelu"}, "only heads with silu"),
        ({"sample_from_anchor": True}, "sample from the anchor"),
        ({"draft_vocab_size": 40}, "lacks the tensor d2t"),
    ],
)
def test_a_head_of_another_form_is_refused_in_a_line(
    change: dict[str, Any], line: str, target: Folder, tmp_path: Folder
) -> None:
    saved = checkpoint()
    folder = replace(saved, config=saved.config | change).save(tmp_path)
    with pytest.raises(ModelError, match=line) as caught:
        load_head(str(folder), target=str(target))
    assert "\n" not in str(caught.value)


def test_features_of_more_layers_than_are_sent_are_refused(tmp_path: Folder) -> None:
    config = checkpoint().config | {
        "dflash_config": {"target_layer_ids": [*range(9)], "mask_token_id": 1}
    }
    with pytest.raises(ModelError, match="features of 9 layers, and at most 8 are sent"):
        refuse_odd_config(tmp_path / "config.json", config, HeadKind.DFLASH)


def test_the_kind_is_known_by_its_config(tmp_path: Folder) -> None:
    stated = json.loads((checkpoint().save(tmp_path) / "config.json").read_text())
    assert head_kind(stated) is HeadKind.DFLASH
    del stated["dflash_config"]
    assert head_kind(stated) is HeadKind.DFLASH
    del stated["architectures"]
    assert head_kind(stated) is None


def test_random_weights_are_not_too_tame(head: Callable[[str], Loaded]) -> None:
    """Drafts depend on the text, and in the second version on the draft before."""
    loaded, plain = head("second")
    assert isinstance(loaded.module, DFlash)
    random = Random(1)
    chosen = set()
    for seed in range(8):
        text = torch.randn(9, 2 * HIDDEN, generator=torch.Generator().manual_seed(seed))
        logits, states = plain.behind(random.randrange(VOCAB), text)
        first, second = (plain.drafted(token, logits[1], states[1]).argmax() for token in (3, 4))
        chosen |= {int(first), int(second), int(logits[0].argmax())}
    assert len(chosen) > 8

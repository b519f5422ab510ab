"""What a head's folder tells of it, what it takes from its target, and an engine made of it."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import engine.heads.head_loading
import engine.memory
import engine.room
from drafter_node.compute import Compute, Part
from drafter_node.worker import Worker
from engine.cpu_library import library, why_not_here
from engine.errors import OutOfMemory
from engine.heads import eagle_layer
from engine.heads.eagle import EagleExecutor
from engine.heads.eagle_layer import EagleHead
from engine.heads.head_loading import load_head, load_head_engine
from engine.layout.slots import BLOCK, Feed
from engine.loading import fingerprint
from engine.memory import longest_text
from engine.room import PROMPT_ROWS
from node.forwards import Forwards, SimulatedDevice
from proto.head_kinds import HeadKind
from tests.engine.conftest import Folder
from tests.engine.heads.checkpoints import EAGLE_LAYOUTS, HIDDEN, VOCAB, checkpoint
from tests.engine.heads.conftest import LoadHead, feature
from tests.packed_models import RECIPES, save_packed
from tests.policies import synchronous
from tests.texts import opening
from tests.tiny_models import MAX_POSITIONS

KINDS = {layout: HeadKind(layout.split()[-1]) for layout in EAGLE_LAYOUTS}


def logits_of(folder: Path, target: Path, **options: Any) -> torch.Tensor:
    """What a head says of one row whose feature is given."""
    loaded = load_head(str(folder), target=str(target), dtype="float32", **options)
    given = (feature(1, loaded.feature_size).numpy().tobytes(),)
    row = Feed((7,), (1,), (1,), 1, (1,), features=given)
    return EagleExecutor(loaded, 64).run(row, (0,))[0]


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether these are the same logits, but for the order of summation: layouts are timed."""
    real = want.isfinite()
    far = (got - want)[real].abs().max() > 1e-5 * want[real].abs().max()
    return torch.equal(got.isfinite(), real) and not far


@pytest.mark.parametrize("layout", EAGLE_LAYOUTS)
def test_a_head_is_rounded_on_a_cpu_where_it_can_be_multiplied_as_such(
    layout: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (why := why_not_here()) is not None:
        pytest.skip(why)
    assert library() is not None
    folder = checkpoint(layout).save(tmp_path)
    plain = logits_of(folder, target)
    real, errors = plain.isfinite(), []
    for quantization in ("int8", "int4"):
        found = logits_of(folder, target, quantization=quantization)
        assert torch.equal(found.isfinite(), real)
        errors.append(float((found - plain)[real].abs().max() / plain[real].abs().max()))
    assert 0 < errors[0] < 0.05
    assert errors[0] < errors[1] < 0.5
    monkeypatch.setattr(eagle_layer, "library", lambda *, compiles: None)
    assert same(logits_of(folder, target, quantization="int8"), plain)


@pytest.mark.parametrize("layout", EAGLE_LAYOUTS)
@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_a_head_says_what_it_is(layout: str, file: str, target: Path, tmp_path: Path) -> None:
    saved = replace(checkpoint(layout), file=file)
    loaded = load_head(str(saved.save(tmp_path)), target=str(target))
    assert loaded.kind is KINDS[layout]
    wanted = dict.fromkeys(("eagle3", "normed eagle3"), (2, 1, 0)) | {
        "speculators eagle3": (0, 2, 1)
    }
    assert loaded.layers == wanted.get(layout, (-1,))
    assert loaded.hidden_size == HIDDEN
    assert loaded.feature_size == HIDDEN * len(loaded.layers)
    assert (loaded.vocab_size, loaded.eos_token_ids) == (VOCAB, (2,))
    # Longer than config.json says: positions are relative.
    assert loaded.max_model_len == MAX_POSITIONS
    assert loaded.num_parameters == sum(
        tensor.numel() for tensor in saved.files.values() if tensor.is_floating_point()
    )
    assert loaded.dtype == torch.float32


@pytest.mark.parametrize("layout", EAGLE_LAYOUTS)
def test_files_of_either_form_hold_the_same_head(layout: str, target: Path, tmp_path: Path) -> None:
    saved = checkpoint(layout)
    want = logits_of(saved.save(tmp_path / "safe"), target)
    pickled = replace(saved, file="pytorch_model.bin").save(tmp_path / "pickled")
    assert same(logits_of(pickled, target), want)
    wrapped = {f"model.{name}": tensor for name, tensor in saved.files.items()}
    prefixed = replace(saved, files=wrapped).save(tmp_path / "prefixed")
    assert same(logits_of(prefixed, target), want)


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        ("eagle", "fp8-block"),
        ("eagle3", "fp8-tensor"),
        ("speculators eagle3", "compressed-channel"),
        ("speculators eagle3", "pack"),
        ("eagle3", "gptq"),
    ],
)
def test_a_quantised_head_is_read_in_its_format(
    layout: str, recipe: str, target: Path, tmp_path: Path
) -> None:
    source = checkpoint(layout).save(tmp_path / "source")
    packed, plain = save_packed(source, tmp_path, RECIPES[recipe], num_files=2)
    want, got = (logits_of(one, target) for one in (plain, packed))
    real = want.isfinite()
    assert torch.equal(real, got.isfinite())
    assert (got - want)[real].abs().max() < 1e-4 * want[real].abs().max()
    assert load_head(str(packed), target=str(target)).dtype is torch.float32


def test_weights_in_several_files_are_found_by_their_index(target: Path, tmp_path: Path) -> None:
    saved = checkpoint("eagle")
    want = logits_of(saved.save(tmp_path), target)
    names = sorted(saved.files)
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        part = {name: saved.files[name] for name in names if weight_map[name] == file}
        save_file(part, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(logits_of(tmp_path, target), want)


@pytest.mark.parametrize("layout", EAGLE_LAYOUTS)
def test_what_a_head_has_of_its_own_comes_before_what_its_target_has(
    layout: str, target: Path, tmp_path: Path
) -> None:
    saved = checkpoint(layout)
    want = logits_of(saved.save(tmp_path / "without"), target)
    tensors = load_file(target / "model.safetensors")
    alike = {"embed_tokens.weight": tensors["model.embed_tokens.weight"]}
    own = replace(saved, files={**saved.files, **alike}).save(tmp_path / "same")
    assert same(logits_of(own, target), want)
    other = {"embed_tokens.weight": alike["embed_tokens.weight"].flip(0)}
    own = replace(saved, files={**saved.files, **other}).save(tmp_path / "other")
    assert not same(logits_of(own, target), want)


def test_a_third_head_without_output_and_norm_has_those_of_its_target(
    target: Path, tmp_path: Path
) -> None:
    saved = checkpoint("eagle3")
    tensors = load_file(target / "model.safetensors")
    rows = tensors["lm_head.weight"][saved.weights["targets"]]
    full = {**saved.files, "lm_head.weight": rows, "norm.weight": tensors["model.norm.weight"]}
    want = logits_of(replace(saved, files=full).save(tmp_path / "full"), target)
    for name in ("lm_head.weight", "norm.weight"):
        del full[name]
    got = logits_of(replace(saved, files=full).save(tmp_path / "bare"), target)
    assert same(got, want)


def test_a_third_head_may_be_narrower_than_its_target(target: Path, tmp_path: Path) -> None:
    saved = checkpoint("eagle3")
    files = {name: tensor.clone() for name, tensor in saved.files.items()}
    narrow = HIDDEN // 2
    for name, tensor in files.items():
        if name.endswith(("fc.weight", "o_proj.weight", "down_proj.weight", "norm.weight")):
            files[name] = tensor[:narrow]
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            files[name] = tensor[:, : 2 * narrow]
        elif name.endswith(("gate_proj.weight", "up_proj.weight", "lm_head.weight")):
            files[name] = tensor[:, :narrow]
    files["embed_tokens.weight"] = torch.randn(VOCAB, narrow)
    files["midlayer.self_attn.o_proj.weight"] = saved.files["midlayer.self_attn.o_proj.weight"][
        :narrow
    ]
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        files[f"midlayer.{name}.weight"] = saved.files[f"midlayer.{name}.weight"][:narrow]
    sizes = {"hidden_size": narrow, "target_hidden_size": HIDDEN, "head_dim": 16}
    config = {**saved.config, **sizes}
    folder = replace(saved, files=files, config=config).save(tmp_path)
    assert logits_of(folder, target).isfinite().sum() == 40


def test_the_output_of_a_target_with_tied_embeddings_is_found(target: Path, tmp_path: Path) -> None:
    head = checkpoint("eagle").save(tmp_path / "head")
    tied = tmp_path / "tied"
    shutil.copytree(target, tied)
    tensors = load_file(target / "model.safetensors")
    untied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(untied, tied / "model.safetensors", metadata={"format": "pt"})
    want = logits_of(head, tied)
    del untied["lm_head.weight"]
    save_file(untied, tied / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert same(logits_of(head, tied), want)


@pytest.mark.parametrize("architecture", ["gpt2", "falcon", "qwen3", "phi3", "opt"])
def test_targets_of_other_families_are_read_too(
    architecture: str, folder: Folder, tmp_path: Path
) -> None:
    head = checkpoint("eagle3").save(tmp_path)
    assert logits_of(head, folder(architecture)).isfinite().sum() == 40


def with_aux(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda config: {**config, **fields}


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, (2, 1, 0)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 0, 2]}, (1, 0, 2)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 0, 1]}}, (2, 0, 1)),
        # Where it begins with 1 it counts what leaves the layers.
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0, 0]}}, (2, 1, 1)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2, 1, 0)),
    ],
)
def test_the_layers_of_the_features_are_those_that_were_meant(
    fields: dict[str, Any], layers: tuple[int, ...], target: Path, tmp_path: Path
) -> None:
    saved = checkpoint("eagle3")
    folder = replace(saved, config={**saved.config, **fields}).save(tmp_path)
    assert load_head(str(folder), target=str(target)).layers == layers


def test_a_scaled_rotary_embedding_is_the_targets_way_of_counting(
    target: Path, tmp_path: Path
) -> None:
    saved = checkpoint("eagle")
    scaled = {**saved.config, "rope_scaling": {"type": "linear", "factor": 2.0}}
    halved = load_head(
        str(replace(saved, config=scaled).save(tmp_path / "scaled")), target=str(target)
    )
    plain = load_head(str(saved.save(tmp_path / "plain")), target=str(target))
    given = tuple(feature(i, HIDDEN).numpy().tobytes() for i in range(3))
    at_even = Feed((1, 2, 3), (2, 4, 6), (1, 2, 3), 1, (1, 3, 7), features=given)
    at_all = replace(at_even, positions=(1, 2, 3))
    got = EagleExecutor(halved, 64).run(at_even, (2,))
    assert torch.allclose(got, EagleExecutor(plain, 64).run(at_all, (2,)), atol=1e-5)
    assert not torch.allclose(got, EagleExecutor(plain, 64).run(at_even, (2,)), atol=1e-3)


def test_an_engine_of_a_head_drafts_for_a_worker(target: Path, tmp_path: Path) -> None:
    folder, said = checkpoint("eagle3").save(tmp_path), []
    engine = load_head_engine(
        str(folder),
        revision=None,
        target=str(target),
        target_revision=None,
        dtype="fastest",
        device="cpu",
        max_len=100,
        num_lanes=2,
        warm_rows=(1, 2),
        say=said.append,
    )
    print_of_target = fingerprint(str(target))
    assert (engine.digests, engine.vocab_size) == (print_of_target.digests, VOCAB)
    assert (engine.max_len, engine.executor.lanes.count, engine.executor.capacity) == (100, 2, 164)
    assert (engine.executor.backend, engine.device) == ("eagle", "cpu")
    assert set(engine.pass_s) == {1, 2}
    assert said == ["loading weights", "warming up"]
    watch = SimpleNamespace(
        enter=lambda phase: None, forward=lambda rows, asked: None, num_received=0
    )
    heart: Any = SimpleNamespace(
        watch=watch, progress=0, num_uncaptured=0, begins=lambda rows, s: None
    )
    config: Any = SimpleNamespace(max_candidates=8)
    forwards = Forwards(engine.executor, heart, SimulatedDevice(0.0, 0.0))
    worker = Worker(config, engine, forwards, VOCAB, lambda: False)
    given = (None, feature(1, 3 * HIDDEN).numpy().tobytes())
    feed = Feed((5, 6), (0, 1), (0, 1), 0, (1, 3), features=given)
    opened = opening(5, 6, policy=synchronous(2))
    proposed = worker.compute(Compute(1, (Part(opened, 1, [5, 6], feed, 1),)))
    (children,) = proposed.children[0]
    want = engine.executor.run(feed, (1,))[0].argmax()
    assert children.tokens == (int(want),)
    # A text may allow only tokens that the head does not know: that is no trouble.
    known = [int(token) for token in checkpoint("eagle3").weights["targets"]]
    other = next(token for token in range(VOCAB) if token not in known)
    for token, tokens in ((other, ()), (known[3], (known[3],))):
        allows = replace(opened, sampling=replace(opened.sampling, allowed_ids=(token,)))
        step = Compute(2, (Part(allows, 1, [5, 6], feed, 1, drafted=((),)),))
        (children,) = worker.compute(step).children[0]
        assert (children.tokens, children.is_finite) == (tokens, True)


@pytest.mark.parametrize("layout", ["eagle3", "medusa"])
@pytest.mark.parametrize("num_children", [(), (1, 3)])
def test_what_texts_ask_first_of_a_head_on_a_gpu_is_run_at_load(
    layout: str,
    num_children: tuple[int, ...],
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine.heads.head_loading, "WARMED_DEVICES", ("cpu",))
    tried: list[object] = []
    for name in ("try_choices", "use_once"):
        monkeypatch.setattr(
            engine.heads.head_loading, name, lambda *given, name=name: tried.append((name, given))
        )
    chunks: list[int] = []
    lay_out = EagleExecutor.lay_out

    def noted(self: EagleExecutor, feeds: Sequence[Feed], asks: Sequence[Sequence[int]]) -> object:
        of_prompts = [feed for feed in feeds if feed.masks is None]
        chunks.extend(len(feed.tokens) for feed in of_prompts)
        assert all(all(feed.features or ("",)) for feed in of_prompts)
        return lay_out(self, feeds, asks)

    monkeypatch.setattr(EagleExecutor, "lay_out", noted)
    made = load_head_engine(
        str(checkpoint(layout).save(tmp_path)),
        revision=None,
        target=str(target),
        target_revision=None,
        dtype="float32",
        device="cpu",
        max_len=100,
        num_lanes=2,
        warm_rows=(1, 2),
        num_children=num_children,
        say=lambda _: None,
    )
    if isinstance(made.executor, EagleExecutor):
        assert chunks == [64, 128, made.executor.capacity - 1]
        assert not made.executor._slots.are_held.any()
        assert not made.executor._cache.any()
    assert [name for name, _ in tried] == (["try_choices", "use_once"] if num_children else [])


def test_the_masks_of_a_prompt_are_in_a_heads_budget_of_a_gpu(
    eagle: LoadHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, _ = eagle("eagle")
    assert isinstance(loaded.module, EagleHead)
    config = loaded.module.config
    group = config.num_heads // config.num_kv_heads
    assert group > 1
    # float32: of the tree, with empty slots hidden, and once for each query head of a key head
    masks = PROMPT_ROWS * 4 * (2 + group)
    monkeypatch.setattr(engine.room, "SHARES", {"cuda": 1.0})
    room = (100 + 192 + BLOCK) * (loaded.slot_bytes + masks)
    total = room + engine.memory._weight_bytes(loaded)
    monkeypatch.setattr(engine.memory, "total_bytes", lambda _: total)
    gpu = replace(loaded, device=torch.device("cuda:0"))
    assert longest_text(gpu, 100) == 100
    with pytest.raises(OutOfMemory):
        longest_text(gpu, 101)

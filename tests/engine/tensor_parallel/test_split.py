"""What the ranks of a model compute is, added up, what the whole computes."""

from pathlib import Path

import pytest
import torch

from engine.checkpoint.model import LoadedModel, load_model
from engine.errors import ModelError
from engine.layout.slots import Move, SlotMap
from engine.model_executor import ModelExecutor
from tests.engine.forward.test_fused import save
from tests.engine.random_session import Path as TreePath
from tests.engine.random_session import RandomSession
from tests.engine.tensor_parallel.threads import Threads
from tests.engine.test_slot_cache import difference
from tests.small_families import make_small

EMBEDDED = Path(__file__).resolve().parents[3] / "models"
TOLERANCE = 2e-5
DIVIDED = (
    *("llama", "qwen2", "qwen3", "mistral", "qwen3_moe"),
    *("mixtral", "olmo", "cohere", "granite"),
)
REFUSED = ("gpt2", "gpt_neox", "opt", "phi3", "falcon", "stablelm")


def plain(loaded: LoadedModel) -> torch.Tensor:
    """Logits [12, V] of the model's own forward."""
    ids = torch.arange(3, 15)[None]
    with torch.inference_mode():
        logits: torch.Tensor = loaded.model(ids, use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("architecture", DIVIDED)
def test_the_sum_of_the_ranks_is_the_model(architecture: str, tmp_path: Path) -> None:
    path = save(architecture, tmp_path, {})
    threads = Threads(path, 2)
    whole = load_model(str(path), dtype="float32")
    for logits in threads.run(plain):
        assert difference(logits, plain(whole)) < TOLERANCE
    assert threads.num_sums == 2 * whole.num_layers + 1  # behind attentions, blocks and the head
    sizes = [sum(part.numel() for part in one.model.parameters()) for one in threads.loaded]
    assert max(sizes) < 0.8 * whole.num_parameters
    assert all(one.num_parameters == whole.num_parameters for one in threads.loaded)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_heads_that_do_not_divide_are_shared_by_whole_groups(num_ranks: int) -> None:
    threads = Threads(EMBEDDED / "target", num_ranks)
    for logits in threads.run(plain):
        want = plain(load_model(str(EMBEDDED / "target"), dtype="float32"))
        assert difference(logits, want) < TOLERANCE
    heads = [
        tuple(
            getattr(one.model.model.layers[0].self_attn, name).out_features // 64
            for name in ("q_proj", "k_proj")
        )
        for one in threads.loaded
    ]
    assert heads == ([(4, 2), (2, 1)] if num_ranks == 2 else [(2, 1)] * 3)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"vocab_size": 97}),
        ("mistral_window", {"sliding_window": 3}),
    ],
    ids=["biases", "tied", "odd vocabulary", "window"],
)
@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_both_backends_run_on_a_part(
    backend: str, architecture: str, options: dict[str, object], tmp_path: Path
) -> None:
    path = save(architecture, tmp_path, options)
    whole = session(load_model(str(path), dtype="float32"), "reference")
    threads = Threads(path, 2)
    for part in threads.run(lambda loaded: session(loaded, backend)):
        assert len(part) == len(whole)
        assert all(difference(*both) < TOLERANCE for both in zip(part, whole, strict=True))


def session(loaded: LoadedModel, backend: str) -> list[torch.Tensor]:
    """The logits of every pass of a random session, with weights laid out anew."""
    executor = ModelExecutor(loaded, 192, backend=backend)
    executor.take_over()
    slots: SlotMap[TreePath] = SlotMap(executor.capacity, windows=executor.windows)
    made = []
    for step in RandomSession(3, slots, vocab=97, prompt_len=40, max_rows=5).steps(8):
        if isinstance(step, Move):
            executor.move(step)
        else:
            made.append(executor.run(step.feed, range(len(step.paths))))
    return made


def test_a_part_of_tied_embeddings_is_not_given_back(tmp_path: Path) -> None:
    path = save("llama", tmp_path, {"tie_word_embeddings": True})

    def left(loaded: LoadedModel) -> int:
        ModelExecutor(loaded, 64, backend="fused", fixed_rows=4).take_over()
        return int(loaded.model.lm_head.weight.numel())

    assert all(Threads(path, 2).run(left))


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_has_other_parts_is_refused_with_a_line(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot be divided among ranks \(.*\); use one device"):
        Threads(save(architecture, tmp_path, {}), 2)


def test_norms_across_heads_are_refused(tmp_path: Path) -> None:
    path = save("cohere", tmp_path, {"use_qk_norm": True})
    with pytest.raises(ModelError, match="weights across heads"):
        Threads(path, 2)


def test_a_running_state_beside_attention_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"falcon_h1 .* \(layers with a running state\)"):
        Threads(make_small("falcon_h1", tmp_path), 2)


def test_more_ranks_than_key_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="2 key/value heads cannot be divided among 3 ranks"):
        Threads(save("llama", tmp_path, {}), 3)

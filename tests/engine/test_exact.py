"""A token's logits have the same bits in whatever pass it is computed, and a check sees that."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import cpu_library
from engine.checkpoint.families import BY_ROW
from engine.checkpoint.model import load_model
from engine.cpu_library import library, why_not_here
from engine.device import cpu_is_fast_in
from engine.exact import why_not_exact
from engine.forward.cpu_attention import CpuAttention
from engine.forward.cpu_operators import CpuOperators
from engine.forward.fused import FusedBackend
from engine.layout.slots import Feed, with_near
from engine.loading import make_executor
from engine.model_executor import ModelExecutor
from engine.quantised.cpu_products import TiledProduct
from tests.small_families import make_small
from tests.tiny_models import make_model

FAMILIES = ("llama", "qwen2", "qwen3_wide", "mistral_window")
NUM_TOKENS = 300
FORMS = [("float32", ""), ("bfloat16", ""), ("bfloat16", "int8"), ("bfloat16", "int4")]


@pytest.fixture(autouse=True)
def _library() -> Iterator[None]:
    if (why := why_not_here()) is not None:
        pytest.skip(why)
    assert library() is not None
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def made(folder: Path, family: str, dtype: str, quantization: str = "") -> ModelExecutor:
    if not cpu_is_fast_in(getattr(torch, dtype)):
        pytest.skip(f"this CPU has no {dtype} arithmetic")
    name = str(make_model(family, folder, 0, scale=0.5))
    loaded = load_model(name, dtype=dtype, quantization=quantization)
    return make_executor(loaded, 400, num_lanes=3)


class Passes:
    """Random passes over one text, whose rows are compared with the rows alone."""

    def __init__(self, executor: ModelExecutor, seed: int) -> None:
        self.executor = executor
        self.random = random.Random(seed)
        self.vocab = executor.loaded.vocab_size
        self.text = [self.random.randrange(self.vocab) for _ in range(NUM_TOKENS)]
        self.alone = [self.run(self.chain(at, at + 1, 0))[0] for at in range(NUM_TOKENS)]
        self.num_compared = 0

    def run(self, *feeds: Feed) -> torch.Tensor:
        near = [
            feed if feed.masks is None else with_near(feed, self.executor.windows) for feed in feeds
        ]
        asks = [range(len(near[0].tokens)), *[()] * (len(near) - 1)]
        return self.executor.run_together(near, asks).clone()

    def chain(self, start: int, end: int, lane: int) -> Feed:
        where = tuple(range(start, end))
        masks = tuple((2 << i) - 1 for i in range(end - start))
        return Feed(tuple(self.text[start:end]), where, where, start, masks, lane)

    def compare(self, logits: torch.Tensor, positions: list[int]) -> None:
        for row, position in zip(logits, positions, strict=True):
            assert torch.equal(row, self.alone[position]), f"position {position}"
            self.num_compared += 1

    def read(self, end: int, lane: int) -> None:
        """Read the text up to `end`, in random pieces: chunks of a prompt, or chains."""
        at = 0
        while at < end:
            count = min(end - at, self.random.choice((1, 2, 5, 16, 17, 40, 128, 256)))
            if self.random.random() < 0.5:
                where = tuple(range(at, at + count))
                feed = Feed(tuple(self.text[at : at + count]), where, where, at, None, lane)
            else:
                count = min(count, 60)
                feed = self.chain(at, at + count, lane)
            self.compare(self.run(feed), list(range(at, at + count)))
            at += count

    def tree(self, start: int, lane: int) -> None:
        """Run a tree of the text's next tokens and of wrong ones, beside another text or none."""
        depth = self.random.randrange(1, 17)
        slots = self.random.sample(range(start, start + 60), depth + self.random.randrange(24))
        nodes: list[tuple[int, int, int, int]] = []  # token, position, slot, mask
        for number, slot in enumerate(slots):
            is_wrong = number >= depth
            parent = number - 1 if not is_wrong else self.random.randrange(-1, number)
            mask, above = (nodes[parent][3], nodes[parent][1]) if parent >= 0 else (0, start - 1)
            token = self.random.randrange(self.vocab) if is_wrong else self.text[start + number]
            nodes.append((token, above + 1, slot, mask | 1 << slot - start))
        order = list(range(len(nodes)))
        self.random.shuffle(order)
        tokens, positions, where, masks = zip(*(nodes[i] for i in order), strict=True)
        feeds = [Feed(tokens, positions, where, start, masks, lane)]
        if self.random.random() < 0.5:
            feeds.append(self.chain(0, self.random.randrange(1, 5), (lane + 1) % 3))
        logits = self.run(*feeds)
        rows = [row for row, number in enumerate(order) if number < depth]
        self.compare(logits[rows], [positions[row] for row in rows])

    def some(self, count: int) -> None:
        for _ in range(count):
            torch.set_num_threads(self.random.choice((1, 2)))
            lane, start = self.random.randrange(3), self.random.randrange(1, NUM_TOKENS - 40)
            self.read(start, lane)
            self.tree(start, lane)


@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_bits_in_every_pass(
    family: str, form: tuple[str, str], tmp_path: Path
) -> None:
    passes = Passes(made(tmp_path, family, *form), seed=1)
    passes.some(4)
    assert passes.num_compared > 200


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_bits_in_thousands_of_passes(
    family: str, form: tuple[str, str], tmp_path: Path
) -> None:
    executor = made(tmp_path, family, *form)
    for seed in range(3):
        passes = Passes(executor, seed)
        passes.some(40)
        assert passes.num_compared > 4_000


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_the_check_finds_no_difference(form: tuple[str, str], tmp_path: Path) -> None:
    assert why_not_exact(made(tmp_path, "qwen3_wide", *form)) is None


def test_forms_of_torch_are_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "_kept", lambda: None)
    loaded = load_model(str(Path(__file__).parents[2] / "models" / "target"), dtype="float32")
    executor = make_executor(loaded, 400, num_lanes=2)
    assert not executor.is_by_row
    assert why_not_exact(executor) is not None


def compare_small(kind: str, dtype: str, folder: Path) -> int:
    """Compare rows of a small model of a family in random passes; return how many there were."""
    if not cpu_is_fast_in(getattr(torch, dtype)):
        pytest.skip(f"this CPU has no {dtype} arithmetic")
    loaded = load_model(str(make_small(kind, folder, is_wide=True)), dtype=dtype)
    executor = make_executor(loaded, 400, num_lanes=3)
    assert why_not_exact(executor) is None
    assert executor.is_by_row
    passes = Passes(executor, seed=1)
    passes.some(2)
    return passes.num_compared


@pytest.mark.parametrize("kind", ["gemma3_text", "phi3", "olmo2", "mixtral"])
def test_a_row_of_other_families_has_the_same_bits_too(kind: str, tmp_path: Path) -> None:
    assert compare_small(kind, "float32", tmp_path) > 100


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", sorted(BY_ROW))
def test_a_row_of_every_family_that_is_called_exact_has_the_same_bits(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    assert compare_small(kind, dtype, tmp_path) > 100


def by_number_of_rows(patch: pytest.MonkeyPatch) -> None:
    """A product of several rows has another order of sums."""
    right = TiledProduct.__call__

    def product(self: TiledProduct, x: torch.Tensor) -> torch.Tensor:
        made = right(self, x)
        return made if len(x) == 1 else made * (1 + 2**-7)

    patch.setattr(TiledProduct, "__call__", product)


def by_slot(patch: pytest.MonkeyPatch) -> None:
    """Rows that lie in other slots than their positions have other sums of values."""
    see, attend = CpuAttention.see, CpuAttention.attend
    scattered: list[torch.Tensor] = []

    def noted(self: CpuAttention, rows: torch.Tensor, spans: Any) -> Any:
        scattered[:] = [rows[1] != rows[2] % 400]
        return see(self, rows, spans)

    def changed(self: CpuAttention, *args: Any) -> torch.Tensor:
        out = attend(self, *args)
        return torch.where(scattered[0][:, None], out * (1 + 2**-7), out)

    patch.setattr(CpuAttention, "see", noted)
    patch.setattr(CpuAttention, "attend", changed)


def by_chunk(patch: pytest.MonkeyPatch) -> None:
    """Rows of a prompt see the first token of their chunk a little less."""
    right = CpuAttention.attend

    def attend(self: CpuAttention, *args: Any) -> torch.Tensor:
        out = right(self, *args)
        return out * (1 + 2**-7) if len(out) > 64 else out

    patch.setattr(CpuAttention, "attend", attend)


def by_tail(patch: pytest.MonkeyPatch) -> None:
    """The last row of a pass that is no multiple of 16 rows has another gate."""
    right = CpuOperators.gate

    def gate(self: CpuOperators, both: torch.Tensor) -> torch.Tensor:
        made = right(self, both)
        if len(made) % 16 > 1:
            made[-1] *= 1 + 2**-7
        return made

    patch.setattr(CpuOperators, "gate", gate)


def of_another_form(patch: pytest.MonkeyPatch) -> None:
    """What a prompt writes to the cache is rounded otherwise than what a row writes."""
    right = CpuOperators.turn_and_write

    def write(self: CpuOperators, *args: Any) -> None:
        right(self, *args)
        cache, slots = args[-1], args[4]
        if len(slots) > 64:
            cache[:, slots] *= 1 + 2**-7

    patch.setattr(CpuOperators, "turn_and_write", write)


FAULTS = (by_number_of_rows, by_slot, by_chunk, by_tail, of_another_form)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_planted_faults_are_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = made(tmp_path, "llama", dtype)
    assert isinstance(executor._backend, FusedBackend)
    layers = executor._backend._cpu_layers
    assert layers is not None
    monkeypatch.setattr(layers, "_run_ours", None)  # steps one by one, which faults can be put into
    assert why_not_exact(executor) is None
    plant(monkeypatch)
    assert why_not_exact(executor) is not None
    with pytest.raises(AssertionError, match="position"):
        Passes(executor, seed=1).some(4)

"""Alpha and the ranks of drafts, beside a direct computation with `transformers`."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf

from lab.pair import chances
from lab.pair.requests import Judged, Request, Said
from rehearsal.acceptance import NUM_RANKS
from tests.lab.bytewise_pair import make_bytewise_pair
from tests.noise import gumbel
from tests.tiny_tokenizer import VOCAB_SIZE

PROMPT, SEED = (5, 17, 40, 8), 3
SAID = tuple((11 * index * index + 7) % VOCAB_SIZE for index in range(24))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_bytewise_pair(tmp_path_factory.mktemp("models"), 0.3)


def judged(target: Path, drafter: Path, temperature: float) -> Judged:
    text = Said(PROMPT, SAID, temperature, SEED)
    names = str(target), None, "float32", str(drafter), None, "float32"
    (found,) = chances.answers(Request(*names, device="cpu", texts=(text,)))
    return found


def logits(folder: Path) -> torch.Tensor:
    """The rows [n, V] of a model's own forward, one for each token that was said."""
    with torch.no_grad():
        rows = hf.AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([[*PROMPT, *SAID]]))
    return rows.logits[0, len(PROMPT) - 1 : -1].double()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_alpha_is_the_mass_that_both_distributions_share(
    models: tuple[Path, Path], temperature: float
) -> None:
    p, q = ((logits(folder) / temperature).softmax(1) for folder in models)
    wanted = torch.minimum(p, q).sum(1).tolist()
    assert 0.02 < min(wanted) < max(wanted) < 0.98
    assert judged(*models, temperature).overlaps == pytest.approx(wanted, abs=1e-4)


def test_without_temperature_alpha_is_whether_both_choose_the_same_token(
    models: tuple[Path, Path],
) -> None:
    p, q = (logits(folder).argmax(1) for folder in models)
    wanted = (p == q).double().tolist()
    assert 0 < sum(wanted) < len(wanted)
    assert judged(*models, 0.0).overlaps == tuple(wanted)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_ranks_are_those_of_the_drafters_logits_with_the_noise_of_the_text(
    models: tuple[Path, Path], temperature: float
) -> None:
    scores = logits(models[1]).numpy()
    if temperature:
        at = range(len(PROMPT), len(PROMPT) + len(SAID))
        ids = np.broadcast_to(np.arange(VOCAB_SIZE), scores.shape)
        scores = scores / temperature + gumbel(SEED, 0, at, ids)
    own = np.take_along_axis(scores, np.array(SAID)[:, None], 1)
    wanted = (scores > own).sum(1).tolist()
    found = judged(*models, temperature).ranks
    assert found == tuple(rank if rank < NUM_RANKS else None for rank in wanted)


def test_long_texts_are_read_in_chunks_with_the_same_result(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = judged(*models, 1.0)
    monkeypatch.setattr(chances, "CHUNK_LOGITS", 5 * VOCAB_SIZE)
    parts = judged(*models, 1.0)
    assert parts.ranks == whole.ranks
    assert parts.overlaps == pytest.approx(whole.overlaps, abs=1e-5)


def test_ids_that_the_drafter_lacks_are_never_drafted() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25]]).log()
    q = torch.tensor([[0.5, 0.5]]).log()
    assert chances.overlaps(p, q, 1.0) == pytest.approx([0.75])
    assert chances.overlaps(p.roll(1, 1), q, 0.0) == [0.0]

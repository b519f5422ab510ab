"""What is decided where the logits are: judgements, processors, chains of steps, recordings."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.checkpoint.model import load_model
from engine.choice.classical_rules import Distribution, block_trial, token_trial
from engine.choice.coupling import (
    chain_choice,
    chain_inputs,
    choose,
    rank_scored,
    usual_chains,
    usual_choices,
)
from engine.choice.coupling_on_gpu import chosen_there
from engine.choice.grammar import WORD, masked_there
from engine.choice.judging import judge, sample_draft
from engine.choice.logprobs import report
from engine.choice.processors import Processors
from engine.choice.sampling import Sampling
from engine.forward.graphs import recorder
from engine.layout.slots import Feed
from engine.loading import make_executor
from tests.engine.choice.test_device_choice import some_logits
from tests.engine.choice.test_device_judging import SAMPLED, some_rows
from tests.engine.choice.test_processors import Shape
from tests.tiny_models import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GPU = "cuda:0"


@pytest.mark.parametrize("make_trial", [token_trial, block_trial])
@pytest.mark.parametrize("sampling", SAMPLED, ids=str)
def test_judgements_are_those_of_the_host(sampling: Sampling, make_trial: object) -> None:
    for number in range(10):
        target = some_rows(5, 152_000, number)
        drafts, proposals = [], []
        for row in target[:4] + 0.7 * some_rows(4, 152_000, 1000 + number):
            there, here = (
                sample_draft(rows[None], sampling, seed=1, life=2, number=number)
                for rows in (row.to(GPU), row)
            )
            assert there[0] == here[0]
            drafts.append(here[0])
            proposals.append(Distribution.of(here[2], here[3]))
        found, wanted = (
            judge(rows, sampling, make_trial, drafts, proposals, seed=1, life=2, number=number)
            for rows in (target.to(GPU), target)
        )
        assert found == wanted


def test_masks_of_grammars_are_unpacked_there_and_nothing_is_waited_for() -> None:
    random = np.random.default_rng(1)
    words = random.integers(-(2**31), 2**31, (9, 152_000 // WORD), dtype=np.int32)
    rows = some_rows(9, 152_000, 1)
    there = rows.to(GPU)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = masked_there(words, there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), masked_there(words, rows))


@pytest.mark.parametrize("num_top", [0, 20])
def test_log_probabilities_are_those_of_the_host(num_top: int) -> None:
    logits, tokens = some_logits(300, 152_000).round(), range(1000, 1300)
    got, want = (report(rows, tokens, num_top) for rows in (logits.to(GPU), logits))
    assert (got.ids, got.ranks) == (want.ids, want.ranks)
    assert got.values == pytest.approx(want.values, abs=1e-5)


@pytest.mark.parametrize("allowed", [(), tuple(range(1, 152_000, 2))], ids=["any", "odd"])
def test_processed_rows_are_those_of_the_host(allowed: tuple[int, ...]) -> None:
    shape = Shape(
        *(1.3, 0.7, 0.3, (3, 5), (1.5, -2.0), ((7,), (1, 9))),
        min_tokens=9,
        late_ids=(11, 12),
        allowed_ids=allowed,
    )
    logits, text = some_logits(3, 152_000), [1, 2, 3, 1, 2, 1]
    drafted = [(), (9,), (9, 9)]
    there = Processors(shape, text, 3, 152_000).apply(logits.to(GPU), drafted)
    assert there.device.type == "cuda"
    assert torch.allclose(there.cpu(), Processors(shape, text, 3, 152_000).apply(logits, drafted))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8)], ids=str)
def test_recorded_choices_and_chains_are_those_of_single_steps(
    sampling: Sampling, tmp_path: Path
) -> None:
    loaded = load_model(str(make_model("llama", tmp_path, scale=0.5)), dtype="float32", device=GPU)
    graphs = make_executor(loaded, 400, backend="graphs", row_counts=(1, 2, 4))
    graphs.warm_up((1,), choices=usual_choices((1,)), chains=(4,), chained=usual_chains())
    feeds = [Feed((5,), (i,), (i,), 0, ((2 << i) - 1,)) for i in range(4)]
    token, tokens, scores = 5, [], []
    for feed in feeds:
        one = Feed((token,), feed.positions, feed.slots, feed.prefix_len, feed.masks)
        logits = graphs.run(one, (0,))
        where = [feed.positions[0] + 1]
        ((token,),), ((score,),) = rank_scored(logits, sampling, 3, 0, where, 1, num_valid=190)
        assert choose(logits, sampling, 3, 0, where, num_valid=190) == [token]
        assert choose(logits.cpu(), sampling, 3, 0, where, num_valid=190) == [token]
        tokens.append(token)
        scores.append(score)
    num_late = graphs.num_late
    choice = chain_choice(sampling, num_valid=190)
    inputs = chain_inputs(sampling, 3, 0, [1, 2, 3, 4], num_valid=190)
    assert graphs.can_chain(feeds, choice)
    for _ in range(3):
        made = chosen_there(graphs.run_chain(feeds, choice, inputs))()
        assert made[0] == tokens
        assert made[1] == pytest.approx(scores, abs=1e-3)
    assert graphs.num_late == num_late


def test_a_capture_that_fails_leaves_the_process_on_its_stream() -> None:
    device = torch.device(GPU)
    record = recorder(device)
    before = torch.cuda.current_stream(device)
    first = record(lambda there: there * 4, torch.ones(4, dtype=torch.int64))
    with pytest.raises(RuntimeError):
        record(lambda there: there + there.sum().item(), torch.ones(4, dtype=torch.int64))
    assert torch.cuda.current_stream(device) == before
    replay = record(lambda there: there * 2, torch.ones(4, dtype=torch.int64))
    assert replay(torch.full((4,), 3)).tolist() == [6] * 4
    assert first(torch.full((4,), 3)).tolist() == [12] * 4


def test_cudnn_attention_is_off_once_a_model_is_loaded(tmp_path: Path) -> None:
    load_model(str(make_model("llama", tmp_path)), dtype="bfloat16", device=GPU)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("backend", ["graphs", "fused", "reference"])
def test_reproducible_choices_do_not_depend_on_how_many_are_made(
    backend: str, tmp_path: Path
) -> None:
    loaded = load_model(str(make_model("llama", tmp_path)), device=GPU)
    make_executor(loaded, 128, backend=backend, fixed_rows=4)
    for sampling in (Sampling(0.8), Sampling(1.0, top_p=0.9)):
        logits = some_logits(4, 152_000, 5).to(GPU)
        wanted = rank_scored(logits, sampling, 7, 0, range(4), 2)
        for _ in range(4):  # recorded or not
            found = rank_scored(logits[:1].clone(), sampling, 7, 0, range(1), 2)
            assert [part[0] for part in found] == [part[0] for part in wanted]

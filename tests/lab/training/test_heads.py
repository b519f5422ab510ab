"""Which feature meets which token: an error there would show only as drafts that are rejected."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from engine.heads.dflash_executor import DFlashExecutor
from engine.heads.head_loading import load_head as engine_head
from engine.layout.slots import Feed
from lab.training import train_heads
from lab.training.features import BLOCK
from lab.training.first_choices import NUM_DRAFTS, head_hits, rates
from lab.training.heads import (
    FILES,
    NUM_MEDUSA_HEADS,
    Attention,
    DFlash,
    Eagle,
    Eagle3,
    Factors,
    Head,
    Medusa,
    Shared,
    load_head,
    new_head,
    write_head,
)
from lab.training.teacher import Teacher, load_teacher
from lab.training.train_heads import LAST, TrainingPlan
from proto.head_kinds import HeadKind, feature_layers

VOCAB, HIDDEN, LENGTH = 61, 32, 12
IDS = torch.arange(0, VOCAB, 2)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of random weights that are wide enough to have something to say."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    path = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def teacher_of(folder: Path, kind: HeadKind) -> Teacher:
    """The target, as it teaches a head of a kind."""
    return load_teacher(str(folder), None, kind, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def text() -> Tensor:
    """Two texts."""
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(2))


def widened(kind: HeadKind, shared: Shared) -> Head:
    """A head that does something in every part."""
    head = new_head(kind, shared, IDS)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=generator)
    return head.eval()


def attended(attention: Attention, x: Tensor, config: LlamaConfig) -> Tensor:
    """[n, H] of the inputs [n, width] by the library's attention, every row after those before."""
    config._attn_implementation = "eager"
    library = LlamaAttention(config, layer_idx=0)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(library, name, getattr(attention, name))
    positions = torch.arange(len(x))[None]
    mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
    angles = LlamaRotaryEmbedding(config)(x[None], positions)
    output: Tensor = library(x[None], position_embeddings=angles, attention_mask=mask)[0][0]
    return output


def eagle_row(head: Eagle, rows: list[tuple[Tensor, Tensor]], config: LlamaConfig) -> Tensor:
    """The state of the last of some rows, each an embedded token and what stands beside it."""
    layer = head.layers[0]
    x = torch.stack([head.fc(torch.cat(row)) for row in rows])
    y = (x + attended(layer.self_attn, x, config))[-1]
    return y + layer.mlp(layer.post_attention_layernorm(y))


def eagle3_row(head: Eagle3, rows: list[tuple[Tensor, Tensor]], config: LlamaConfig) -> Tensor:
    """As `eagle_row`; the target's features are wider than a state of its own."""
    layer = head.midlayer
    beside = [head.fc(b) if len(b) > HIDDEN else b for _, b in rows]
    normed = [
        torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(state)))
        for (embedded, _), state in zip(rows, beside, strict=True)
    ]
    x = torch.stack(normed)
    y = beside[-1] + attended(layer.self_attn, x, config)[-1]
    return y + layer.mlp(layer.post_attention_layernorm(y))


@pytest.mark.parametrize("kind", [HeadKind.EAGLE, HeadKind.EAGLE3])
def test_every_chain_is_as_a_drafter_would_write_it(
    kind: HeadKind, folder: Path, text: Tensor
) -> None:
    teacher, num_steps = teacher_of(folder, kind), 4
    head = widened(kind, teacher.shared)
    assert isinstance(head, Eagle | Eagle3)
    row_of = eagle_row if isinstance(head, Eagle) else eagle3_row
    features = teacher.read(text, teacher.shared.layers)[0]
    states = head.states(features, text, num_steps)
    assert teacher.shared.config.rope_parameters["rope_theta"] == 500.0
    for b, last in ((0, 1), (0, 4), (1, LENGTH - num_steps)):  # the last committed token
        words = F.embedding(text[b], head.embedding)
        rows = [(words[at], features[b, at - 1]) for at in range(1, last + 1)]
        for step in range(num_steps):
            state = row_of(head, rows, teacher.shared.config)
            # Rounding grows from step to step: each reads the state before it.
            atol = TOLERANCE * float(state.abs().amax())
            torch.testing.assert_close(states[step][b, last - 1], state, rtol=1e-4, atol=atol)
            if step + 1 < num_steps:
                rows.append((words[last + step + 1], state))


def test_every_medusa_head_reads_the_feature_alone(folder: Path, text: Tensor) -> None:
    teacher = teacher_of(folder, HeadKind.MEDUSA)
    head = widened(HeadKind.MEDUSA, teacher.shared)
    assert isinstance(head, Medusa)
    features = teacher.read(text, teacher.shared.layers)[0]
    states = head.states(features, text, NUM_MEDUSA_HEADS)
    for step, (block, output) in enumerate(head):
        f = features[0, 3]
        want = output.weight @ (f + F.silu(block.linear.weight @ f + block.linear.bias))
        torch.testing.assert_close(head.factors(states[step], step).logits()[0, 3], want)


def test_features_are_what_enters_a_layer_and_what_the_output_matrix_multiplies(
    folder: Path, text: Tensor
) -> None:
    teacher = teacher_of(folder, HeadKind.EAGLE3)
    assert teacher.shared.layers == feature_layers(HeadKind.EAGLE3, {}, 8) == (2, 4, 5)
    model = teacher.loaded.model
    entered: dict[int, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, at=at: entered.update({at: args[0]}))
        for at, layer in enumerate(model.model.layers)
    ]
    want = model(input_ids=text, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    found, logits = teacher.read(text, (*teacher.shared.layers, LAST))
    *features, last = found.split(HIDDEN, dim=-1)
    for at, feature in zip(teacher.shared.layers, features, strict=True):
        assert torch.equal(feature, entered[at])
    torch.testing.assert_close(F.linear(last, teacher.shared.output), logits)
    torch.testing.assert_close(logits, want)
    torch.testing.assert_close(teacher.shared.last_norm, model.model.norm.weight)


def test_every_block_is_as_the_engine_drafts_it(folder: Path, text: Tensor, tmp_path: Path) -> None:
    teacher = teacher_of(folder, HeadKind.DFLASH)
    head = widened(HeadKind.DFLASH, teacher.shared)
    assert isinstance(head, DFlash)
    write_head(head, HeadKind.DFLASH, teacher.shared, tmp_path)
    head = load_head(HeadKind.DFLASH, teacher.shared, tmp_path)  # its weights are bfloat16 now
    loaded = engine_head(str(tmp_path), target=str(folder), dtype="float32")
    assert (loaded.layers, loaded.depth) == (teacher.shared.layers, BLOCK - 1)
    features = teacher.read(text, teacher.shared.layers)[0]
    states = head.states(features, text, 4)
    for b, last in ((0, 1), (1, LENGTH - 4)):  # the last committed token
        executor, where = DFlashExecutor(loaded, 64), tuple(range(last + 1))
        given = (None, *(one.numpy().tobytes() for one in features[b, :last]))
        tokens = tuple(text[b, : last + 1].tolist())
        got = [executor.run(Feed(tokens, where, where, 0, None, features=given), (last,))]
        at = tuple(range(last + 1, last + 4))
        got.append(executor.run(Feed((1, 2, 3), at, at, last + 1, (1, 3, 7)), range(3)))
        for step, logits in enumerate(torch.cat(got)):
            want = head.factors(states[step][b, last - 1], step).logits()
            torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)


class AllKnowing(Eagle):
    """Says what the text says, `shift` tokens late."""

    shift = 0

    def states(self, features: Tensor, text: Tensor, num_steps: int) -> list[Tensor]:
        """Of each row the token behind the one that it holds, spelt out."""
        num_rows = text.shape[1] - num_steps
        said = [
            torch.stack([text[:, (i + 2 + step - self.shift) % LENGTH] for i in range(num_rows)], 1)
            for step in range(num_steps)
        ]
        return [100.0 * F.one_hot(tokens, VOCAB).float() for tokens in said]

    def factors(self, state: Tensor, _step: int) -> Factors:
        """The states themselves are the logits."""
        return Factors(state, torch.eye(VOCAB), None)


def test_the_loss_is_none_for_who_knows_the_next_token_and_for_nobody_else(
    folder: Path, text: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_heads, "FEATURE_WEIGHT", 0.0)
    head = AllKnowing(teacher_of(folder, HeadKind.EAGLE).shared)
    p = F.one_hot(text.roll(-1, dims=1), VOCAB).float()  # p_q is sure of token q + 1
    features, counts = torch.zeros(2, LENGTH, VOCAB), torch.ones(2, LENGTH)
    assert train_heads.chain_loss(head, features, text, p, counts, 3) < 1e-3
    for shift in (-1, 1):
        head.shift = shift
        assert train_heads.chain_loss(head, features, text, p, counts, 3) > 10


def test_what_stands_behind_the_end_of_a_text_is_not_learned(
    folder: Path, text: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_heads, "FEATURE_WEIGHT", 0.0)
    head = AllKnowing(teacher_of(folder, HeadKind.EAGLE).shared)
    p = F.one_hot(text.roll(-1, dims=1), VOCAB).float()
    p[:, 5:] = p[:, 5:].roll(1, dims=2)  # from there on the head is wrong
    features, counts = torch.zeros(2, LENGTH, VOCAB), torch.ones(2, LENGTH)
    assert train_heads.chain_loss(head, features, text, p, counts, 3) > 10
    counts[:, 5:] = 0
    assert train_heads.chain_loss(head, features, text, p, counts, 3) < 1e-3
    assert train_heads.chain_loss(head, features, text, p, 0 * counts, 3) == 0


@pytest.mark.parametrize("at_once", [1, 2, 1 << 18])
def test_the_written_gradients_are_those_of_autograd(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_heads, "rows_at_once", lambda _: at_once)
    generator = torch.Generator().manual_seed(6)
    rows, matrix, bias, p = (
        torch.rand(shape, generator=generator, dtype=torch.float64)
        for shape in ((5, 4), (9, 4), (9,), (7, 9))
    )
    places = torch.tensor([6, 0, 1, 3, 4])
    p = p / (1.2 * p.sum(dim=-1, keepdim=True))  # the head lacks some tokens of the target
    learned = [rows.requires_grad_(), (4 * matrix - 2).requires_grad_()]
    logq = Factors(learned[0], learned[1], bias).logits().log_softmax(dim=-1)
    wanted = p[places]
    plain = (1.0 - torch.minimum(wanted, logq.exp()).sum(dim=-1) - (wanted * logq).sum(-1)).sum()
    found = train_heads.Distance.apply(*learned, bias, p, places)
    torch.testing.assert_close(found, plain)
    want = torch.autograd.grad(3 * plain, learned)
    torch.testing.assert_close(torch.autograd.grad(3 * found, learned), want)


def test_who_knows_the_text_has_every_draft_accepted(folder: Path) -> None:
    teacher = teacher_of(folder, HeadKind.EAGLE)
    head = AllKnowing(teacher.shared)
    prompts = [np.array([1, 2, 3, 4]), np.array([5, 6])]
    hits = [head_hits(head, teacher)]
    assert rates(teacher, hits, prompts, LENGTH, 0.5) == [[1.0] * NUM_DRAFTS]
    head.shift = 1
    assert rates(teacher, hits, prompts, LENGTH, 0.5)[0][0] < 0.5


def test_the_target_chooses_each_token_with_its_noise_after_prompts_of_any_length(
    folder: Path,
) -> None:
    teacher = teacher_of(folder, HeadKind.EAGLE)
    prompts = [np.array([1, 2, 3, 4]), np.array([5, 6])]
    noise = teacher.noise([0.0, 3.0], 5)
    text = teacher.write(prompts, LENGTH, noise)
    assert (text[0, :4].tolist(), text[1, :2].tolist()) == ([1, 2, 3, 4], [5, 6])
    logits = teacher.read(text, (LAST,))[1]
    greedy = logits.argmax(dim=-1)
    for place in range(4, LENGTH):
        scores = logits[:, place - 1] + noise(place)
        assert torch.equal(text[:, place], scores.argmax(dim=-1))
    assert torch.equal(text[0, 4:], greedy[0, 3:-1])
    assert not torch.equal(text[1, 2:], greedy[1, 1:-1])


def test_a_head_of_fewer_tokens_is_held_to_theirs_and_never_chooses_another(
    folder: Path,
) -> None:
    head = widened(HeadKind.EAGLE3, teacher_of(folder, HeadKind.EAGLE3).shared)
    assert head.ids is not None
    assert torch.equal(head.ids, IDS)
    logits = head.of_target(torch.ones(3, len(IDS)))
    assert torch.equal(torch.isfinite(logits[0]).nonzero().flatten(), IDS)


def test_eagle_begins_as_the_best_linear_guess(folder: Path) -> None:
    text = torch.randint(VOCAB, (64, LENGTH), generator=torch.Generator().manual_seed(4))
    teacher = teacher_of(folder, HeadKind.EAGLE)
    head = new_head(HeadKind.EAGLE, teacher.shared, IDS)
    assert isinstance(head, Eagle)
    with torch.no_grad():
        features = teacher.read(text, teacher.shared.layers)[0]
    words = F.embedding(text[:, 1:], head.embedding)
    inputs = torch.cat((words, features[:, :-1]), dim=-1)

    def error() -> float:
        return (head.fc(inputs) - features[:, 1:]).square().mean().item()

    train_heads.start_linear(head, features, text, torch.ones(text.shape))
    best = error()
    assert best < 0.9 * float(features[:, 1:].var(dim=(0, 1)).mean())
    with torch.no_grad():
        for weight in (head.fc.weight, head.fc.bias):
            change = 0.01 * torch.randn(weight.shape)
            for sign in (1, -2):
                weight += sign * change
                assert error() > best
            weight += change


@pytest.mark.parametrize("kind", FILES)
def test_a_few_steps_bring_every_head_nearer_to_the_target(
    kind: HeadKind, folder: Path, text: Tensor
) -> None:
    teacher = teacher_of(folder, kind)
    head = new_head(kind, teacher.shared, IDS)
    with torch.no_grad():
        features, logits = teacher.read(text, teacher.shared.layers)
    p, counts = logits.softmax(dim=-1), torch.ones(text.shape)
    p = p if head.ids is None else p[..., head.ids]
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = train_heads.chain_loss(head, features, text, p, counts, 4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(weight.grad is not None for weight in head.parameters())


def test_the_plan_gives_chains_to_a_head_only_once_its_states_are_worth_reading() -> None:
    plan = TrainingPlan(HeadKind.EAGLE)
    assert plan.shape(0.0, 4096) == (16, 1)
    assert plan.shape(0.5, 4096) == (8, train_heads.NUM_STEPS)
    assert plan.shape(0.5, 100) == (1, train_heads.NUM_STEPS)
    assert TrainingPlan(HeadKind.MEDUSA).shape(0.0, 4096) == (16, NUM_MEDUSA_HEADS)

"""Which feature meets which token: an error there would show only as drafts that are rejected."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from lab.training import train_heads
from lab.training.evaluate_heads import by_depth, head_hits, own_text, tokens_per_pass
from lab.training.heads import (
    FILES,
    LAYERS,
    NUM_MEDUSA_HEADS,
    Attention,
    Eagle,
    Eagle3,
    Head,
    Medusa,
    new_head,
    sources_of,
    target_features,
)

VOCAB, HIDDEN, LENGTH = 61, 32, 12
IDS = torch.arange(0, VOCAB, 2)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
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
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(requires_grad=False)


@pytest.fixture(scope="module")
def text() -> Tensor:
    """Two texts."""
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def _plain_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling would take longer than the tests."""
    monkeypatch.setattr(train_heads, "distance_of", train_heads.distance)


def widened(name: str, target: LlamaForCausalLM) -> Head:
    """A head that does something in every part."""
    head = new_head(name, target, IDS)
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


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_every_chain_is_as_a_drafter_would_write_it(
    name: str, target: LlamaForCausalLM, text: Tensor
) -> None:
    head, num_steps = widened(name, target), 4
    assert isinstance(head, Eagle | Eagle3)
    row_of = eagle_row if isinstance(head, Eagle) else eagle3_row
    features = sources_of(head, target_features(target, text))
    states = head.states(features, text, num_steps)
    for b, last in ((0, 1), (0, 4), (1, LENGTH - num_steps)):  # the last committed token
        words = F.embedding(text[b], head.embedding)
        rows = [(words[at], features[b, at - 1]) for at in range(1, last + 1)]
        for step in range(num_steps):
            state = row_of(head, rows, target.config)
            torch.testing.assert_close(states[step][b, last - 1], state, rtol=1e-4, atol=TOLERANCE)
            if step + 1 < num_steps:
                rows.append((words[last + step + 1], state))


def test_every_medusa_head_reads_the_feature_alone(target: LlamaForCausalLM, text: Tensor) -> None:
    head = widened("medusa", target)
    assert isinstance(head, Medusa)
    features = sources_of(head, target_features(target, text))
    states = head.states(features, text, NUM_MEDUSA_HEADS)
    for step, (block, output) in enumerate(head):
        f = features[0, 3]
        want = output.weight @ (f + F.silu(block.linear.weight @ f + block.linear.bias))
        torch.testing.assert_close(head.logits(states[step], step)[0, 3], want)


def test_features_are_what_enters_a_layer_and_what_the_output_matrix_multiplies(
    target: LlamaForCausalLM, text: Tensor
) -> None:
    entered: dict[int, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, at=at: entered.update({at: args[0]}))
        for at, layer in enumerate(target.model.layers)
    ]
    logits = target(input_ids=text, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    features = target_features(target, text).split(HIDDEN, dim=-1)
    assert len(features) == len(LAYERS)
    for at, feature in zip(LAYERS[:-1], features[:-1], strict=True):
        assert torch.equal(feature, entered[at])
    torch.testing.assert_close(target.lm_head(features[-1]), logits)


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

    def logits(self, state: Tensor, _step: int) -> Tensor:
        """The states themselves."""
        return state


def test_the_loss_is_none_for_who_knows_the_next_token_and_for_nobody_else(
    target: LlamaForCausalLM, text: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_heads, "FEATURE_WEIGHT", 0.0)
    head = AllKnowing(target.config, target.model.embed_tokens.weight)
    p = F.one_hot(text.roll(-1, dims=1), VOCAB).float()  # p_q is sure of token q + 1
    features = torch.zeros(2, LENGTH, VOCAB)
    assert train_heads.chain_loss(head, features, text, p, 3) < 1e-3
    for shift in (-1, 1):
        head.shift = shift
        assert train_heads.chain_loss(head, features, text, p, 3) > 10


def test_who_knows_the_text_has_every_draft_accepted(
    target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.training.evaluate_heads.PROMPT_LEN", 4)
    monkeypatch.setattr("lab.training.evaluate_heads.TEXT_LEN", LENGTH - 4)
    head = AllKnowing(target.config, target.model.embed_tokens.weight)
    noise = 3.0 * torch.randn(2, LENGTH - 4, VOCAB, generator=torch.Generator().manual_seed(5))
    text = own_text(target, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), noise)
    scores = target(input_ids=text).logits[:, 3:-1] + noise
    assert torch.equal(text[:, 4:], scores.argmax(dim=-1))
    assert head_hits(head, target, text, noise).all()
    head.shift = 1
    assert head_hits(head, target, text, noise).float().mean() < 0.5


def test_tokens_are_counted_pass_by_pass() -> None:
    chains = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1], [1, 0, 0, 0]])
    # Two accepted and one more; none and one more; one and one more.
    assert tokens_per_pass(chains[None]) == pytest.approx((3 + 1 + 2) / 3)
    assert by_depth(chains[None]) == "0.80 0.75 0.67 1.00"


def test_a_head_of_fewer_tokens_is_held_to_theirs_and_never_chooses_another(
    target: LlamaForCausalLM,
) -> None:
    head = widened("eagle3", target)
    p = torch.rand(3, VOCAB)
    assert torch.equal(head.of_vocabulary(p), p[:, IDS])
    logits = head.of_target(torch.ones(3, len(IDS)))
    assert torch.equal(torch.isfinite(logits[0]).nonzero().flatten(), IDS)


def test_eagle_begins_as_the_best_linear_guess(target: LlamaForCausalLM) -> None:
    text = torch.randint(VOCAB, (64, LENGTH), generator=torch.Generator().manual_seed(4))
    head = new_head("eagle", target, IDS)
    assert isinstance(head, Eagle)
    features = sources_of(head, target_features(target, text))
    words = F.embedding(text[:, 1:], head.embedding)
    inputs = torch.cat((words, features[:, :-1]), dim=-1)

    def error() -> float:
        return (head.fc(inputs) - features[:, 1:]).square().mean().item()

    train_heads.start_linear(head, features, text)
    best = error()
    assert best < 0.9 * float(features[:, 1:].var(dim=(0, 1)).mean())
    with torch.no_grad():
        for weight in (head.fc.weight, head.fc.bias):
            change = 0.01 * torch.randn(weight.shape)
            for sign in (1, -2):
                weight += sign * change
                assert error() > best
            weight += change


@pytest.mark.parametrize("name", FILES)
def test_a_few_steps_bring_every_head_nearer_to_the_target(
    name: str, target: LlamaForCausalLM, text: Tensor
) -> None:
    head = new_head(name, target, IDS)
    features = target_features(target, text)
    p = target.lm_head(features[..., -HIDDEN:]).softmax(dim=-1)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = train_heads.chain_loss(head, sources_of(head, features), text, p, 4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(weight.grad is not None for weight in head.parameters())


def test_the_plan_gives_chains_to_a_head_only_once_its_states_are_worth_reading() -> None:
    plan: Callable[[float], tuple[int, int]] = train_heads.RECIPES["eagle"].plan
    assert plan(0.0) == (8, 1)
    assert plan(0.5) == (4, train_heads.NUM_STEPS)
    assert train_heads.RECIPES["medusa"].plan(0.0) == (8, NUM_MEDUSA_HEADS)

"""Measures the draft heads of the embedded target and its drafter: a table of models/README.md.

    python -m lab.training.evaluate_heads [--folder FOLDER]

It does no training. The target writes texts after held-out prompts, and each token is chosen with
noise that is kept (none for greedy texts). Drafter and heads choose with the same noise (coupling).
A draft counts only if all drafts before it in its chain equal the target's tokens, so chains are
drafted after the true text.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from lab.training.evaluate import PROMPT_LEN, TEXT_LEN, held_out_prompts, show
from lab.training.heads import FILES, Head, load_head, sources_of, target_features
from lab.training.train import DEVICE, SEED, load_written, logits_of
from proto.installation import MODELS

NUM_PROMPTS = 128
NUM_DRAFTS = 4  # drafts of a chain
BATCH_SIZE = 16
TEMPERATURES = (0.0, 0.7, 1.0)
Hits = Callable[[Tensor, Tensor], Tensor]  # takes text [B, T] and noise [B, TEXT_LEN, V]


def noise_of(num_texts: int, vocab_size: int, temperature: float) -> Tensor:
    """Return [num_texts, TEXT_LEN, V] to add to logits: Gumbel noise times the temperature."""
    shape = (num_texts, TEXT_LEN, vocab_size)
    if not temperature:
        return torch.zeros((), device=DEVICE).expand(shape)
    noise = torch.empty(shape, device=DEVICE).exponential_().log_()
    return noise.mul_(-temperature)


def own_text(target: LlamaForCausalLM, prompts: Tensor, noise: Tensor) -> Tensor:
    """Return int64 [B, T]: the prompts [B, PROMPT_LEN] continued by the target with this noise."""
    text, cache = prompts, None
    for step in range(noise.shape[1]):
        new = text if cache is None else text[:, -1:]
        output = target(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        scores = output.logits[:, -1].float() + noise[:, step]
        text = torch.cat([text, scores.argmax(dim=-1, keepdim=True)], dim=1)
    return text


def drafter_hits(drafter: LlamaForCausalLM, text: Tensor, noise: Tensor) -> Tensor:
    """Return bool [B, A, NUM_DRAFTS]: which drafts of the drafter equal the target's text.

    The text [B, T] and the shape are those of `head_hits`.
    """
    logits = logits_of(drafter, text)[:, PROMPT_LEN - 1 : -1]
    hits = (logits + noise).argmax(dim=-1) == text[:, PROMPT_LEN:]
    return hits.unfold(1, NUM_DRAFTS, 1)


def head_hits(head: Head, target: LlamaForCausalLM, text: Tensor, noise: Tensor) -> Tensor:
    """Return bool [B, A, NUM_DRAFTS]: which drafts of a head equal the target's own text [B, T].

    A chain of drafts begins at each of A tokens of the text, and each draft is made as if those
    before it were right.
    """
    features = sources_of(head, target_features(target, text))
    num_anchors, hits = TEXT_LEN - NUM_DRAFTS + 1, []
    for step, state in enumerate(head.states(features, text, NUM_DRAFTS)):
        # The first draft of row i is token i + 2.
        state = state[:, PROMPT_LEN - 2 : PROMPT_LEN - 2 + num_anchors]
        logits = head.of_target(head.logits(state, step).float())
        drafts = (logits + noise[:, step : step + num_anchors]).argmax(dim=-1)
        said = text[:, PROMPT_LEN + step : PROMPT_LEN + step + num_anchors]
        hits.append(drafts == said)
    return torch.stack(hits, dim=-1)


def tokens_per_pass(hits: Tensor) -> float:
    """Return accepted drafts + 1 per pass, if chains [B, A, NUM_DRAFTS] are used in turn.

    The next chain is the one that begins after the tokens of the pass before.
    """
    num_tokens = num_passes = 0
    for lengths in hits.long().cumprod(dim=-1).sum(dim=-1).tolist():
        at = 0
        while at < len(lengths):
            num_tokens, num_passes = num_tokens + lengths[at] + 1, num_passes + 1
            at += lengths[at] + 1
    return num_tokens / num_passes


def by_depth(hits: Tensor) -> str:
    """Return in words how often each draft of a chain is right if those before it are."""
    reached = hits.long().cumprod(dim=-1).float().mean(dim=(0, 1))
    rates = reached / torch.cat((torch.ones_like(reached[:1]), reached[:-1]))
    return " ".join(f"{rate:.2f}" for rate in rates.tolist())


@torch.inference_mode()
def evaluate(folder: Path) -> None:
    """Print the figures, a column for the drafter and one for each head in `folder`."""
    torch.manual_seed(SEED)
    target, drafter = (load_written(MODELS / name) for name in ("target", "drafter"))
    heads = {n: load_head(n, target, folder / n) for n in FILES if (folder / n).exists()}
    drafters: dict[str, Hits] = {"drafter": lambda text, noise: drafter_hits(drafter, text, noise)}
    for name, head in heads.items():
        drafters[name] = lambda text, noise, head=head: head_hits(head, target, text, noise)
    show("", *drafters)
    sizes = [sum(p.numel() for p in module.parameters()) for module in (drafter, *heads.values())]
    show("parameters", *(f"{size:,}" for size in sizes))
    prompts = held_out_prompts(NUM_PROMPTS)
    for temperature in TEMPERATURES:
        noise = noise_of(NUM_PROMPTS, target.config.vocab_size, temperature)
        text = own_text(target, prompts, noise)
        batches = list(zip(text.split(BATCH_SIZE), noise.split(BATCH_SIZE), strict=True))
        hits = [torch.cat([hits_of(*b) for b in batches]) for hits_of in drafters.values()]
        show(f"first draft at {temperature}", *(f"{h[..., 0].float().mean():.3f}" for h in hits))
        show(f"drafts by depth at {temperature}", *map(by_depth, hits))
        show(f"tokens a pass at {temperature}", *(f"{tokens_per_pass(h):.2f}" for h in hits))


def main() -> None:
    """Parse the command line and print the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.training.evaluate_heads",
        description="Measures the embedded target's draft heads.",
    )
    parser.add_argument(
        "--folder", type=Path, default=MODELS, metavar="DIR", help="folder of the heads"
    )
    evaluate(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()

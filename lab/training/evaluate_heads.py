"""Measures the draft heads of the embedded target beside its drafter: a table of models/README.md.

    python -m lab.training.evaluate_heads [--folder FOLDER]

Owns the figures and nothing of the training. The target writes texts after held-out prompts, each
token chosen with noise that is kept; whoever drafts chooses with the same noise (coupling), and
greedily where there is none. A draft counts only if those before it in its chain were what the
target says, so chains are read off the true text.
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
NUM_DRAFTS = 4  # of a chain
BATCH_SIZE = 16
TEMPERATURES = (0.0, 0.7, 1.0)
Hits = Callable[[Tensor, Tensor], Tensor]  # of text [B, T] and noise [B, TEXT_LEN, V]


def noise_of(num_texts: int, vocab_size: int, temperature: float) -> Tensor:
    """[num_texts, TEXT_LEN, V] to be added to logits: Gumbel noise times the temperature."""
    shape = (num_texts, TEXT_LEN, vocab_size)
    if not temperature:
        return torch.zeros((), device=DEVICE).expand(shape)
    noise = torch.empty(shape, device=DEVICE).exponential_().log_()
    return noise.mul_(-temperature)


def own_text(target: LlamaForCausalLM, prompts: Tensor, noise: Tensor) -> Tensor:
    """Int64[B, T]: the prompts [B, PROMPT_LEN] continued, each token chosen with its noise."""
    text, cache = prompts, None
    for step in range(noise.shape[1]):
        new = text if cache is None else text[:, -1:]
        output = target(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        scores = output.logits[:, -1].float() + noise[:, step]
        text = torch.cat([text, scores.argmax(dim=-1, keepdim=True)], dim=1)
    return text


def drafter_hits(drafter: LlamaForCausalLM, text: Tensor, noise: Tensor) -> Tensor:
    """As `head_hits`."""
    logits = logits_of(drafter, text)[:, PROMPT_LEN - 1 : -1]
    hits = (logits + noise).argmax(dim=-1) == text[:, PROMPT_LEN:]
    return hits.unfold(1, NUM_DRAFTS, 1)


def head_hits(head: Head, target: LlamaForCausalLM, text: Tensor, noise: Tensor) -> Tensor:
    """Bool[B, A, NUM_DRAFTS]: whether the drafts of the chain that begins with each token of the
    target's own text [B, T] are what the text says, if those before them are."""
    features = sources_of(head, target_features(target, text))
    num_anchors, hits = TEXT_LEN - NUM_DRAFTS + 1, []
    for step, state in enumerate(head.states(features, text, NUM_DRAFTS)):
        # Row i drafts token i + 2 first.
        state = state[:, PROMPT_LEN - 2 : PROMPT_LEN - 2 + num_anchors]
        logits = head.of_target(head.logits(state, step).float())
        drafts = (logits + noise[:, step : step + num_anchors]).argmax(dim=-1)
        said = text[:, PROMPT_LEN + step : PROMPT_LEN + step + num_anchors]
        hits.append(drafts == said)
    return torch.stack(hits, dim=-1)


def tokens_per_pass(hits: Tensor) -> float:
    """Of chains [B, A, NUM_DRAFTS] one behind the other: accepted drafts and one more token."""
    num_tokens = num_passes = 0
    for lengths in hits.long().cumprod(dim=-1).sum(dim=-1).tolist():
        at = 0
        while at < len(lengths):
            num_tokens, num_passes = num_tokens + lengths[at] + 1, num_passes + 1
            at += lengths[at] + 1
    return num_tokens / num_passes


def by_depth(hits: Tensor) -> str:
    """How often each draft of a chain is right when those before it are."""
    reached = hits.long().cumprod(dim=-1).float().mean(dim=(0, 1))
    rates = reached / torch.cat((torch.ones_like(reached[:1]), reached[:-1]))
    return " ".join(f"{rate:.2f}" for rate in rates.tolist())


@torch.inference_mode()
def evaluate(folder: Path) -> None:
    """Print the figures, a column for the drafter and each head written in `folder`."""
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
    parser = argparse.ArgumentParser(description="Measures the embedded target's draft heads.")
    parser.add_argument("--folder", type=Path, default=MODELS)
    evaluate(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()

"""Measures the embedded models: prints the tables of models/README.md.

    python -m lab.training.evaluate [--folder FOLDER] [--prompts PROMPTS.jsonl]

It does no training. The held-out tokens are those of `train prepare`.
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from lab.training.train import (
    CONTEXT,
    DEVICE,
    DRAFTERS,
    SEED,
    corpus_tokens,
    generate,
    load_written,
    logits_of,
    next_token_loss,
)
from proto.installation import MODELS

PROMPT_LEN, TEXT_LEN = 128, 128
NUM_LOOP_PROMPTS = 10
GRAM_LEN = 8  # length of runs of tokens that occur twice in a text only if it loops


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM) -> float:
    """Return the loss in nats per token on the held-out files, in windows of CONTEXT tokens."""
    windows = corpus_tokens("held_out").unfold(0, CONTEXT + 1, CONTEXT).to(DEVICE)
    return float(sum(next_token_loss(model, w[None]) for w in windows)) / len(windows)


def held_out_prompts(num_prompts: int) -> Tensor:
    """Return int64 [num_prompts, PROMPT_LEN]: prompts evenly spread over the held-out files."""
    tokens = corpus_tokens("held_out")
    starts = torch.linspace(0, len(tokens) - PROMPT_LEN, num_prompts).long()
    return tokens[starts[:, None] + torch.arange(PROMPT_LEN)].to(DEVICE)


@torch.inference_mode()
def distributions(models: list[LlamaForCausalLM], temperature: float) -> list[Tensor]:
    """Return each model's log probabilities [N, V] on the text of the first model at a temperature.

    The first model writes TEXT_LEN tokens after each of 128 held-out prompts. At temperature 0 the
    text is greedy, and the log probabilities are those at temperature 1.
    """
    temperatures = torch.full((128,), temperature, device=DEVICE)
    text = generate(models[0], held_out_prompts(128), PROMPT_LEN + TEXT_LEN, temperatures)
    batches = text.split(16)
    logits = [torch.cat([logits_of(m, b)[:, PROMPT_LEN - 1 : -1] for b in batches]) for m in models]
    return [(x.flatten(0, 1) / (temperature or 1.0)).log_softmax(dim=-1) for x in logits]


def coupled_hits(logp: Tensor, logq: Tensor) -> Tensor:
    """Return float32 [3]: how often the target's token is among the drafter's first 1, 2 and 3.

    Both choose with the same Gumbel noise.

    logp, logq  log probabilities [N, V] of target and drafter
    """
    gumbel = -torch.empty_like(logp).exponential_().log()
    drafts = (logq + gumbel).topk(3, dim=1).indices  # [N, 3], the best first
    hits = drafts == (logp + gumbel).argmax(dim=1, keepdim=True)
    return hits.float().mean(dim=0).cumsum(dim=0)


def repeated_share(text: list[int]) -> float:
    """Return the share of a text's runs of GRAM_LEN tokens that repeat an earlier run."""
    grams = [tuple(text[start : start + GRAM_LEN]) for start in range(len(text) - GRAM_LEN + 1)]
    return 1.0 - len(set(grams)) / len(grams)


def looping(model: LlamaForCausalLM, prompts: list[list[int]]) -> tuple[float, int]:
    """Return the mean repeated share of the greedy texts of `prompts`, and how many exceed 0.5."""
    shares = []
    for prompt in prompts:
        ids = torch.tensor([prompt[-PROMPT_LEN:]], device=DEVICE)
        length = ids.shape[1] + TEXT_LEN
        text = generate(model, ids, length, torch.zeros(1, device=DEVICE))
        shares.append(repeated_share(text[0, ids.shape[1] :].tolist()))
    return sum(shares) / len(shares), sum(share > 0.5 for share in shares)


def read_prompts(path: Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of the first NUM_LOOP_PROMPTS prompts of a JSON Lines file."""
    lines = path.read_text(encoding="utf-8").splitlines()[:NUM_LOOP_PROMPTS]
    return [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]


def evaluate(folder: Path, prompts: Path | None) -> None:
    """Measure the models in `folder` and print the figures, a column for each drafter."""
    torch.manual_seed(SEED)
    names = ["target", *(name for name in DRAFTERS if (folder / name).exists())]
    models = [load_written(folder / name) for name in names]
    show("", *names[1:])
    show("parameters (the target's first)", *(f"{m.num_parameters():,}" for m in models))
    show("held-out nats per token", *(f"{held_out_loss(m):.3f}" for m in models))
    logp, *drafters = distributions(models, temperature=0.0)
    agreements = ((logp.argmax(dim=1) == q.argmax(dim=1)).float().mean() for q in drafters)
    show("agreement, greedy", *(f"{agreement:.3f}" for agreement in agreements))
    for temperature in (0.7, 1.0):
        logp, *drafters = distributions(models, temperature)
        rates = (torch.minimum(logp.exp(), q.exp()).sum(dim=1).mean() for q in drafters)
        show(f"acceptance at {temperature}, ratio test", *(f"{rate:.3f}" for rate in rates))
        hits = [coupled_hits(logp, q) for q in drafters]
        for n in range(3):
            label = f"acceptance at {temperature}, coupling, best of {n + 1}"
            show(label, *(f"{best_of[n]:.3f}" for best_of in hits))
    loop_prompts = {"held-out": held_out_prompts(NUM_LOOP_PROMPTS).tolist()}
    if prompts is not None:
        tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
        loop_prompts[prompts.stem] = read_prompts(prompts, tokenizer)
    for name, ids in loop_prompts.items():
        share, num_loops = looping(models[0], ids)
        show(f"repeated {GRAM_LEN}-grams, greedy, {name}", f"{share:.3f} ({num_loops} loop)")


def show(label: str, *values: str) -> None:
    """Print one line of the table of figures."""
    print(f"{label:40}" + "".join(f"{value:>16}" for value in values), flush=True)


def main() -> None:
    """Parse the command line and print the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.training.evaluate", description="Measures the embedded models."
    )
    parser.add_argument(
        "--folder", type=Path, default=MODELS, metavar="DIR", help="folder of the models"
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSON Lines with a field `prompt`"
    )
    evaluate(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()

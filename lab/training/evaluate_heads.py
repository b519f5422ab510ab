"""Measures the draft heads of the embedded target and its drafter: a table of models/README.md.

    python -m lab.training.evaluate_heads [--folder FOLDER]

It does no training. The held-out tokens are those of `train prepare`; the target writes texts after
held-out prompts, and drafter and heads choose with its noise (`first_choices.py`).
"""

import argparse
from pathlib import Path

import torch

from lab.training.evaluate import PROMPT_LEN, TEXT_LEN, held_out_prompts, show
from lab.training.first_choices import drafter_hits, head_hits, rates
from lab.training.heads import FILES, load_head
from lab.training.teacher import load_teacher
from lab.training.train import DEVICE, load_written
from proto.installation import MODELS

NUM_PROMPTS = 128
TEMPERATURES = (0.0, 0.7, 1.0)


def tokens_per_pass(rates_by_depth: list[float]) -> float:
    """Return the mean number of tokens of a pass that verifies a chain: its right drafts and one.

    rates_by_depth  how often each draft is right if those before it are
    """
    reached, mean = 1.0, 1.0
    for rate in rates_by_depth:
        reached *= rate
        mean += reached
    return mean


@torch.inference_mode()
def evaluate(folder: Path) -> None:
    """Print the figures, a column for the drafter and one for each head in `folder`."""
    drafter = load_written(MODELS / "drafter")
    hits_of = {"drafter": drafter_hits(drafter)}
    sizes = [sum(p.numel() for p in drafter.parameters())]
    for kind in (kind for kind in FILES if (folder / kind).exists()):
        target = str(MODELS / "target")
        teacher = load_teacher(target, None, kind, dtype="float32", device=DEVICE.type)
        head = load_head(kind, teacher.shared, folder / kind)
        hits_of[kind] = head_hits(head, teacher)
        sizes.append(sum(p.numel() for p in head.parameters()))
    show("", *hits_of)
    show("parameters", *(f"{size:,}" for size in sizes))
    prompts = list(held_out_prompts(NUM_PROMPTS).cpu().numpy())
    for temperature in TEMPERATURES:
        found = rates(teacher, list(hits_of.values()), prompts, PROMPT_LEN + TEXT_LEN, temperature)
        show(f"first draft at {temperature}", *(f"{one[0]:.3f}" for one in found))
        show(f"drafts by depth at {temperature}", *(" ".join(f"{r:.2f}" for r in o) for o in found))
        show(f"tokens a pass at {temperature}", *(f"{tokens_per_pass(o):.2f}" for o in found))


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

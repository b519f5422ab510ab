"""Trains the draft heads of the embedded target: Medusa, EAGLE and EAGLE-3.

This file has their training runs; `heads` has what they compute, `train` the corpus and the loop,
`evaluate_heads` the figures. It imports nothing of Slipstream: it writes folders in the formats in
which heads are published for large models.

    python -m lab.training.train_heads prepare              corpus, in the target's own tokens
    python -m lab.training.train_heads teach --minutes 6    its texts and features, kept for heads
    python -m lab.training.train_heads medusa --minutes 8
    python -m lab.training.train_heads eagle --minutes 10
    python -m lab.training.train_heads eagle3 --minutes 10
    python -m lab.training.train_heads export               models/medusa, eagle, eagle3

Work in progress is in models/work/. The heads resume from their checkpoints: stop them at any time,
and start them again with the same or another number of minutes.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from lab.training.corpus import library_texts
from lab.training.heads import (
    DRAFT_VOCAB_SIZE,
    FILES,
    LAYERS,
    NUM_MEDUSA_HEADS,
    Eagle,
    Head,
    at_step,
    new_head,
    sources_of,
    target_features,
    write_head,
)
from lab.training.train import (
    BFLOAT16,
    DEVICE,
    HAS_BFLOAT16,
    SEED,
    WORK,
    batch_rows,
    corpus_parts,
    descend,
    load_written,
    mixed_batch,
    own_windows,
    replace,
    store_corpus,
)
from proto.installation import MODELS

CORPUS_SHARE = 1 / 3  # share of corpus in the stored windows; the others are the target's texts
NUM_STEPS = 5  # steps of a chain in training
STEP_WEIGHT = 0.8  # weight of a step's loss, relative to that of the step before
ONE_STEP_UNTIL = 0.4  # share of the budget with chains of one step; then the learning rate falls
FEATURE_WEIGHT = 1.0  # weight of EAGLE's error in features, relative to the loss of tokens
START_WINDOWS = 64  # about how many windows EAGLE's least-squares start uses


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a head is trained: its name and peak learning rate."""

    name: str
    lr_max: float

    @property
    def checkpoint(self) -> Path:
        """Return the path of the head's checkpoint."""
        return WORK / f"{self.name}.pt"

    def plan(self, progress: float) -> tuple[int, int]:
        """Return (windows in a batch, steps of a chain) after this share of the budget.

        EAGLE heads begin with chains of one step, because features that a head made itself mislead
        it as long as they are bad.
        """
        if self.name == "medusa":
            return 8, NUM_MEDUSA_HEADS
        return (8, 1) if progress < ONE_STEP_UNTIL else (4, NUM_STEPS)


RECIPES = {
    recipe.name: recipe
    for recipe in (Recipe("medusa", 1e-3), Recipe("eagle", 1.5e-3), Recipe("eagle3", 1.5e-3))
}


def target() -> LlamaForCausalLM:
    """Load and return the embedded target in float32, with its weights frozen."""
    return load_written(MODELS / "target").requires_grad_(requires_grad=False)


def prepare() -> None:
    """Store the corpus as tokens of the embedded target."""
    WORK.mkdir(exist_ok=True)
    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    store_corpus(tokenizer, library_texts(held_out=False))


@torch.inference_mode()
@BFLOAT16
def teach(minutes: float) -> None:
    """Store windows of text with the target's features of all their tokens.

    The windows are the target's own text (half of it greedy), written for `minutes` of computing,
    and windows of the corpus.
    """
    torch.manual_seed(SEED)
    model, parts = target(), corpus_parts()
    writer = target().to(torch.bfloat16) if HAS_BFLOAT16 else model  # moves half as many bytes
    own = [windows.cpu() for windows in own_windows(writer, parts[0], minutes)]
    num_corpus = int(sum(map(len, own)) * CORPUS_SHARE / (1 - CORPUS_SHARE))
    corpus = (mixed_batch(parts, step).cpu() for step in range(num_corpus // 8))
    windows = torch.cat([*own, *corpus]).short()
    size = len(LAYERS) * model.config.hidden_size
    np.save(WORK / "heads_windows.npy", windows.numpy())

    def write_features(path: Path) -> None:
        shape = (*windows.shape, size)
        # NumPy has no bfloat16, so the 16 bits are stored as an integer.
        stored = np.lib.format.open_memmap(path, "w+", np.int16, shape)
        for start in range(0, len(windows), 8):
            text = windows[start : start + 8].long().to(DEVICE)
            features = target_features(model, text).to("cpu", torch.bfloat16)
            stored[start : start + 8] = features.view(torch.int16).numpy()

    replace(WORK / "heads_features.npy", write_features)
    print(f"teach: {len(windows)} windows, {sum(map(len, own))} of them the target's own")


def stored_windows() -> Tensor:
    """Return the windows that `teach` stored, int16 [n, CONTEXT + 1]."""
    return torch.from_numpy(np.load(WORK / "heads_windows.npy"))


def stored_features(rows: np.ndarray) -> Tensor:
    """Return the features of these windows, bfloat16 [len(rows), CONTEXT + 1, len(LAYERS) * H].

    They are in ascending order of `rows`.
    """
    stored = np.load(WORK / "heads_features.npy", mmap_mode="r")
    return torch.from_numpy(stored[np.sort(rows)]).view(torch.bfloat16)


def commonest(windows: Tensor) -> Tensor:
    """Return int64 [DRAFT_VOCAB_SIZE]: the most frequent tokens of the windows, ascending."""
    counts = windows.long().flatten().bincount(minlength=DRAFT_VOCAB_SIZE)
    return counts.topk(DRAFT_VOCAB_SIZE).indices.sort().values.to(DEVICE)


def distance(logits: Tensor, p: Tensor) -> Tensor:
    """Return the cross entropy to the target's distribution + the rejection rate, mean over rows.

    Where the head lacks tokens of the target, `p` lacks them too and its sum is below one.

    logits  of the head, [..., D]
    p       probabilities of the target, [..., D]
    """
    logq = logits.float().log_softmax(dim=-1)
    cross_entropy = -(p * logq).sum(dim=-1)
    rejected = 1.0 - torch.minimum(p, logq.exp()).sum(dim=-1)
    return (cross_entropy + rejected).mean()


distance_of = torch.compile(distance)


def chain_loss(head: Head, features: Tensor, text: Tensor, p: Tensor, num_steps: int) -> Tensor:
    """Return how far a head is from the target: the weighted mean over the steps of a chain.

    features  of the target, [B, T, F]
    text      int64 [B, T]
    p         the target's distributions, [B, T, V]
    """
    p, losses = head.of_vocabulary(p), []
    for step, state in enumerate(head.states(features, text, num_steps)):
        num_rows = state.shape[1]
        loss = distance_of(head.logits(state, step), at_step(p, step, num_rows))
        if isinstance(head, Eagle):
            error = F.smooth_l1_loss(state, at_step(features, step, num_rows))
            loss = loss + FEATURE_WEIGHT * error
        losses.append(STEP_WEIGHT**step * loss)
    return torch.stack(losses).sum() / sum(STEP_WEIGHT**step for step in range(num_steps))


@torch.no_grad()
def start_linear(head: Eagle, features: Tensor, text: Tensor) -> None:
    """Set EAGLE's linear layer to the least-squares prediction of the next feature."""
    before, after = features[:, :-1], features[:, 1:].flatten(0, 1).double()
    embedded = F.embedding(text[:, 1:], head.embedding)
    ones = torch.ones_like(before[..., :1])
    x = torch.cat((embedded, before, ones), dim=-1).flatten(0, 1).double()
    ridge = 1e-6 * len(x) * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    weights = torch.linalg.solve(x.T @ x + ridge, x.T @ after)
    head.fc.weight.copy_(weights[:-1].T)
    head.fc.bias.copy_(weights[-1])


def train_head(minutes: float, name: str) -> None:
    """Train a head on the stored windows until it has had `minutes` of computing."""
    torch.manual_seed(SEED)
    recipe, model, windows = RECIPES[name], target(), stored_windows()
    head = new_head(name, model, commonest(windows))

    def batch(rows: np.ndarray) -> tuple[Tensor, Tensor]:
        text = windows[torch.from_numpy(np.sort(rows))].long().to(DEVICE)
        return text, stored_features(rows).to(DEVICE)

    if isinstance(head, Eagle):
        text, features = batch(np.arange(len(windows))[:: max(1, len(windows) // START_WINDOWS)])
        start_linear(head, sources_of(head, features), text)

    def loss_at(step: int, progress: float) -> Tensor:
        num_windows, num_steps = recipe.plan(progress)
        text, features = batch(batch_rows(step, len(windows), num_windows)[1])
        with torch.no_grad():
            last = features[..., -model.config.hidden_size :].float()
            p = model.lm_head(last).float().softmax(dim=-1)
        return chain_loss(head, sources_of(head, features), text, p, num_steps)

    descend(head, recipe.checkpoint, recipe.lr_max, minutes, loss_at)


def export(folder: Path) -> None:
    """Write the trained heads as they are now, in bfloat16."""
    model = target()
    for recipe in filter(lambda r: r.checkpoint.exists(), RECIPES.values()):
        head = new_head(recipe.name, model, torch.arange(DRAFT_VOCAB_SIZE))
        head.load_state_dict(torch.load(recipe.checkpoint, map_location=DEVICE)["model"])
        write_head(head, recipe.name, model, folder / recipe.name)
        size = (folder / recipe.name / FILES[recipe.name]).stat().st_size
        num_parameters = sum(parameter.numel() for parameter in head.parameters())
        print(f"{recipe.name}: {num_parameters:,} parameters, {size:,} bytes")


def _add_minutes(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--minutes", type=float, required=True, metavar="N", help="how long to train"
    )


def main() -> None:
    """Run the command that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.training.train_heads",
        description="Trains the embedded target's draft heads.",
    )
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", help=f"prepare, teach, {', '.join(RECIPES)} or export"
    )
    commands.add_parser("prepare").set_defaults(run=prepare)
    command = commands.add_parser("teach")
    _add_minutes(command)
    command.set_defaults(run=teach)
    for name in RECIPES:
        command = commands.add_parser(name)
        _add_minutes(command)
        command.set_defaults(run=train_head, name=name)
    command = commands.add_parser("export")
    command.add_argument(
        "--folder", type=Path, default=MODELS, metavar="DIR", help="folder to write to"
    )
    command.set_defaults(run=export)
    arguments = vars(parser.parse_args())
    arguments.pop("run")(**arguments)


if __name__ == "__main__":
    main()

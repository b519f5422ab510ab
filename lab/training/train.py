"""Makes the embedded models: a small target and much smaller drafters for Python source.

This file has the tokenizer and all training runs; `corpus` has the text, and `evaluate` measures
the figures of models/README.md. It imports nothing of Slipstream: it writes ordinary Hugging Face
folders.

    python -m lab.training.train prepare                  corpus and tokenizer
    python -m lab.training.train target --minutes 50      cross entropy on the corpus
    python -m lab.training.train teach --minutes 5        its distributions, kept for the drafters
    python -m lab.training.train drafter --minutes 12     distillation on them
    python -m lab.training.train export                   models/target and models/drafter

Work in progress is in models/work/. `target` and `drafter` resume from their checkpoints: stop them
at any time, and start them again with the same or another number of minutes.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lab.training.corpus import library_texts, package_texts
from lab.training.files import replace
from proto.installation import MODELS

WORK = MODELS / "work"
END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4096
CONTEXT = 512  # tokens in a training window
SEED = 20
TOP_K = 64  # entries of the target's distribution that are kept for each position
PROMPT_LEN = 64  # corpus tokens before the target's own text
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# On a CPU with bfloat16 instructions 2.6 times as fast as float32, on others 2.6 times as slow.
HAS_BFLOAT16 = DEVICE.type == "cuda" or bool(torch.cpu.get_capabilities().get("avx512_bf16"))
BFLOAT16 = torch.autocast(DEVICE.type, torch.bfloat16, enabled=HAS_BFLOAT16)
BATCH_SIZE = 32 if DEVICE.type == "cuda" else 8  # windows in a training step


@dataclass(frozen=True, slots=True)
class Recipe:
    """The shape of one of the models, and its peak learning rates.

    lr_max      peak learning rate when training starts from random weights
    lr_restart  peak learning rate when training starts from written weights
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    lr_max: float
    lr_restart: float

    def new_model(
        self, vocab_size: int = VOCAB_SIZE, end: int = 0, seed: int = SEED
    ) -> LlamaForCausalLM:
        """Return an untrained model of this shape, with random weights of a seed.

        end  the token that ends a text
        """
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end,
        )
        return LlamaForCausalLM(config).to(DEVICE)

    @property
    def checkpoint(self) -> Path:
        """Return the path of the model's checkpoint."""
        return WORK / f"{self.name}.pt"


TARGET = Recipe("target", 384, 1024, 8, 6, 3, lr_max=1.5e-3, lr_restart=7e-4)
DRAFTER = Recipe("drafter", 128, 384, 2, 4, 2, lr_max=4e-3, lr_restart=1e-3)
SHALLOW_DRAFTER = Recipe("drafter-shallow", 128, 384, 1, 4, 2, lr_max=4e-3, lr_restart=1.5e-3)
DRAFTERS = {recipe.name: recipe for recipe in (DRAFTER, SHALLOW_DRAFTER)}
LossAt = Callable[[LlamaForCausalLM, int], Tensor]  # the loss of a model at a step
LossAfter = Callable[[int, float], Tensor]  # the loss at a step, after this share of the budget


def prepare() -> None:
    """Train the tokenizer on the library's training files and store the corpus as tokens."""
    WORK.mkdir(exist_ok=True)
    library = library_texts(held_out=False)
    tokenizer = byte_level_bpe(VOCAB_SIZE, library)
    tokenizer.save(str(WORK / "tokenizer.json"))
    store_corpus(tokenizer, library)


def byte_level_bpe(vocab_size: int, texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE on texts and return it; END_OF_TEXT is its token 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    assert tokenizer.get_vocab_size() == vocab_size
    return tokenizer


def store_corpus(tokenizer: Tokenizer, library: list[str]) -> None:
    """Store the parts of the corpus as tokens; `library` are the library's training files."""
    held_out = library_texts(held_out=True)
    for name, texts in (
        ("library", library),
        ("held_out", held_out),
        ("packages", package_texts()),
    ):
        encodings = tokenizer.encode_batch(texts)
        tokens = np.concatenate([np.array([*e.ids, 0], dtype=np.uint16) for e in encodings])
        np.save(WORK / f"{name}.npy", tokens)
        print(f"{name}: {len(encodings)} files, {len(tokens):,} tokens")


def corpus_tokens(name: str) -> Tensor:
    """Return a part of the corpus, int64 [N] on the CPU; END_OF_TEXT follows each document."""
    return torch.from_numpy(np.load(WORK / f"{name}.npy").astype(np.int64))


def corpus_parts() -> tuple[Tensor, ...]:
    """Return the tokens of the library's training files, and those of the packages.

    The held-out files are of the library.
    """
    return corpus_tokens("library"), corpus_tokens("packages")


def batch_rows(step: int, num_windows: int, batch_size: int) -> tuple[int, np.ndarray]:
    """Return the epoch of a step, and the indices of the windows in its batch.

    Both depend on the step alone, so that a resumed run sees the same batches as an unbroken one.
    """
    epoch, index = divmod(step, num_windows // batch_size)
    order = np.random.default_rng([SEED, epoch]).permutation(num_windows)
    return epoch, order[index * batch_size : (index + 1) * batch_size]


def corpus_batch(tokens: Tensor, step: int, batch_size: int) -> Tensor:
    """Return windows of a part of the corpus, int64 [B, CONTEXT + 1].

    In every epoch the text is cut into windows at other places.
    """
    num_windows = (len(tokens) - 1) // CONTEXT - 1
    epoch, rows = batch_rows(step, num_windows, batch_size)
    phase = int(np.random.default_rng([SEED, epoch, 1]).integers(CONTEXT))
    starts = torch.from_numpy(rows * CONTEXT + phase)
    return tokens[starts[:, None] + torch.arange(CONTEXT + 1)].to(DEVICE)


def mixed_batch(parts: tuple[Tensor, ...], step: int) -> Tensor:
    """Return int64 [BATCH_SIZE, CONTEXT + 1] with the same number of windows from every part."""
    return torch.cat([corpus_batch(tokens, step, BATCH_SIZE // len(parts)) for tokens in parts])


def logits_of(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Return the logits, float32 [B, T, V], for tokens int64 [B, T]."""
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits.float()


def next_token_loss(model: LlamaForCausalLM, windows: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per token on windows [B, T + 1]."""
    logits = logits_of(model, windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.inference_mode()
def generate(model: LlamaForCausalLM, prompts: Tensor, length: int, temperature: Tensor) -> Tensor:
    """Return int64 [B, length]: the prompts [B, T] continued, each at its own temperature [B].

    Temperature 0 is greedy. An end of text is followed by the next document, as in the corpus.
    """
    text, cache = prompts, None
    while text.shape[1] < length:
        new = text if cache is None else text[:, -1:]
        output = model(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = output.past_key_values, output.logits[:, -1].float()
        scores = logits - temperature[:, None] * torch.empty_like(logits).exponential_().log()
        text = torch.cat([text, scores.argmax(dim=1, keepdim=True)], dim=1)
    return text


def current_model(recipe: Recipe) -> LlamaForCausalLM:
    """Return the model of the last checkpoint."""
    model = recipe.new_model()
    model.load_state_dict(torch.load(recipe.checkpoint, map_location=DEVICE)["model"])
    return model.eval()


def load_written(folder: Path) -> LlamaForCausalLM:
    """Load and return a model that `export` wrote, in float32."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).eval()


def start_from(model: LlamaForCausalLM, folder: Path) -> None:
    """Load the weights in `folder` into the model; a model of fewer layers takes the first ones."""
    written = load_written(folder).state_dict()
    model.load_state_dict({name: written[name] for name in model.state_dict()})


def learning_rate(lr_max: float, step: int, progress: float) -> float:
    """Return the rate: warm-up over 50 steps, flat, then from 40 % of the budget linearly to 0."""
    return lr_max * min((step + 1) / 50, 1.0, (1.0 - progress) / 0.6)


def computing_s() -> float:
    """Return the seconds of computing so far; only differences mean something.

    On a CPU this is the processor's time per thread, so that a machine busy with other work makes a
    run longer and not worse (OMP_WAIT_POLICY=passive keeps it honest).
    """
    if DEVICE.type == "cuda":
        return time.monotonic()
    return time.process_time() / torch.get_num_threads()


def optimizer_for(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """Return AdamW with weight decay for matrices and none for vectors."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == ndim], "weight_decay": decay}
        for ndim, decay in ((2, 0.1), (1, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def train(recipe: Recipe, minutes: float, init: Path | None, loss_at: LossAt) -> None:
    """Train a model until it has had `minutes` of computing in all its runs together.

    init  folder of weights with which the first run begins; None: random weights
    """
    model = recipe.new_model()
    if init is not None:
        start_from(model, init)
    lr_max = recipe.lr_max if init is None else recipe.lr_restart
    model.compile()  # in place: the names of the parameters stay as they are
    descend(model, recipe.checkpoint, lr_max, minutes, lambda step, _: loss_at(model, step))


def descend(
    model: nn.Module,
    checkpoint: Path,
    lr_max: float,
    minutes: float,
    loss_at: LossAfter,
    num_steps: int | None = None,
) -> int:
    """Train until the model has had `minutes` of computing; return the number of steps.

    It resumes from `checkpoint` if that exists, and writes it every 50 steps and at the end. What
    was computed before a checkpoint counts.

    num_steps  make so many steps, however long they take; None: the minutes count
    """
    optimizer = optimizer_for(model, lr_max)
    step, spent_s, budget_s = 0, 0.0, minutes * 60
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=DEVICE)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, spent_s = state["step"], state["spent_s"]

    def save() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"step": step, "spent_s": spent_s}
        replace(checkpoint, lambda path: torch.save(state, path))

    def progress() -> float:
        return spent_s / budget_s if num_steps is None else step / num_steps

    while (share := progress()) < 1.0:
        started = computing_s()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(lr_max, step, share)
        with BFLOAT16:
            loss = loss_at(step, share)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        spent_s += computing_s() - started
        if step % 10 == 0:
            print(f"{checkpoint.stem} {step=} {spent_s=:.0f} loss={loss.item():.3f}", flush=True)
        if step % 50 == 0:
            save()
    save()
    return step


def train_target(minutes: float, init: Path | None) -> None:
    """Train the target on the corpus."""
    parts = corpus_parts()
    train(TARGET, minutes, init, lambda m, step: next_token_loss(m, mixed_batch(parts, step)))


def own_windows(model: LlamaForCausalLM, tokens: Tensor, minutes: float) -> Iterator[Tensor]:
    """Yield batches int64 [64, CONTEXT + 1] of the target's own text, for about `minutes`.

    Each text continues PROMPT_LEN tokens of the corpus; half of the texts are greedy and half
    sampled.
    """
    temperature = (torch.arange(64, device=DEVICE) % 2).float()
    begun_s = computing_s()
    while computing_s() - begun_s < minutes * 60:
        starts = torch.randint(len(tokens) - PROMPT_LEN, (64, 1))
        prompts = tokens[starts + torch.arange(PROMPT_LEN)].to(DEVICE)
        yield generate(model, prompts, CONTEXT + 1, temperature)


@torch.inference_mode()
@BFLOAT16
def teach(minutes: float, init: Path | None) -> None:
    """Store windows with the TOP_K largest probabilities of the target at each position.

    So training a drafter needs no pass of the target. The windows are the target's own text for a
    third of the time, then the corpus as the target's training sees it.
    """
    model, parts = load_written(init) if init else current_model(TARGET), corpus_parts()
    own = own_windows(model, parts[0], minutes / 3)
    stored: list[tuple[np.ndarray, ...]] = []
    begun_s = computing_s()
    for windows in chain(own, (mixed_batch(parts, step) for step in count())):
        for batch in windows.split(BATCH_SIZE):
            top = logits_of(model, batch[:, :-1]).log_softmax(dim=-1).topk(TOP_K, dim=-1)
            rows = (batch.short(), top.indices.short(), top.values.half())
            stored.append(tuple(tensor.cpu().numpy() for tensor in rows))
        if computing_s() - begun_s > minutes * 60:
            break
    for name, arrays in zip(("windows", "ids", "logp"), zip(*stored, strict=True), strict=True):
        np.save(WORK / f"teach_{name}.npy", np.concatenate(arrays))
    print(f"teach: {len(stored) * BATCH_SIZE} windows")


def distillation_loss(logits: Tensor, top_ids: Tensor, top_logp: Tensor, text: Tensor) -> Tensor:
    """Return KL(p || q) + total variation distance + 0.1 * cross entropy, the mean over positions.

    The distance is the rejection rate. In both of the first two the tokens beyond the target's
    TOP_K are one outcome.

    logits             of the drafter, [B, T, V]
    top_ids, top_logp  the target's likeliest tokens and their log probabilities, [B, T, K]
    text               the tokens that follow, [B, T]
    """
    logq_all = logits.log_softmax(dim=-1)
    logq = logq_all.gather(-1, top_ids)
    p, q = top_logp.exp(), logq.exp()
    p_tail, q_tail = ((1.0 - x.sum(dim=-1)).clamp_min(1e-5) for x in (p, q))
    kl = (p * (top_logp - logq)).sum(dim=-1) + p_tail * (p_tail / q_tail).log()
    distance = 1.0 - torch.minimum(p, q).sum(dim=-1) - torch.minimum(p_tail, q_tail)
    cross_entropy = -logq_all.gather(-1, text[..., None]).squeeze(-1)
    return (kl + distance + 0.1 * cross_entropy).mean()


def train_drafter(minutes: float, init: Path | None, name: str) -> None:
    """Train a drafter on the windows that `teach` stored."""
    windows, ids, logp = (np.load(WORK / f"teach_{n}.npy") for n in ("windows", "ids", "logp"))
    loss_of = torch.compile(distillation_loss)

    def loss_at(model: LlamaForCausalLM, step: int) -> Tensor:
        rows = batch_rows(step, len(windows), BATCH_SIZE)[1]
        text = torch.from_numpy(windows[rows].astype(np.int64)).to(DEVICE)
        top_ids = torch.from_numpy(ids[rows].astype(np.int64)).to(DEVICE)
        top_logp = torch.from_numpy(logp[rows].astype(np.float32)).to(DEVICE)
        return loss_of(logits_of(model, text[:, :-1]), top_ids, top_logp, text[:, 1:])

    train(DRAFTERS[name], minutes, init, loss_at)


def export(folder: Path) -> None:
    """Write the trained models as they are now, in bfloat16, each with the tokenizer."""
    tokenizer = Tokenizer.from_file(str(WORK / "tokenizer.json"))
    for recipe in filter(lambda r: r.checkpoint.exists(), (TARGET, *DRAFTERS.values())):
        write_model(current_model(recipe), tokenizer, END_OF_TEXT, folder / recipe.name)


def write_model(model: LlamaForCausalLM, tokenizer: Tokenizer, end: str, folder: Path) -> None:
    """Write a model in bfloat16 with its tokenizer. Each file appears whole.

    end  the token that ends a text
    """
    written = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.token_to_id(end))
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / ".partial"
    model.save_pretrained(partial)
    (partial / "model.safetensors").chmod(0o644)
    written.save_pretrained(partial)
    for file in sorted(partial.iterdir()):
        os.replace(file, folder / file.name)
    partial.rmdir()


def main() -> None:
    """Run the command that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.training.train", description="Makes the embedded models."
    )
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", help="prepare, target, teach, drafter or export"
    )
    commands.add_parser("prepare").set_defaults(run=prepare)
    for name, run in (("target", train_target), ("teach", teach), ("drafter", train_drafter)):
        command = commands.add_parser(name)
        command.add_argument(
            "--minutes", type=float, required=True, metavar="N", help="how long to train"
        )
        command.add_argument(
            "--init", type=Path, metavar="DIR", help="folder of written weights to begin with"
        )
        if run is train_drafter:
            command.add_argument(
                "--name", choices=DRAFTERS, default=DRAFTER.name, help="which drafter to train"
            )
        command.set_defaults(run=run)
    command = commands.add_parser("export")
    command.add_argument(
        "--folder", type=Path, default=MODELS, metavar="DIR", help="folder to write to"
    )
    command.set_defaults(run=export)
    arguments = vars(parser.parse_args())
    arguments.pop("run")(**arguments)


if __name__ == "__main__":
    main()

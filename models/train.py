"""Makes the embedded pair: a small target and a much smaller drafter for Python source.

Owns the corpus, the tokenizer, both training runs, and the figures in models/README.md. It imports
nothing of Slipstream: what it writes is an ordinary pair of Hugging Face folders.

    python models/train.py prepare                  corpus and tokenizer
    python models/train.py target --minutes 50      cross entropy on the corpus
    python models/train.py teach --minutes 5        the target's distributions, kept for the drafter
    python models/train.py drafter --minutes 12     distillation on them
    python models/train.py export                   models/target and models/drafter
    python models/train.py evaluate                 the table of models/README.md

Work in progress lies under models/work/. `target` and `drafter` go on from their checkpoint: stop
them at any time, start them again with the same or a longer budget.
"""

import argparse
import hashlib
import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
WORK = HERE / "work"
END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4096
CONTEXT = 512  # tokens in a training window
SEED = 20
HELD_OUT_PERCENT = 5
TOP_K = 64  # entries of the target's distribution that are kept for each position
PROMPT_LEN = 64  # corpus tokens before the target's own text
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# On a CPU that has the instructions, 2.6 times as fast as float32.
BFLOAT16 = torch.autocast(DEVICE.type, torch.bfloat16)
BATCH_SIZE = 32 if DEVICE.type == "cuda" else 8  # windows in a training step


@dataclass(frozen=True, slots=True)
class Recipe:
    """Shape and peak learning rate of one of the two models."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    lr_max: float

    def new_model(self) -> LlamaForCausalLM:
        torch.manual_seed(SEED)
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
        )
        return LlamaForCausalLM(config).to(DEVICE)

    @property
    def checkpoint(self) -> Path:
        return WORK / f"{self.name}.pt"


TARGET = Recipe("target", 384, 1024, 8, 6, 3, lr_max=1.5e-3)
DRAFTER = Recipe("drafter", 128, 384, 2, 4, 2, lr_max=4e-3)
PAIR = (TARGET, DRAFTER)
LossAt = Callable[[LlamaForCausalLM, int], Tensor]  # of a model at a step


def is_held_out(relative_path: str) -> bool:
    digest = hashlib.sha256(relative_path.encode()).hexdigest()
    return int(digest[:8], 16) % 100 < HELD_OUT_PERCENT


def corpus_texts(*, held_out: bool) -> list[str]:
    """The standard library's files in the order of their paths, without its tests."""
    root, texts = Path(sysconfig.get_paths()["stdlib"]), []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        skipped = SKIPPED_FOLDERS.intersection(relative.parts)
        # The build settings of one installation are not source, and hold that machine's paths.
        generated = relative.name.startswith("_sysconfigdata") or "config-" in relative.parts[0]
        if not skipped and not generated and is_held_out(relative.as_posix()) == held_out:
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return list(filter(None, texts))


def prepare() -> None:
    """Train the tokenizer on the training files and store both parts of the corpus as tokens."""
    WORK.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    training = corpus_texts(held_out=False)
    tokenizer.train_from_iterator(training, trainer)
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(WORK / "tokenizer.json"))
    for name, texts in (("train", training), ("held_out", corpus_texts(held_out=True))):
        encodings = tokenizer.encode_batch(texts)
        tokens = np.concatenate([np.array([*e.ids, 0], dtype=np.uint16) for e in encodings])
        np.save(WORK / f"{name}.npy", tokens)
        print(f"{name}: {len(encodings)} files, {len(tokens):,} tokens")


def corpus_tokens(name: str) -> Tensor:
    """Int64[N] on the CPU: documents one after the other, each closed by the end-of-text token."""
    return torch.from_numpy(np.load(WORK / f"{name}.npy").astype(np.int64))


def batch_rows(step: int, num_windows: int) -> tuple[int, np.ndarray]:
    """The epoch of a step, and the windows of its batch; a function of the step alone, so that a
    resumed run sees what an unbroken one would have seen."""
    epoch, index = divmod(step, num_windows // BATCH_SIZE)
    order = np.random.default_rng([SEED, epoch]).permutation(num_windows)
    return epoch, order[index * BATCH_SIZE : (index + 1) * BATCH_SIZE]


def corpus_batch(tokens: Tensor, step: int) -> Tensor:
    """Int64[B, CONTEXT + 1] of the corpus; the cuts between windows move from epoch to epoch."""
    num_windows = (len(tokens) - 1) // CONTEXT - 1
    epoch, rows = batch_rows(step, num_windows)
    phase = int(np.random.default_rng([SEED, epoch, 1]).integers(CONTEXT))
    starts = torch.from_numpy(rows * CONTEXT + phase)
    return tokens[starts[:, None] + torch.arange(CONTEXT + 1)].to(DEVICE)


def logits_of(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Float32[B, T, V] of Int64[B, T]."""
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits.float()


def next_token_loss(model: LlamaForCausalLM, windows: Tensor) -> Tensor:
    """Mean cross entropy in nats per token of windows [B, T + 1]."""
    logits = logits_of(model, windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.inference_mode()
def generate(model: LlamaForCausalLM, prompts: Tensor, length: int, temperature: Tensor) -> Tensor:
    """Int64[B, length], the prompts [B, T] continued, each row at its own temperature [B] (zero is
    greedy). An end of text is followed by the next document, as in the corpus."""
    text, cache = prompts, None
    while text.shape[1] < length:
        new = text if cache is None else text[:, -1:]
        output = model(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = output.past_key_values, output.logits[:, -1].float()
        scores = logits - temperature[:, None] * torch.empty_like(logits).exponential_().log()
        text = torch.cat([text, scores.argmax(dim=1, keepdim=True)], dim=1)
    return text


def replace(path: Path, write: Callable[[Path], None]) -> None:
    """Write beside `path` and rename, so that a reader never sees half a file."""
    partial = path.with_name(f".partial-{path.name}")
    write(partial)
    os.replace(partial, path)


def current_model(recipe: Recipe) -> LlamaForCausalLM:
    """The model of the last checkpoint, or an untrained one before the first."""
    model = recipe.new_model()
    if recipe.checkpoint.exists():
        model.load_state_dict(torch.load(recipe.checkpoint, map_location=DEVICE)["model"])
    return model.eval()


def learning_rate(lr_max: float, step: int, progress: float) -> float:
    """Warm-up over 100 steps, then flat, then from 40% of the time budget linearly to zero."""
    return lr_max * min((step + 1) / 100, 1.0, (1.0 - progress) / 0.6)


def computing_s() -> float:
    """Seconds of computing so far: on a CPU the processor's time per thread, so that a machine busy
    with other work makes a run longer and not worse (OMP_WAIT_POLICY=passive keeps it honest)."""
    if DEVICE.type == "cuda":
        return time.monotonic()
    return time.process_time() / torch.get_num_threads()


def optimizer_for(model: LlamaForCausalLM, lr: float) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == ndim], "weight_decay": decay}
        for ndim, decay in ((2, 0.1), (1, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def train(recipe: Recipe, minutes: float, loss_at: LossAt) -> None:
    """Train until the model has had `minutes` of computing in all its runs together."""
    model = recipe.new_model()
    model.compile()  # in place: the names of the parameters stay as they are
    optimizer = optimizer_for(model, recipe.lr_max)
    step, spent_s, budget_s = 0, 0.0, minutes * 60
    if recipe.checkpoint.exists():
        state = torch.load(recipe.checkpoint, map_location=DEVICE)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, spent_s = state["step"], state["spent_s"]

    def save() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"step": step, "spent_s": spent_s}
        replace(recipe.checkpoint, lambda path: torch.save(state, path))

    while spent_s < budget_s:
        started = computing_s()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe.lr_max, step, spent_s / budget_s)
        with BFLOAT16:
            loss = loss_at(model, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        spent_s += computing_s() - started
        if step % 20 == 0:
            print(f"{recipe.name} {step=} {spent_s=:.0f} loss={loss.item():.3f}", flush=True)
        if step % 100 == 0:
            save()
    save()


def train_target(minutes: float) -> None:
    tokens = corpus_tokens("train")
    train(TARGET, minutes, lambda model, step: next_token_loss(model, corpus_batch(tokens, step)))


def own_windows(model: LlamaForCausalLM, tokens: Tensor, minutes: float) -> Iterator[Tensor]:
    """Batches [64, CONTEXT + 1] of the target's own text for about `minutes`, each from PROMPT_LEN
    tokens of the corpus; half of the rows are greedy and half are sampled."""
    temperature = (torch.arange(64, device=DEVICE) % 2).float()
    begun_s = computing_s()
    while computing_s() - begun_s < minutes * 60:
        starts = torch.randint(len(tokens) - PROMPT_LEN, (64, 1))
        prompts = tokens[starts + torch.arange(PROMPT_LEN)].to(DEVICE)
        yield generate(model, prompts, CONTEXT + 1, temperature).cpu()


@torch.inference_mode()
@BFLOAT16
def teach(minutes: float) -> None:
    """Store windows of the corpus and of the target's own text with the largest TOP_K probabilities
    of the target at each position, so that the drafter's epochs need no pass of the target."""
    model, tokens = current_model(TARGET), corpus_tokens("train")
    own = list(own_windows(model, tokens, minutes))
    windows = torch.cat([tokens.unfold(0, CONTEXT + 1, CONTEXT), *own])
    shape = (len(windows), CONTEXT, TOP_K)
    top_ids, top_logp = np.empty(shape, dtype=np.uint16), np.empty(shape, dtype=np.float16)
    for start in range(0, len(windows), 16):
        rows = slice(start, start + 16)
        logits = logits_of(model, windows[rows, :-1].to(DEVICE))
        top = logits.log_softmax(dim=-1).topk(TOP_K, dim=-1)
        top_ids[rows] = top.indices.cpu().numpy()
        top_logp[rows] = top.values.cpu().numpy()
    np.save(WORK / "teach_windows.npy", windows.numpy().astype(np.uint16))
    np.save(WORK / "teach_ids.npy", top_ids)
    np.save(WORK / "teach_logp.npy", top_logp)
    print(f"teach: {len(windows)} windows, of them {64 * len(own)} of the target's own text")


def distillation_loss(logits: Tensor, top_ids: Tensor, top_logp: Tensor, text: Tensor) -> Tensor:
    """KL(p || q) and the total variation distance, which is the rejection rate, both with the
    target's tail as one outcome, and a little cross entropy. Logits are [B, T, V], the target's
    entries [B, T, K], the tokens that follow [B, T]."""
    logq_all = logits.log_softmax(dim=-1)
    logq = logq_all.gather(-1, top_ids)
    p, q = top_logp.exp(), logq.exp()
    p_tail, q_tail = ((1.0 - x.sum(dim=-1)).clamp_min(1e-5) for x in (p, q))
    kl = (p * (top_logp - logq)).sum(dim=-1) + p_tail * (p_tail / q_tail).log()
    distance = 1.0 - torch.minimum(p, q).sum(dim=-1) - torch.minimum(p_tail, q_tail)
    cross_entropy = -logq_all.gather(-1, text[..., None]).squeeze(-1)
    return (kl + distance + 0.1 * cross_entropy).mean()


def train_drafter(minutes: float) -> None:
    windows, ids, logp = (np.load(WORK / f"teach_{n}.npy") for n in ("windows", "ids", "logp"))
    loss_of = torch.compile(distillation_loss)

    def loss_at(model: LlamaForCausalLM, step: int) -> Tensor:
        rows = batch_rows(step, len(windows))[1]
        text = torch.from_numpy(windows[rows].astype(np.int64)).to(DEVICE)
        top_ids = torch.from_numpy(ids[rows].astype(np.int64)).to(DEVICE)
        top_logp = torch.from_numpy(logp[rows].astype(np.float32)).to(DEVICE)
        return loss_of(logits_of(model, text[:, :-1]), top_ids, top_logp, text[:, 1:])

    train(DRAFTER, minutes, loss_at)


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM) -> float:
    """Nats per token over the held-out files, in windows of CONTEXT tokens."""
    windows = corpus_tokens("held_out").unfold(0, CONTEXT + 1, CONTEXT).to(DEVICE)
    return float(sum(next_token_loss(model, w[None]) for w in windows)) / len(windows)


@torch.inference_mode()
def distributions(pair: list[LlamaForCausalLM], temperature: float) -> list[Tensor]:
    """Log p and log q, [N, V], of the target's own text at a temperature (0: greedy, p and q as at
    1): 128 tokens after each of 128 held-out prompts of 128 tokens."""
    tokens = corpus_tokens("held_out")
    starts = torch.linspace(0, len(tokens) - 128, 128).long()
    prompts = tokens[starts[:, None] + torch.arange(128)].to(DEVICE)
    text = generate(pair[0], prompts, 256, torch.full((128,), temperature, device=DEVICE))
    batches = text.split(16)
    logits = [torch.cat([logits_of(m, batch)[:, 127:-1] for batch in batches]) for m in pair]
    return [(x.flatten(0, 1) / (temperature or 1.0)).log_softmax(dim=-1) for x in logits]


def evaluate(folder: Path) -> None:
    """Print the table of models/README.md for the pair as written in `folder`."""
    torch.manual_seed(SEED)
    pair = [
        LlamaForCausalLM.from_pretrained(folder / recipe.name, dtype=torch.float32).to(DEVICE)
        for recipe in PAIR
    ]
    table: dict[str, str] = {}
    for recipe, model in zip(PAIR, pair, strict=True):
        table[f"{recipe.name}, parameters"] = f"{model.num_parameters():,}"
        table[f"{recipe.name}, held-out nats per token"] = f"{held_out_loss(model):.3f}"
    logp, logq = distributions(pair, temperature=0.0)
    agreement = (logp.argmax(dim=1) == logq.argmax(dim=1)).float().mean()
    table["agreement, greedy"] = f"{agreement:.3f}"
    for temperature in (0.7, 1.0):
        logp, logq = distributions(pair, temperature)
        overlap = torch.minimum(logp.exp(), logq.exp()).sum(dim=1).mean()
        table[f"acceptance at {temperature}, ratio test"] = f"{overlap:.3f}"
        gumbel = -torch.empty_like(logp).exponential_().log()
        drafts = (logq + gumbel).topk(3, dim=1).indices  # [N, 3], the best first
        hits = (drafts == (logp + gumbel).argmax(dim=1, keepdim=True)).float().mean(dim=0)
        for num_drafts, rate in enumerate(hits.cumsum(dim=0), start=1):
            table[f"acceptance at {temperature}, coupling, best of {num_drafts}"] = f"{rate:.3f}"
    print("\n".join(f"{name:40} {value:>12}" for name, value in table.items()))


def export(folder: Path) -> None:
    """Write both models as they stand, in bfloat16, each with the tokenizer."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(WORK / "tokenizer.json"),
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    for recipe in PAIR:
        model = current_model(recipe).to(torch.bfloat16)
        model.generation_config = GenerationConfig(eos_token_id=0)
        partial = WORK / f"export-{recipe.name}"
        model.save_pretrained(partial)
        (partial / "model.safetensors").chmod(0o644)
        tokenizer.save_pretrained(partial)
        (folder / recipe.name).mkdir(parents=True, exist_ok=True)
        for file in sorted(partial.iterdir()):
            os.replace(file, folder / recipe.name / file.name)
        partial.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the embedded pair.")
    commands = parser.add_subparsers(required=True)
    commands.add_parser("prepare").set_defaults(run=prepare)
    for name, run in (("target", train_target), ("teach", teach), ("drafter", train_drafter)):
        command = commands.add_parser(name)
        command.add_argument("--minutes", type=float, required=True)
        command.set_defaults(run=run)
    for name, act in (("export", export), ("evaluate", evaluate)):
        command = commands.add_parser(name)
        command.add_argument("--folder", type=Path, default=HERE)
        command.set_defaults(run=act)
    arguments = vars(parser.parse_args())
    arguments.pop("run")(**arguments)


if __name__ == "__main__":
    main()

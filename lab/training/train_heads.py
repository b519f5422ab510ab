"""Trains a draft head of a target: Medusa, EAGLE, EAGLE-3 or DFlash. `heads` has what they compute.

A run has two parts, and both go on after it was killed at any moment. From the first checkpoint on
there is also a head that can be used.

    texts   the target continues prompts (or texts are taken as they are); they are kept on the disk
    steps   each reads some of these texts with the target and brings the head nearer to it

The target reads a text in the first step that uses it. Its features then stay in memory, up to
`FEATURE_SHARE` of the free memory, and later steps take them from there; none are on the disk.
Texts beyond that are read again in each step, and so are all texts of a target whose logits do not
follow from its features (`Lessons.is_linear`). What a step does depends on its number and on the
share of the budget that is spent. If the budget is a number of steps, a run that was killed
therefore ends with the weights of an unbroken one.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from engine.checkpoint.files import one_line
from engine.device import free_bytes
from lab.training.features import BLOCK
from lab.training.files import write_tensors
from lab.training.first_choices import Quality, Watched
from lab.training.head_texts import SEED, Texts
from lab.training.heads import (
    NUM_MEDUSA_HEADS,
    Eagle,
    Head,
    Shared,
    at_step,
    load_head,
    new_head,
)
from lab.training.optimising import batch_rows, computing_s, learning_rate, optimizer_for
from lab.training.teacher import ENDED, Teacher, Tokens
from proto.errors import ModelError
from proto.head_kinds import HeadKind

LAST = -1  # the layer after the last norm, whose features the output matrix multiplies
TEXT_SHARE = 0.3  # share of the minutes in which the target writes
NUM_TEXTS = 512  # texts if the budget is a number of steps
WINDOW = 256  # tokens of a text
# Tokens of a step with chains of one step; longer chains have half. In the minutes that a CPU has,
# many small steps bring a head further than few large ones; a GPU is idle during small ones.
BATCH_TOKENS = {"cpu": 1024, "cuda": 4096}
WRITTEN_AT_ONCE = 64  # texts; half of them greedy, half sampled
SAMPLED_AT = 0.8  # temperature; at 1 a small model writes what it never would for its users
NUM_STEPS = 4  # steps of a chain in training: as many drafts as a pass verifies by default
STEP_WEIGHT = 0.8  # weight of a step's loss, relative to that of the step before
ONE_STEP_UNTIL = 0.4  # share of the budget with chains of one step; then the learning rate falls
FEATURE_WEIGHT = 1.0  # weight of EAGLE's error in features, relative to the loss of tokens
START_WINDOWS = 64  # about how many windows EAGLE's least-squares start uses
MOST_LOGITS = 1 << 30  # numbers of a batch's logits; of large vocabularies fewer texts are read
# Rows whose logits are made and used at once. With more, a processor's caches no longer hold them;
# with fewer, adding up the gradient of the output matrix takes most of the time (docs/LOG.md).
MOST_AT_ONCE = {"cpu": 256, "cuda": 1 << 20}
AT_ONCE_BYTES = {"cpu": 1 << 30, "cuda": 4 << 30}  # most memory for that
NUMBERS_OF_A_LOGIT = 8  # float32 numbers that are made of each logit
FEATURE_SHARE = 0.3  # of the host's free memory, for features that are kept
CHECKPOINT_S = 30.0  # seconds of computing between two checkpoints
WATCH_S = 60.0  # seconds between two looks at how good the head is
NUM_WATCHED = 6  # held-out texts for that
LR_MAX = {HeadKind.MEDUSA: 1e-3, **dict.fromkeys((*HeadKind,)[1:], 1.5e-3)}
LR_WIDTH = 384  # the width of the target for which these are; a wider one learns more slowly


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What is trained, and for how long.

    minutes    of computing, texts included, all runs together
    num_steps  steps of training instead of minutes; None: minutes count
    num_texts  texts that the target writes; None: as many as TEXT_SHARE of the minutes allows
    as_is      train on the texts themselves, not on what the target makes of them
    num_draft_tokens  tokens that an EAGLE-3 head can draft; None: as is usual (`heads.py`)
    start_from  folder of a head with whose weights and tokens it begins; None: with new ones
    """

    kind: HeadKind
    minutes: float = 30.0
    num_steps: int | None = None
    num_texts: int | None = None
    as_is: bool = False
    num_draft_tokens: int | None = None
    start_from: Path | None = None

    def shape(self, progress: float, batch_tokens: int) -> tuple[int, int]:
        """Return (windows in a batch, steps of a chain) after this share of the budget.

        EAGLE heads begin with chains of one step, because features that a head made itself mislead
        it as long as they are bad. Those of a head that was trained before are not.
        """
        whole = max(1, batch_tokens // WINDOW)
        if self.kind is HeadKind.MEDUSA:
            return whole, NUM_MEDUSA_HEADS
        if self.kind is HeadKind.DFLASH:  # whose steps are all made at once
            return max(1, whole // 2), BLOCK - 1
        if self.start_from is None and progress < ONE_STEP_UNTIL:
            return whole, 1
        return max(1, whole // 2), NUM_STEPS

    def progress(self, step: int, spent_s: float) -> float:
        """Return which share of the budget is spent; 1 or more: all of it."""
        return spent_s / (60 * self.minutes) if self.num_steps is None else step / self.num_steps


@dataclass(frozen=True, slots=True)
class Report:
    """How far a run is: the texts that are there, then the steps; `share` of the part is done.

    quality  how good the head is on held-out texts; None: it was not looked at
    """

    part: str
    number: int
    share: float
    loss: float | None = None
    quality: Quality | None = None


Say = Callable[[Report], object]
Write = Callable[[Sequence[Tokens], int, int], Tensor]
"""Continues prompts to a length, from a seed: int64 [n, length], every second text greedy."""
OpenWriter = Callable[[], AbstractContextManager[Write]]
"""Starts what continues prompts, and ends it."""


# -- texts -----------------------------------------------------------------------------------------


def own_windows(
    open_writer: OpenWriter, texts: Texts, plan: TrainingPlan, work: Path, say: Say
) -> tuple[Tensor, float]:
    """Return the texts int64 [n, window] to train on, and the seconds that the target wrote them.

    Each batch is a file, with the seconds of computing that it took.

    Raises OutputError.
    """
    if plan.as_is:
        return torch.from_numpy(texts.windows(WINDOW)), 0.0
    batches: list[Tensor] = []
    spent_s, number = 0.0, 0
    most = plan.num_texts or (None if plan.num_steps is None else NUM_TEXTS)
    limit_s = TEXT_SHARE * 60 * plan.minutes
    write: Write | None = None
    with ExitStack() as opened:
        while True:
            path = work / f"texts-{len(batches):05}.safetensors"
            if not path.exists():
                share = number / most if most else spent_s / limit_s
                if share >= 1.0:
                    return torch.cat(batches), spent_s
                say(Report("texts", number, share))
                count = min(WRITTEN_AT_ONCE, most - number) if most else WRITTEN_AT_ONCE
                if write is None:
                    write = opened.enter_context(open_writer())
                begun_s = monotonic()  # another process may write
                prompts = [texts.prompt(number + at, WINDOW // 2) for at in range(count)]
                made = write(prompts, WINDOW, SEED + 1 + number)
                took_s = monotonic() - begun_s
                write_tensors(path, {"texts": made.cpu()}, {"spent_s": str(took_s)})
            with safe_open(path, framework="pt") as file:
                batches.append(file.get_tensor("texts"))
                spent_s += float(file.metadata()["spent_s"])
            number += len(batches[-1])


def writes(teacher: Teacher) -> OpenWriter:
    """Return what continues prompts with the teacher itself."""

    def write(prompts: Sequence[Tokens], length: int, seed: int) -> Tensor:
        temperatures = [SAMPLED_AT * (at % 2) for at in range(len(prompts))]
        return teacher.write(prompts, length, teacher.noise(temperatures, seed))

    return lambda: nullcontext(write)


def tokens_of(kind: HeadKind, windows: Tensor, count: int, vocab_size: int) -> Tensor:
    """Return the tokens of a new head as `new_head` takes them: int64, ascending.

    They are the `count` most frequent of the windows; of DFlash the least frequent one, since a
    mask should look like no token.
    """
    counts = windows[windows != ENDED].bincount(minlength=vocab_size)
    if kind is HeadKind.DFLASH:
        return counts.argmin()[None]
    return counts.topk(count).indices.sort().values


# -- features --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Lessons:
    """The texts with what the target says about them: features and distributions.

    windows    int64 [n, WINDOW]; ENDED after the end of a text
    ids        int64 [D]: the target's ids of the head's tokens; None: all of them
    kept       by window: features in bfloat16 and, of each row, the log of the sum of its logits'
               exponentials, so that probabilities of the head's tokens need no other logits; on the
               host, at most FEATURE_SHARE of its memory
    most_bytes  that `kept` may have
    is_linear  True if the target's logits follow from its last features by its output matrix, so
               that kept features save the target's pass; some models scale their logits
    """

    teacher: Teacher
    windows: Tensor
    ids: Tensor | None = None
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    is_linear: bool = False
    most_bytes: int = 0
    kept_bytes: int = 0

    def __post_init__(self) -> None:
        """Find out whether logits follow from features, and how much memory there is."""
        self.most_bytes = int(FEATURE_SHARE * free_bytes(torch.device("cpu")))
        text = self.windows[:1].clamp(min=0).to(self.teacher.device)
        with torch.no_grad():
            states, logits = self.teacher.read(text, (LAST,))
            found = self.logits_of(states.float())
        difference = (found.softmax(dim=-1) - logits.float().softmax(dim=-1)).abs().sum(dim=-1)
        self.is_linear = float(difference.mean()) < 0.05

    def logits_of(self, last: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the logits [..., V] float32 that the output matrix makes of features [..., H].

        ids  of these tokens only: [..., D]
        """
        output, bias = self.teacher.shared.output, self.teacher.shared.bias
        if ids is not None:
            output, bias = output[ids], None if bias is None else bias[ids]
        return F.linear(last, output, bias).float()

    @torch.no_grad()
    def batch(self, rows: np.ndarray) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return windows with what the head learns of them.

        T is the longest window's tokens and the steps of a chain; what lies behind a text counts
        nothing.

        text      int64 [B, T]
        features  float32 [B, T, F], rounded to bfloat16
        p         float32 [B, T, D]: the target's probabilities of the head's tokens
        counts    float32 [B, T]: 0 where p is of no token of the text
        """
        width, own = self.teacher.loaded.hidden_size, self.windows[torch.from_numpy(rows)]
        own = own[:, : max(map(self._length, rows.tolist()))]
        read = [self._read(row) for row in rows.tolist()]
        states = _padded([states for states, _ in read]).to(self.teacher.device)
        if self.is_linear:
            sums = _padded([sums for _, sums in read]).to(self.teacher.device)
            p = (self.logits_of(states[..., -width:].float(), self.ids) - sums[..., None]).exp()
        else:
            p = _padded([logits.float().softmax(dim=-1) for _, logits in read])
            p = p if self.ids is None else p[..., self.ids]
        counts = torch.zeros(own.shape)
        counts[:, :-1] = (own[:, 1:] != ENDED).float()
        text, counts = (one.to(self.teacher.device) for one in (own.clamp(min=0), counts))
        return text, states[..., :-width].float(), p, counts

    def _length(self, row: int) -> int:
        """Return how much of a window is read: its tokens, and room for the last one's chain."""
        return int((self.windows[row] != ENDED).sum()) + NUM_STEPS

    def _read(self, row: int) -> tuple[Tensor, Tensor]:
        """Return a window's features [T, F] of all layers, and with them what `kept` has.

        If logits do not follow from features, it is the logits [T, V] in place of their sums [T].
        Each window is read alone, so that it has the same features whatever it meets in a batch.
        """
        if (found := self.kept.get(row)) is not None:
            return found
        text = self.windows[row : row + 1, : self._length(row)]
        text = text.clamp(min=0).to(self.teacher.device)
        layers = (*self.teacher.shared.layers, LAST)
        read, logits = self.teacher.read(text, layers, with_logits=not self.is_linear)
        states = read[0].to(torch.bfloat16)
        if not self.is_linear:
            return states, logits[0]
        last = states[:, -self.teacher.loaded.hidden_size :].float()
        made = states.cpu(), self.logits_of(last).logsumexp(dim=-1).cpu()
        num_bytes = sum(one.numel() * one.itemsize for one in made)
        if self.kept_bytes + num_bytes <= self.most_bytes:
            self.kept[row] = made
            self.kept_bytes += num_bytes
        return made


def _padded(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors [T, ...] of different lengths as one [B, T, ...], with zeros behind them."""
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


# -- loss ------------------------------------------------------------------------------------------


class Distance(torch.autograd.Function):
    """How far a head's distributions are from the target's, summed over rows.

    Of a row it is the cross entropy + the rejection rate. Where the head lacks tokens of the
    target, `p` lacks them too and its sum is below one. The gradients are written out and made with
    the value, for some rows at a time (`rows_at_once`). Autograd would move several tensors as
    large as all logits.
    """

    @staticmethod
    def forward(
        ctx, rows: Tensor, matrix: Tensor, bias: Tensor | None, p: Tensor, places: Tensor
    ) -> Tensor:
        """Return [] for the logits that factors make of rows [N, H], and p[places] of p [M, D]."""
        device = rows.device
        low = torch.get_autocast_dtype(device.type)
        dtype = low if torch.is_autocast_enabled(device.type) else rows.dtype
        narrow, output = rows.to(dtype), matrix.detach().to(dtype)
        to_rows = torch.empty_like(rows)
        to_matrix = torch.zeros_like(matrix) if ctx.needs_input_grad[1] else None
        value = rows.new_zeros((), dtype=p.dtype)
        for some in torch.arange(len(rows), device=device).split(rows_at_once(matrix)):
            part, wanted = narrow[some], p[places[some]]
            logq = F.linear(part, output, bias).to(p.dtype).log_softmax(dim=-1)
            q = logq.exp()
            below = torch.where(q < wanted, q, 0.0)
            sums = wanted.sum(dim=-1, keepdim=True)
            value += (1.0 - torch.minimum(wanted, q).sum(dim=-1)).sum() - (wanted * logq).sum()
            gradient = q * (sums + below.sum(dim=-1, keepdim=True)) - wanted - below
            gradient = gradient.to(dtype)
            to_rows[some] = (gradient @ output).to(rows.dtype)
            if to_matrix is not None:
                to_matrix += gradient.T @ part
        ctx.save_for_backward(to_rows, to_matrix)
        return value

    @staticmethod
    def backward(ctx, above: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows [N, H] and matrix [D, H] for that of the value."""
        to_rows, to_matrix = ctx.saved_tensors
        return above * to_rows, None if to_matrix is None else above * to_matrix, None, None, None


def rows_at_once(matrix: Tensor) -> int:
    """Return of how many rows the logits by this output matrix [D, H] are made at once."""
    kind = matrix.device.type
    a_row = len(matrix) * NUMBERS_OF_A_LOGIT * torch.float32.itemsize
    return max(1, min(MOST_AT_ONCE[kind], AT_ONCE_BYTES[kind] // a_row))


def chain_loss(
    head: Head, features: Tensor, text: Tensor, p: Tensor, counts: Tensor, num_steps: int
) -> Tensor:
    """Return how far a head is from the target: the weighted mean over the steps of a chain.

    The arguments are those of `Lessons.batch`.
    """
    all_places = torch.arange(text.numel(), device=text.device).view(text.shape)
    losses = []
    for step, state in enumerate(head.states(features, text, num_steps)):
        num_rows = state.shape[1]
        chosen = at_step(counts, step, num_rows).flatten().nonzero()[:, 0]
        places = at_step(all_places, step, num_rows).flatten()[chosen]
        rows, count = state.flatten(0, 1)[chosen], max(1, len(chosen))  # of short texts none
        loss = Distance.apply(*head.factors(rows, step), p.flatten(0, 1), places) / count
        if isinstance(head, Eagle):
            near = features.flatten(0, 1)[places]
            loss = loss + FEATURE_WEIGHT * F.smooth_l1_loss(rows, near, reduction="sum") / (
                count * near.shape[-1]
            )
        losses.append(STEP_WEIGHT**step * loss)
    return torch.stack(losses).sum() / sum(STEP_WEIGHT**step for step in range(num_steps))


@torch.no_grad()
def start_linear(head: Eagle, features: Tensor, text: Tensor, counts: Tensor) -> None:
    """Set EAGLE's linear layer to the least-squares prediction of the next feature.

    The arguments are those of `Lessons.batch`; where a row's next token does not count, neither
    does its next feature.
    """
    are_true = counts[:, :-1] > 0
    before, after = features[:, :-1][are_true], features[:, 1:][are_true].double()
    embedded = F.embedding(text[:, 1:][are_true], head.embedding)
    ones = torch.ones_like(before[..., :1])
    x = torch.cat((embedded, before, ones), dim=-1).double()
    ridge = 1e-6 * len(x) * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    weights = torch.linalg.solve(x.T @ x + ridge, x.T @ after)
    head.fc.weight.copy_(weights[:-1].T)
    head.fc.bias.copy_(weights[-1])


# -- steps -----------------------------------------------------------------------------------------


def autocast(device: torch.device) -> torch.autocast:
    """Return the context in which matrices are multiplied in bfloat16, if the device has that.

    On a CPU with bfloat16 instructions that is 2.6 times as fast as float32, on others 2.6 times as
    slow.
    """
    has_bfloat16 = device.type == "cuda" or bool(torch.cpu.get_capabilities().get("avx512_bf16"))
    return torch.autocast(device.type, torch.bfloat16, enabled=has_bfloat16)


def train(
    teacher: Teacher,
    texts: Texts,
    plan: TrainingPlan,
    work: Path,
    say: Say,
    keep: Callable[[Head], object] = lambda _: None,
    open_writer: OpenWriter | None = None,
) -> Head:
    """Train a head, or go on with the run in the folder `work`; return the head.

    open_writer  what continues prompts with the target, while texts are missing; None: the teacher
    keep         writes the head to where it can be used; called with each checkpoint

    If it is interrupted (KeyboardInterrupt), a checkpoint is written first.

    Raises:
        ModelError: the target takes too few tokens, or training leads to no numbers.
        OutputError: a file cannot be written.
    """
    if teacher.loaded.max_model_len < WINDOW:
        raise ModelError(
            f"{teacher.loaded.name}: it takes {teacher.loaded.max_model_len} tokens, and training "
            f"needs {WINDOW}; use another target"
        )
    device, shared = teacher.device, teacher.shared
    before = plan.start_from
    started = None if before is None else trained_before(plan.kind, shared, before)
    with autocast(device):
        windows, spent_s = own_windows(open_writer or writes(teacher), texts, plan, work, say)
    torch.manual_seed(SEED)
    num_ids = min(plan.num_draft_tokens or shared.num_draft_tokens, teacher.vocab_size)
    head = started or new_head(
        plan.kind, shared, tokens_of(plan.kind, windows, num_ids, teacher.vocab_size)
    )
    with autocast(device):
        lessons = Lessons(teacher, windows, head.ids)
    run = Run(head, plan, work / "checkpoint.safetensors", shared.config.hidden_size, spent_s, keep)
    if not run.resume() and isinstance(head, Eagle) and started is None:
        some = np.arange(len(windows))[:: max(1, len(windows) // START_WINDOWS)]
        with autocast(device):
            text, features, _, counts = lessons.batch(some)
        start_linear(head, features, text, counts)
    watched: Watched | None = None
    looked_at = monotonic()
    try:
        while (progress := plan.progress(run.step, run.spent_s)) < 1.0:
            # It keeps the weights in bfloat16 until it ends, so each step needs another.
            with autocast(device):
                loss = run.advance(lessons, progress)
            quality = None
            if monotonic() - looked_at >= WATCH_S:
                with autocast(device):
                    watched = watched or Watched(teacher, held_out(texts), WINDOW)
                    quality = watched.quality(head)
                looked_at = monotonic()
            share = plan.progress(run.step, run.spent_s)
            say(Report("steps", run.step, share, loss, quality))
    except KeyboardInterrupt:
        if run.step and run.is_between_steps:
            run.save()
        raise
    run.save()
    return head.eval()


def trained_before(kind: HeadKind, shared: Shared, folder: Path) -> Head:
    """Return the head of a folder to go on with. Raises ModelError if it is not such a head."""
    try:
        return load_head(kind, shared, folder).train()
    except (OSError, SafetensorError, RuntimeError, KeyError, IndexError) as error:
        raise ModelError(
            f"--start-from: {folder} holds no {kind} head of {shared.name} "
            f"({one_line(error)}); name another folder"
        ) from error


def held_out(texts: Texts) -> Sequence[np.ndarray]:
    """Return the held-out prompts by which a head is looked at while it is trained."""
    return [texts.prompt(at, WINDOW // 2, held_out=True) for at in range(NUM_WATCHED)]


class Run:
    """The steps of a training run, and its checkpoint.

    step     number of steps so far
    spent_s  seconds of computing so far, of the texts too
    is_between_steps  False: a step has changed some weights, and is not counted yet
    """

    def __init__(
        self,
        head: Head,
        plan: TrainingPlan,
        checkpoint: Path,
        width: int,
        spent_s: float,
        keep: Callable[[Head], object],
    ) -> None:
        self.step, self.spent_s = 0, spent_s
        self.is_between_steps = True
        self._keep = keep
        self._head, self._plan, self._checkpoint = head, plan, checkpoint
        self._lr = LR_MAX[plan.kind] * min(1.0, LR_WIDTH / width)
        self._optimizer = optimizer_for(head, self._lr)
        self._saved_step, self._saved_s = -1, spent_s

    def advance(self, lessons: Lessons, progress: float) -> float:
        """Make a step; return its loss. Raises ModelError, OutputError."""
        begun_s = computing_s()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._lr, self.step, progress)
        batch_tokens = BATCH_TOKENS[lessons.teacher.device.type]
        num_windows, num_steps = self._plan.shape(progress, batch_tokens)
        room = MOST_LOGITS // (WINDOW * lessons.teacher.vocab_size * num_steps)
        count = max(1, min(num_windows, len(lessons.windows), room))
        rows = np.sort(batch_rows(self.step, len(lessons.windows), count))
        text, features, p, counts = lessons.batch(rows)
        loss = chain_loss(self._head, features, text, p, counts, num_steps)
        if not bool(loss.isfinite()):
            raise ModelError(f"step {self.step}: the loss is not finite; try --dtype float32")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._head.parameters(), 1.0)
        self.is_between_steps = False
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        self.is_between_steps = True
        self.spent_s += computing_s() - begun_s
        if self.spent_s - self._saved_s >= CHECKPOINT_S:
            self.save()
        return loss.item()

    def save(self) -> None:
        """Write the checkpoint and the head, unless they are there already. Raises OutputError."""
        if self._saved_step == self.step:
            return
        tensors = {f"head.{name}": value.cpu() for name, value in self._head.state_dict().items()}
        for name, parameter in self._head.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                if parameter in self._optimizer.state:
                    tensors[f"{key}.{name}"] = self._optimizer.state[parameter][key].cpu()
        numbers = {"step": str(self.step), "spent_s": str(self.spent_s)}
        write_tensors(self._checkpoint, tensors, numbers)
        self._keep(self._head)
        self._saved_step, self._saved_s = self.step, self.spent_s

    def resume(self) -> bool:
        """Take up the checkpoint if there is one; return whether there is."""
        if not self._checkpoint.exists():
            return False
        tensors = load_file(self._checkpoint)
        with safe_open(self._checkpoint, framework="pt") as file:
            numbers = file.metadata()
        self.step, self.spent_s = int(numbers["step"]), float(numbers["spent_s"])
        self._saved_step, self._saved_s = self.step, self.spent_s
        self._head.load_state_dict(
            {name: tensors[f"head.{name}"] for name in self._head.state_dict()}
        )
        for name, parameter in self._head.named_parameters():
            if f"exp_avg.{name}" in tensors:
                state = {"step": torch.tensor(float(self.step), device=parameter.device)}
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = tensors[f"{key}.{name}"].to(parameter.device)
                self._optimizer.state[parameter] = state
        return True

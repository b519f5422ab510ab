"""Makes drafters that read another vocabulary than the embedded target, to measure how they draft.

    python -m lab.training.other_vocabulary --tokenizer same --minutes 8 --out DIR
    python -m lab.training.other_vocabulary --tokenizer bpe --num-steps N --out DIR
    python -m lab.training.other_vocabulary --tokenizer unigram --num-steps N --out DIR

`bpe` is a byte-level BPE, `unigram` a Unigram whose unknown characters become bytes, and `same` the
target's own tokenizer, for comparison. All have the shape of the embedded drafter and learn by
cross entropy from the texts that the target wrote. Step n sees the same bytes of these texts
whatever the tokenizer is, so that models of the same number of steps can be compared: read the
number that the first command prints, and give it to the others.

The target writes its texts once, into the folder `--work`; later runs find them there. A run that
was stopped goes on when the same command is given again.
"""

import argparse
import json
import math
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import UnigramTrainer
from torch import Tensor
from transformers import LlamaForCausalLM

from coordinator.api.prompts import Tokenization
from lab.training.corpus import library_texts, package_texts
from lab.training.files import write_tensors
from lab.training.head_texts import read_texts
from lab.training.teacher import ENDED, load_teacher
from lab.training.train import (
    DEVICE,
    DRAFTER,
    END_OF_TEXT,
    SEED,
    WORK,
    batch_rows,
    byte_level_bpe,
    descend,
    load_written,
    logits_of,
    write_model,
)
from lab.training.train_heads import WRITTEN_AT_ONCE, Plan, Report, own_windows, written
from proto.head_kinds import HeadKind
from proto.installation import MODELS

TARGET = str(MODELS / "target")
KINDS = ("bpe", "unigram", "same")
NUM_TEXTS, NUM_HELD_OUT = 1792, 128  # texts that the target writes to train on, and to evaluate on
TEXTS_IN_STEP, ROWS = 16, 8  # the texts of a step follow one another, cut into rows of one length
NOT_LEARNED = -100  # stands for a next token that counts for nothing
SMALLEST, LARGEST = 300, 60_000  # of --size: all bytes must have a token, and ids fit into 16 bits
UNKNOWN, UNIGRAM_END = "<unk>", "</s>"
SPACE = "\u2581"  # the sentencepiece space
# A piece lies in one of these: spaces before the last one, which belongs to the next word; a word;
# other signs; spaces. Spaces that end a text are read as if one more and a word followed.
PIECES = Regex(
    rf"[\s{SPACE}]+(?={SPACE}[^\s{SPACE}])|{SPACE}?\w+|{SPACE}?[^\w\s{SPACE}]+|[\s{SPACE}]+"
)
# The trainer's time grows faster than its text: it reads one file of the library in so many.
UNIGRAM_EVERY = 3
# So unlikely that the text "<0x41>" is read as six characters, and not as the piece of a byte.
BYTE_SCORE = -1000.0
OTHER_CHARACTERS = re.compile(r"[^\x00-\x7f]+")  # these are left to the pieces of bytes


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer, and the token that ends a text."""

    tokenizer: Tokenizer
    end: str

    @property
    def end_id(self) -> int:
        """Return the number of the token that ends a text."""
        number = self.tokenizer.token_to_id(self.end)
        assert number is not None
        return number

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True, slots=True)
class Document:
    """A text that the target wrote, with its prompt.

    is_whole  False: it was cut where it became too long
    """

    text: str
    is_whole: bool

    @property
    def num_bytes(self) -> int:
        """Return the length of the text in UTF-8."""
        return len(self.text.encode())


# -- tokenizers ------------------------------------------------------------------------------------


def new_vocabulary(kind: str, size: int) -> Vocabulary:
    """Train a tokenizer on a part of the corpus and return it; `same` is the target's.

    kind  one of KINDS
    size  number of tokens; the 256 tokens of the bytes in `unigram` are not counted
    """
    if kind == "same":
        return Vocabulary(Tokenizer.from_file(f"{TARGET}/tokenizer.json"), END_OF_TEXT)
    if kind == "bpe":
        # The target's tokenizer learned from the library: a smaller BPE of the same text would be
        # its first tokens, and no token of that would be unknown to the target.
        return Vocabulary(byte_level_bpe(size, package_texts()), END_OF_TEXT)
    library = library_texts(held_out=False)[::UNIGRAM_EVERY]
    return Vocabulary(unigram(size, library), UNIGRAM_END)


def unigram(size: int, texts: Sequence[str]) -> Tokenizer:
    """Train a Unigram of `size` pieces and 256 bytes, and return it.

    What is not ASCII in the texts gets no pieces, so that it is said in bytes.
    """
    tokenizer = sentencepiece(models.Unigram())
    trainer = UnigramTrainer(
        vocab_size=size,
        special_tokens=[UNKNOWN, UNIGRAM_END],
        unk_token=UNKNOWN,
        initial_alphabet=[SPACE, *string.printable.replace(" ", "")],
        show_progress=False,
    )
    tokenizer.train_from_iterator([OTHER_CHARACTERS.sub("", text) for text in texts], trainer)
    _, _, *pieces = json.loads(tokenizer.to_str())["model"]["vocab"]
    made = unigram_of([(piece, score) for piece, score in pieces])
    assert made.get_vocab_size() == size + 256
    return made


def unigram_of(pieces: Sequence[tuple[str, float]]) -> Tokenizer:
    """Return a Unigram of these pieces and their scores; its last 256 tokens are the bytes.

    The bytes are last because a model may take the piece "A" and the byte of "A" for equally
    likely: the largest of its logits is then that of the piece.
    """
    ends = [(UNKNOWN, 0.0), (UNIGRAM_END, 0.0)]
    byte_pieces = [(f"<0x{byte:02X}>", BYTE_SCORE) for byte in range(256)]
    model = models.Unigram([*ends, *pieces, *byte_pieces], unk_id=0, byte_fallback=True)
    tokenizer = sentencepiece(model)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name, _ in ends])
    return tokenizer


def sentencepiece(model: models.Unigram) -> Tokenizer:
    """Return a tokenizer that writes spaces as sentencepiece does: as a sign of their own.

    One of them is put before a text and taken away again. Each space and line break of the text is
    kept. A text that holds this sign itself is not given back as it was.
    """
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(PIECES, "isolated")
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return tokenizer


# -- texts -----------------------------------------------------------------------------------------


def own_texts(work: Path, num_texts: int) -> tuple[list[Document], list[Document]]:
    """Return what the target wrote to train on, and what it wrote after held-out prompts.

    What the folder `work` lacks is written now. Raises OutputError.
    """
    work.mkdir(parents=True, exist_ok=True)
    own = new_vocabulary("same", 0)
    texts = read_texts(None, Tokenization(own.tokenizer), own.end_id, as_is=False)
    kind = HeadKind.MEDUSA  # of all heads it asks least of a target
    device = "cuda:0" if DEVICE.type == "cuda" else "cpu"
    teacher = load_teacher(TARGET, None, kind, dtype="float32", device=device)
    training, _ = own_windows(teacher, texts, Plan(kind, num_texts=num_texts), work, say)
    path = work / "held-out.safetensors"
    if not path.exists():
        firsts = range(0, NUM_HELD_OUT, WRITTEN_AT_ONCE)
        made = [written(teacher, texts, at, WRITTEN_AT_ONCE, held_out=True) for at in firsts]
        write_tensors(path, {"texts": torch.cat(made).cpu()})
    held_out = load_file(path)["texts"]
    return documents(training, own), documents(held_out, own)


def documents(windows: Tensor, own: Vocabulary) -> list[Document]:
    """Return the texts of windows int64 [n, T] of the target's tokens.

    Left out are those that begin or end inside a character, and those with the sentencepiece space,
    which `unigram` cannot give back.
    """
    found = []
    for window in windows.tolist():
        tokens = [token for token in window if token not in (ENDED, own.end_id)]
        text = own.tokenizer.decode(tokens)
        if text and not {"\ufffd", SPACE} & set(text):
            found.append(Document(text, is_whole=own.end_id in window))
    return found


def say(report: Report) -> None:
    """Print how far the writing of the texts is."""
    print(f"{report.part} {report.number}: {report.share:.0%}", flush=True)


# -- training --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lesson:
    """A text as tokens, with its end.

    tokens   int64 [n]
    learned  int64 [n]: the same; NOT_LEARNED for the end of a text that was cut
    """

    tokens: Tensor
    learned: Tensor


def lesson(vocabulary: Vocabulary, document: Document) -> Lesson:
    """Return the tokens of a text, and behind them the token that ends a text."""
    tokens = torch.tensor([*vocabulary.tokens(document.text), vocabulary.end_id])
    learned = tokens.clone()
    if not document.is_whole:
        learned[-1] = NOT_LEARNED
    return Lesson(tokens, learned)


def step_texts(num_texts: int, step: int) -> np.ndarray:
    """Return which texts a step reads: the same for each tokenizer."""
    return batch_rows(step, num_texts, min(TEXTS_IN_STEP, num_texts))[1]


def step_loss(model: LlamaForCausalLM, lessons: Sequence[Lesson], step: int) -> Tensor:
    """Return the mean cross entropy, in nats per token, on the texts of a step."""
    chosen = [lessons[at] for at in step_texts(len(lessons), step)]
    tokens, learned = rows_of([x.tokens for x in chosen]), rows_of([x.learned for x in chosen])
    logits = logits_of(model, tokens[:, :-1].to(DEVICE))
    wanted = learned[:, 1:].to(DEVICE).flatten()
    return F.cross_entropy(logits.flatten(0, 1), wanted, ignore_index=NOT_LEARNED)


def rows_of(parts: Sequence[Tensor]) -> Tensor:
    """Return int64 [ROWS, T + 1]: the parts one after another, cut into rows.

    Each row begins with the last token of the row before, because of the first token of a row
    nothing is learned.
    """
    stream = torch.cat(list(parts))
    length = (len(stream) - 1) // ROWS
    return stream[: ROWS * length + 1].unfold(0, length + 1, length)


@torch.inference_mode()
def bits_per_byte(
    model: LlamaForCausalLM, vocabulary: Vocabulary, texts: Sequence[Document]
) -> float:
    """Return how many bits a byte of these texts takes, prompts included.

    The figure can be compared between vocabularies, as one in nats per token cannot.
    """
    nats = 0.0
    for text in texts:
        of = lesson(vocabulary, text)
        begin = torch.tensor([vocabulary.end_id])  # as between two texts in training
        logits = logits_of(model, torch.cat((begin, of.tokens[:-1]))[None].to(DEVICE))[0]
        wanted = of.learned.to(DEVICE)
        nats += float(F.cross_entropy(logits, wanted, ignore_index=NOT_LEARNED, reduction="sum"))
    return nats / math.log(2) / sum(text.num_bytes for text in texts)


def make(
    kind: str,
    size: int,
    *,
    minutes: float,
    num_steps: int | None,
    num_texts: int,
    work: Path,
    out: Path,
    seed: int,
) -> None:
    """Train a drafter and write it to the folder `out`; print what it saw and how good it is.

    Raises OutputError: the texts or the model cannot be written.
    """
    training, held_out = own_texts(work, num_texts)
    out.mkdir(parents=True, exist_ok=True)
    vocabulary = new_vocabulary(kind, size)
    lessons = [lesson(vocabulary, text) for text in training]
    model = DRAFTER.new_model(vocabulary.tokenizer.get_vocab_size(), vocabulary.end_id, seed)
    checkpoint = out / f"{kind}.pt"
    steps = descend(
        model,
        checkpoint,
        DRAFTER.lr_max,
        minutes,
        lambda step, _: step_loss(model, lessons, step),
        num_steps,
    )
    write_model(model, vocabulary.tokenizer, vocabulary.end, out)
    checkpoint.unlink()
    bits = bits_per_byte(load_written(out), vocabulary, held_out)
    seen = sum(training[at].num_bytes for n in range(steps) for at in step_texts(len(training), n))
    unread = sum(text.num_bytes for text in held_out)
    print(
        f"{kind}: {steps} steps, {seen:,} bytes of text seen "
        f"({sum(text.num_bytes for text in training):,} different ones), "
        f"{sum(len(x.tokens) for x in lessons):,} tokens; "
        f"{bits:.4f} bits per byte on {unread:,} held-out bytes",
        flush=True,
    )


def main() -> None:
    """Parse the command line and make the drafter."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.training.other_vocabulary",
        description="Makes a drafter of another vocabulary for the embedded target.",
    )
    parser.add_argument("--tokenizer", dest="kind", choices=KINDS, required=True)
    parser.add_argument(
        "--size", type=int, default=2000, metavar="N", help="tokens of bpe and unigram"
    )
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, default=0.0, metavar="M", help="of computing")
    budget.add_argument("--num-steps", type=int, metavar="N", help="steps, however long they take")
    parser.add_argument(
        "--texts", dest="num_texts", type=int, default=NUM_TEXTS, metavar="N", help="to train on"
    )
    parser.add_argument(
        "--work", type=Path, default=WORK / "own-texts", metavar="DIR", help="the target's texts"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the drafter")
    parser.add_argument("--seed", type=int, default=SEED, metavar="N", help="of the first weights")
    arguments = parser.parse_args()
    if not SMALLEST <= arguments.size <= LARGEST:
        parser.error(f"--size: give a number from {SMALLEST} to {LARGEST}")
    if arguments.num_texts < 1:
        parser.error("--texts: give at least 1")
    if arguments.minutes <= 0 and (arguments.num_steps or 0) <= 0:
        parser.error("nothing would be trained; give more than 0 --minutes or --num-steps")
    if (arguments.out / "config.json").exists():
        parser.error(f"--out: {arguments.out} holds a model; name another folder")
    make(**vars(arguments))


if __name__ == "__main__":
    main()

"""How often a drafter of another vocabulary is right, beside one of the target's own.

    python -m lab.measure.other_vocabulary PROMPTS --drafter DIR [--beside DIR] [--temperature T]

The target writes each text by itself, with the noise of a seed. Then, at every position of the
text, the drafter drafts the next of the target's tokens, as it would behind this much of the text
(`drafter_node/translation/`). Three things are told, each of all positions and of those whose token
both vocabularies have:

    right         the share of positions where the first draft is what the target says
    beside        the same of another drafter, which has the target's vocabulary
    intersection  the share that is left if only tokens of both vocabularies can be drafted, and
                  the drafter's first token is the draft

Only counts: it may run on a busy machine.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from coordinator.api.config import PairConfig
from drafter_node.translation.text import Languages, Translation
from engine.choice.coupling import choose, rank_scored
from engine.choice.sampling import Sampling
from engine.choice.translated import TranslatedChoice
from engine.words import TokenizerWords
from lab.experiments.prompt_sets import read
from proto.errors import SlipstreamError
from proto.messages import Limits, Open, SamplingSpec
from proto.policies import POLICIES

FIRST_SEED = 1000
MOST_STEPS = 12  # of the drafter, for one of the target's tokens


@dataclass(slots=True)
class Counts:
    """Positions, and at how many of them each draft was right."""

    positions: int = 0
    right: dict[str, int] = field(default_factory=dict)

    def add(self, found: dict[str, bool]) -> None:
        """Count one position."""
        self.positions += 1
        for name, is_right in found.items():
            self.right[name] = self.right.get(name, 0) + is_right

    def line(self) -> str:
        """Return the shares as a line."""
        shares = (
            f"{name} {number / max(1, self.positions):.3f}" for name, number in self.right.items()
        )
        return f"{self.positions:6d} positions: {', '.join(shares)}"


class Model:
    """A model of transformers with its tokenizer."""

    def __init__(self, folder: str) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = model.eval()
        self.words = TokenizerWords(Tokenizer.from_file(f"{folder}/tokenizer.json"))
        ids = self.model.generation_config.eos_token_id
        self.eos_ids: tuple[int, ...] = (ids,) if isinstance(ids, int) else tuple(ids or ())

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits [n, V] behind each token of a text."""
        found: torch.Tensor = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        return found[0].float()


@torch.inference_mode()
def text_of(
    target: Model, prompt: Sequence[int], sampling: Sampling, seed: int, num_tokens: int
) -> list[int]:
    """Return what the target writes behind a prompt, as `generate` would with this seed."""
    said: list[int] = []
    cache = None
    new = list(prompt)
    while len(said) < num_tokens:
        out = target.model(input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        (token,) = choose(out.logits[0, -1:].float(), sampling, seed, 0, [len(prompt) + len(said)])
        said.append(token)
        if token in target.eos_ids:
            break
        new = [token]
    return said


class Translated:
    """A drafter of another vocabulary, asked at one position after the other."""

    def __init__(self, drafter: Model, target: Model) -> None:
        self.drafter, self.target = drafter, target
        self.languages = Languages(drafter.words, target.words, drafter.eos_ids)
        self.choice = TranslatedChoice(drafter.words, target.words, drafter.eos_ids)

    def first(
        self, text: Sequence[int], sampling: Sampling, seed: int
    ) -> tuple[int | None, int | None]:
        """Return the first draft behind a text, and the same by the tokens of both alone.

        None: there is none.
        """
        translation = Translation(self._opened(text, sampling, seed), self.languages, 1 << 20)
        path = list(translation.tail.tokens)
        said = b""
        by_both: int | None = None
        for step in range(MOST_STEPS):
            logits = self.drafter.logits([*translation.opened.tokens, *path])[-1:]
            place = translation.place(path)
            ((token,),), _ = self.choice.rank_scored(
                logits,
                sampling,
                seed,
                0,
                [(place.position, place.begun, place.rest)],
                1,
                num_valid=min(logits.shape[1], len(self.drafter.words)),
            )
            path.append(token)
            is_end = token in self.drafter.eos_ids
            word = b"" if is_end else self.drafter.words.bytes_of[token] or b""
            said += word
            if step == 0:
                by_both = self.target.eos_ids[0] if is_end else self.target.words.id_of(word)
            found = self.target.words.following(said)
            if len(found) > 1 or (is_end and found):
                return found[0], by_both
            if is_end:
                return self.target.eos_ids[0], by_both
        return None, by_both

    def _opened(self, text: Sequence[int], sampling: Sampling, seed: int) -> Open:
        return Open(
            session=1,
            incarnation=1,
            key=bytes(16),
            tokens=tuple(text),
            num_prompt=len(text),
            sampling=SamplingSpec(temperature=sampling.temperature, seed=seed),
            policy=POLICIES["sync"].make(None, None, adaptive=False, options={}),
            limits=Limits(1 << 20, self.target.eos_ids),
        )


def compare(options: argparse.Namespace) -> tuple[Counts, Counts]:
    """Return the counts of all positions, and of those whose token both vocabularies have."""
    target, drafter = Model(options.target), Model(options.drafter)
    beside = None if options.beside is None else Model(options.beside)
    translated = Translated(drafter, target)
    sampling = Sampling(temperature=options.temperature)
    every, common = Counts(), Counts()
    tokenizer = Tokenizer.from_file(f"{options.target}/tokenizer.json")
    for index, prompt in enumerate(read(options.prompts, options.num_prompts)):
        seed = FIRST_SEED + index
        ids = tokenizer.encode(prompt.turns[0]).ids[: options.max_prompt_tokens]
        said = text_of(target, ids, sampling, seed, options.max_tokens)
        logits = None if beside is None else beside.logits([*ids, *said])
        for number, token in enumerate(said):
            position = len(ids) + number
            draft, by_both = translated.first([*ids, *said[:number]], sampling, seed)
            found = {"right": draft == token, "intersection": by_both == token}
            if logits is not None:
                row = logits[position - 1 : position]
                ((first,),), _ = rank_scored(row, sampling, seed, 0, [position], 1)
                found["beside"] = first == token
            every.add(found)
            word = target.words.bytes_of[token]
            if word is None or drafter.words.id_of(word) is not None:
                common.add(found)
    return every, common


def main() -> int:
    """Compare, and print two lines; return the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m lab.measure.other_vocabulary", description=__doc__.splitlines()[0]
    )
    parser.add_argument("prompts", type=Path, metavar="FILE", help="prompts, as for `experiment`")
    parser.add_argument("--target", default=PairConfig().target, metavar="DIR", help="its folder")
    parser.add_argument("--drafter", required=True, metavar="DIR", help="of another vocabulary")
    parser.add_argument("--beside", metavar="DIR", help="a drafter of the target's vocabulary")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default: greedy")
    parser.add_argument("--num-prompts", type=int, metavar="N", help="how many (default: all)")
    parser.add_argument("--max-prompt-tokens", type=int, default=96, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    options = parser.parse_args()
    try:
        every, common = compare(options)
    except (OSError, ValueError, SlipstreamError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"all          {every.line()}\ntoken shared {common.line()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

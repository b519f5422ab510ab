"""`python -m lab.pictures.models`: write docs/models.md from the table of model families."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from textwrap import fill
from typing import Any

from engine.checkpoint.families import CAUSAL, WRAPPERS, Family, family
from engine.checkpoint.gguf_list import BLOCKS, FAMILIES, PLAIN
from engine.quantised.gguf_blocks import KEPT

_WRAPPED: Any = {"width": 100, "subsequent_indent": "  ", "break_on_hyphens": False}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
BEFORE = """\
# Models

<!-- Made by `.venv/bin/python -m lab.pictures.models` from the tables in
engine/checkpoint/families.py and engine/checkpoint/gguf_list.py: change it there. -->

Target and drafter may be of any family in the first table. What counts is `model_type` in the
model's config.json. The table names every causal language model of the installed transformers.
The command line and both nodes read the same table, so a model that cannot run is refused in one
line before anything is loaded. [Choosing](choosing.md) says which pairs pay,
[quantised](quantised.md) which quantised weights are read.

## What runs

| `model_type` | attention | experts | on a CPU | exact there | on a GPU | tested |
|---|---|---|---|---|---|---|
"""
BETWEEN = """
**attention.** *full*: every token sees the whole text before it. *windows* and *chunks*: by
config.json some or all layers may see only the last tokens, or only those of the same chunk, as in
transformers. Keys and values of the whole text stay in memory all the same, because a rejected
draft may move the window back. *convolutions*: by config.json some layers mix each token with the
few tokens before it; what they need of a token lies where others have its key and value. *states*:
some layers keep one running state ([which kinds](#running-states)), in a few families beside
attention in the same layer. What each token gives to it lies in the token's place, for the whole
text, which takes far more memory than keys and values do. *eager*:
transformers has no fused attention for this family, so each layer writes the scores of all heads to
memory and reads them again. That takes more time and memory, above all for long prompts.

**experts.** *yes*: the family has mixtures of experts in transformers' common form; in some it is
up to config.json. On a CPU a pass reads only the experts that it uses. Each expert's matrices are
laid out anew at load where timing finds that faster. On a GPU the experts never make the host
wait: where torch's grouped kernel does (all types but bfloat16), few rows copy the weights of their
experts, more rows are multiplied with all experts, and long prompts are divided into blocks of one
expert each. *own*: the family has code of its own for experts, which runs as it is. Llama 4
computes every expert for every row. Those of dbrx, jetmoe and longcat_flash make the host wait for
the GPU.

**on a CPU.** *fused*: our own forward. It lays out the weights anew, computes all texts of a pass
together. *transformers*: the modules of transformers
over our cache (`--backend reference`), with linear layers, experts and attention in our C++ where
it is there. They compute the texts of a pass one after another, so
several texts at once gain less, and each layer has more Python and smaller operators, which small
models feel most.

**exact there.** *yes*: the target is exact ([below](#exact-targets)).

**on a GPU.** *fused*, *transformers*: as above, recorded as CUDA graphs, so that a pass is one
launch for the host. *not recorded*: the host launches each operator by itself, and a pass of few
rows takes several times as long. Of these families, only models in llama's layout were measured
on a GPU (an H200: [measured](measured.md#on-a-gpu)); the other rows follow from tests in which a
CPU imitates one.

**tested.** *yes*: a test runs a small random model of the family, with a window of 16 tokens where
it may have windows: it loads it in each of the two forms of its row (the GPU is imitated on a CPU)
and compares the logits of a tree of drafts with those of transformers
([tests/engine/forward/test_no_waiting.py](../tests/engine/forward/test_no_waiting.py)). Then two
texts of up to 190 tokens grow by trees that are deeper than the window, with roll-backs and a
copied beginning, in every form that a CPU can run, and each row has the logits that transformers
computes from the whole text
([tests/engine/test_families.py](../tests/engine/test_families.py)). Of the families that are used
most, pairs write three texts of 200 tokens at once, greedy and seeded, as transformers and the
target alone do ([tests/process/test_families.py](../tests/process/test_families.py)). *at load*: no
test runs it.

**Every model is checked when it is loaded**, tested or not. A small tree of drafts must have the
logits that the model has without a tree, or the model is refused. `verify-lossless` compares whole
texts of your pair ([the command line](command-line.md)).

With `--tensor-parallel-size` fewer families run: those whose layers have q, k, v, o and gate, up,
down projections, or common experts ([the command line](command-line.md)).

## Exact targets

A target is *exact* if no bit of a token's logits depends on anything but its text: not on drafts,
on other texts, on how a prompt was cut into passes, on a restart or on threads. Then every policy
writes the same text in every number type, also at near ties. `status` and `--verbose` say whether a
target is exact.

It is if a CPU computes it in one process, its family is exact in the table, its numbers are float32
or bfloat16, and the [C++ library](installing.md#c-for-cpus) is there; of the families that run
*fused* also with weights of 8 or 4 bits. Linear layers and attention are then ours, and made for
that: a product adds up in one order for any number of rows, and attention adds up in the order of
positions, whatever slots of the cache a tree of drafts lies in. When such a target is loaded, a
check compares rows alone with rows in other passes, bit for bit: in a chunk of a prompt, among
seventeen rows, in a tree, beside another text, on one thread and on several. What has passed is
kept in `~/.cache/slipstream/choices.json` and is not compared again.

All others (float16, GPUs, several ranks, other families, no library) may differ from plain
decoding where two tokens nearly tie. For these `--reproducible` pads every pass to 16 rows and
checks at load that no bit of a row then depends on its place or on other rows. It does not pad a
target that is exact.

## Running states

A layer with a running state has no keys and values: each token changes the state, and a change
cannot be taken back. So what each token gives to the state lies in the token's slot of the cache,
beside what enters the layer's convolution; the state itself is kept behind the committed tokens
(and at the last multiple of 64, to go back to), and each row adds what the tokens of its own path
give. Rejected drafts are slots that nobody adds.

What a token keeps there, in float32, goes by the mechanism:

* the gated delta rule (qwen3_next, qwen3_5, qwen3_5_moe, olmo_hybrid): its key, its value and two
  numbers a head
* Kimi's delta attention (kimi_linear, bailing_hybrid): key, value, a decay for each channel and a
  number a head
* lightning attention (minimax): key and value
* Mamba 2 (bamba, falcon_h1, granitemoehybrid, mamba2, nemotron_h, zamba2): x and a step of each
  head, b of each group
* Mamba 1 (falcon_mamba, jamba, mamba, zamba): x and a step of each channel, and b
* gated linear recurrent units (recurrent_gemma): two numbers a channel

falcon_mamba, mamba and mamba2 have no attention, and like recurrent_gemma no longest text: memory
alone limits it.

None of these families is [exact](#exact-targets): a row adds up what lies between the last
committed token and itself, so its last bits go by where the text was committed. `--reproducible`
refuses them for that reason, and so does `--tensor-parallel-size`, because their heads are not
divided yet. A short convolution has one order of sums, so lfm2 and lfm2_moe are exact. rwkv, xlstm,
zaya, deepseek_v4, qwen4_exp and inkling_text mix tokens in other ways, and are
[refused](#what-is-refused).

## Models of several modalities

Of these only the language model is loaded, for text: the tensors of the other parts are not read.
Its type is what config.json states in `text_config`, else the one named here; how it runs is in the
table above (the text models of Qwen's VL models run as qwen2, qwen3 or qwen3_moe).

| `model_type` | language model |
|---|---|
"""
REFUSED = """
## What is refused

These families are refused, each for the reason before it, unless config.json says otherwise: BERT
runs with `"is_decoder": true`. In turn a family of the first table is refused if its config.json
states such layers (`layer_types`, `alibi` and others).

"""

GGUF = """
## GGUF files

A GGUF file ([quantised](quantised.md#gguf-files)) is read if its architecture is one of {families},
and each of its tensors is of one of these types, in any mixture:

"""


def page() -> str:
    """Return the text of the page that lists the families of models."""
    found = [family(kind) for kind in sorted(CAUSAL - set(WRAPPERS))]
    rows = [_row(each) for each in found if each.refused is None]
    reasons = dict.fromkeys(each.refused for each in found if each.refused is not None)
    refused = [
        fill(
            f"* **{reason}**: {', '.join(each.kind for each in found if each.refused == reason)}",
            **_WRAPPED,
        )
        for reason in sorted(reasons)
    ]
    wrappers = [f"| {kind} | {text} |" for kind, text in sorted(WRAPPERS.items())]
    middle = (BETWEEN, _lines(wrappers), _gguf())
    return "".join((BEFORE, _lines(rows), *middle, REFUSED, _lines(refused)))


def _gguf() -> str:
    """Return what the page says of GGUF files."""
    ways = {
        "plain": PLAIN,
        "stay in 8 or 4 bits on a CPU, and are dequantised on a GPU": KEPT,
        "are dequantised when they are loaded": [one for one in BLOCKS if one not in PLAIN + KEPT],
    }
    lines = [fill(f"* {', '.join(kinds)}: {way}", **_WRAPPED) for way, kinds in ways.items()]
    return GGUF.format(families=", ".join(FAMILIES)) + _lines(lines)


def _row(of: Family) -> str:
    form = "fused" if of.is_fused else "transformers"
    cells = (
        of.kind,
        _attention(of),
        {"": "", "common": "yes", "own": "own"}[of.experts],
        form,
        "yes" if of.is_by_row else "",
        form if of.is_recorded else "not recorded",
        "yes" if of.is_tested else "at load",
    )
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _attention(of: Family) -> str:
    words = ["full"] if of.has_attention else []
    if of.has_windows:
        words.append("chunks" if of.has_chunks else "windows")
    if of.has_convolutions:
        words.append("convolutions")
    if of.has_states:
        words.append("states")
    return ", ".join((*words, "eager") if of.is_eager else words)


def _lines(rows: Iterable[str]) -> str:
    return "".join(f"{row}\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lab.pictures.models",
        description="Writes docs/models.md from the table of model families.",
    )
    parser.parse_args()
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()

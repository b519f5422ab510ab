"""The options of the command line that several commands, or one long one, are made of.

Their defaults are those of the configs (`coordinator.api.config`).
"""

from pathlib import Path
from typing import Annotated

import typer

from proto.errors import ConfigurationError

Prompt = Annotated[str | None, typer.Argument(help="The text to continue; - reads stdin.")]
PromptFile = Annotated[
    Path | None,
    typer.Option(help='Several prompts: one per line, or JSON Lines with "prompt" (.jsonl).'),
]
PromptIds = Annotated[str | None, typer.Option(help="Token ids instead of a text: 1,2,3.")]
Chat = Annotated[
    bool, typer.Option("--chat", help="Answer each prompt, by the target's chat template.")
]

Target = Annotated[str, typer.Option(help="Target model: folder or name.")]
Drafter = Annotated[
    str,
    typer.Option(
        help="Draft model: folder or name. ngram: none; the target drafts what followed its last "
        "tokens before (prompt lookup)."
    ),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit.")]
TargetDevice = Annotated[
    str,
    typer.Option(
        help="cuda:0, cpu, cpu:0 (that core) or cpu:0-6 (those). "
        "Default: a GPU each, or both the only one; without a GPU one core for the drafter, all "
        "others for the target."
    ),
]
DrafterDevice = Annotated[str, typer.Option(help="As --target-device.")]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")]
DrafterDtype = Annotated[
    str,
    typer.Option(
        help="As --dtype, or fastest: by timing. Default: fastest on a CPU, else --dtype."
    ),
]
Backend = Annotated[
    str,
    typer.Option(
        help="fused (our own forward: llama, mistral, qwen2, qwen3), graphs (the same as CUDA "
        "graphs), compiled (the same as one program: faster on a CPU, a minute to load, needs "
        "g++), reference (transformers' own), or auto: fused, on a GPU graphs, where that agrees "
        "with the reference."
    ),
]
MaxModelLen = Annotated[
    int, typer.Option(help="Most tokens of prompt and answer; the cache is made for it.")
]
Reproducible = Annotated[
    bool,
    typer.Option(
        "--reproducible",
        help="Same seed, same text in bfloat16 too, whatever the policy (slower).",
    ),
]
Ray = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="Start the nodes on a Ray cluster: auto or HOST:PORT (deploy/README.md). "
        "Default: on this machine, without Ray.",
        show_default=False,
    ),
]
StartTimeout = Annotated[float, typer.Option(help="How long the nodes may take to load.")]
BusyPoll = Annotated[
    int,
    typer.Option(
        help="Every process asks for messages without pause for so many microseconds before it "
        "sleeps: a shorter way, where each process has a core to burn."
    ),
]
MinTargetPass = Annotated[
    float, typer.Option(help="Emulate a slower target: a pass takes at least so long.")
]
MinDraftStep = Annotated[
    float, typer.Option(help="Emulate a slower drafter: a forward takes at least so long.")
]

Policy = Annotated[
    str,
    typer.Option(
        help="ar (target alone), sync (draft K, wait for the verdict) or pipelined "
        "(draft on while the target verifies)."
    ),
]
NumSpeculativeTokens = Annotated[
    int, typer.Option(help="K: most drafted tokens in one target pass.")
]
Adaptive = Annotated[
    bool,
    typer.Option(
        "--adaptive/--no-adaptive",
        help="pipelined: measure now and then whether the target is faster alone, and let the "
        "drafter rest where it is.",
    ),
]
Window = Annotated[
    int, typer.Option(help="Most tokens the drafter may be ahead of the last verdict.")
]
Verify = Annotated[
    str,
    typer.Option(
        help="coupled (drafter and target share their noise; the seed decides the text), or by the "
        "ratio of their probabilities: token (Leviathan) or block (Sun)."
    ),
]
MaxDraftCandidates = Annotated[
    int, typer.Option(help="--verify token and block: most tokens that a draft is sampled from.")
]

AlsoNgram = Annotated[
    bool, typer.Option("--also-ngram", help="N-gram drafts besides those of the draft model.")
]
NgramMax = Annotated[
    int, typer.Option(help="N-gram drafts: so many of the last tokens are looked up first.")
]
NgramMin = Annotated[int, typer.Option(help="N-gram drafts: and so many at last.")]
Reference = Annotated[
    str,
    typer.Option(
        metavar="FILE",
        help="N-gram drafts: a text to copy from, besides prompt and answer.",
        show_default=False,
    ),
]

Temperature = Annotated[float, typer.Option(help="0: greedy.")]
TopK = Annotated[int, typer.Option(help="Only the k likeliest tokens; 0: off.")]
TopP = Annotated[
    float, typer.Option(help="Only the likeliest tokens that make up this probability.")
]
MinP = Annotated[
    float, typer.Option(help="Only tokens with this share of the largest probability; 0: off.")
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1: tokens of prompt and answer come less often again.")
]
PresencePenalty = Annotated[
    float, typer.Option(help="Taken off the logits of tokens that the answer has.")
]
FrequencyPenalty = Annotated[float, typer.Option(help="As often as the answer has the token.")]
LogitBias = Annotated[
    str | None,
    typer.Option(metavar="ID:BIAS,...", help="Added to the logits of tokens: 50:-100,7:2.5."),
]
BadWords = Annotated[
    list[str] | None, typer.Option(help="Never write this word; may be given several times.")
]
Seed = Annotated[
    int | None, typer.Option(help="Same seed, same text. Default: a fresh one, reported.")
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="End the text before this string; may be given several times."),
]
StopTokenIds = Annotated[
    str | None, typer.Option(metavar="ID,...", help="End the text at these tokens.")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-text token.")]
IncludeStop = Annotated[
    bool,
    typer.Option(
        "--include-stop-str-in-output", help="Show the stop string or token at the end as well."
    ),
]
MinTokens = Annotated[
    int, typer.Option(help="No stop token and no stop string before so many tokens.")
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Logprobs = Annotated[
    int | None,
    typer.Option(help="With --json: log-probability of each token and of so many alternatives."),
]
PromptLogprobs = Annotated[int | None, typer.Option(help="The same for the tokens of the prompt.")]
Number = Annotated[int, typer.Option("--n", help="Texts per prompt (sampled only).")]

Json = Annotated[
    bool, typer.Option("--json", help="One JSON object per prompt on stdout, nothing else.")
]
ShowSpeculation = Annotated[
    bool,
    typer.Option(
        "--show-speculation",
        help="Show accepted and rejected drafts and the target's own tokens in the text.",
    ),
]


def parse_ids(flag: str, text: str) -> tuple[int, ...]:
    """Numbers like 1,2,3. Raises ConfigurationError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigurationError(f"{flag}: expected numbers like 1,2,3, got {text!r}") from error


def parse_biases(flag: str, text: str) -> dict[int, float]:
    """Biases like 50:-100,7:2.5. Raises ConfigurationError."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError as error:
        raise ConfigurationError(
            f"{flag}: expected biases like 50:-100,7:2.5, got {text!r}"
        ) from error

"""The command line. Text goes to stdout and nothing else does; all else goes to stderr."""

import dataclasses
import json
import logging
import signal
import sys
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from coordinator.bench_command import bench
from coordinator.config import PairConfig, RequestConfig, SpeculationConfig, checked
from coordinator.display import Progress, summary
from coordinator.pair import Pair
from coordinator.stream import Stream
from proto.errors import ConfigurationError, SlipstreamError

VERSION = "0.1.0"
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="python -m coordinator",
    help="Distributed speculative decoding: the target's text, sooner.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)
_PAIR, _SPECULATION, _REQUEST = PairConfig(), SpeculationConfig(), RequestConfig()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slipstream {VERSION}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Distributed speculative decoding: the target's text, sooner."""


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.")] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(help="Token ids instead of a text: 1,2,3.")
    ] = None,
    target: Annotated[str, typer.Option(help="Target model: folder or name.")] = _PAIR.target,
    drafter: Annotated[str, typer.Option(help="Draft model: folder or name.")] = _PAIR.drafter,
    target_revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    drafter_revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    target_device: Annotated[
        str,
        typer.Option(
            help="cuda:0, cpu, or cpu:0 (that core, one thread). "
            "Default: a GPU each if there are two, else one core each."
        ),
    ] = _PAIR.target_device,
    drafter_device: Annotated[str, typer.Option(help="As --target-device.")] = _PAIR.drafter_device,
    dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")
    ] = _PAIR.dtype,
    drafter_dtype: Annotated[
        str, typer.Option(help="Default: float32 on a CPU, else as --dtype.")
    ] = _PAIR.drafter_dtype,
    max_model_len: Annotated[
        int, typer.Option(help="Most tokens of prompt and answer; the cache is made for it.")
    ] = _PAIR.max_model_len,
    policy: Annotated[
        str,
        typer.Option(
            help="ar (target alone), sync (draft K, wait for the verdict) or pipelined "
            "(draft on while the target verifies)."
        ),
    ] = _SPECULATION.policy,
    num_speculative_tokens: Annotated[
        int, typer.Option(help="K: most drafted tokens in one target pass.")
    ] = _SPECULATION.num_speculative_tokens,
    window: Annotated[
        int, typer.Option(help="Most tokens the drafter may be ahead of the last verdict.")
    ] = _SPECULATION.window,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = _REQUEST.temperature,
    top_k: Annotated[int, typer.Option(help="Only the k likeliest tokens; 0: off.")] = (
        _REQUEST.top_k
    ),
    top_p: Annotated[
        float, typer.Option(help="Only the likeliest tokens that make up this probability.")
    ] = _REQUEST.top_p,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same text. Default: a fresh one, reported.")
    ] = _REQUEST.seed,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = _REQUEST.max_tokens,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after an end-of-text token.")
    ] = _REQUEST.ignore_eos,
    reproducible: Annotated[
        bool,
        typer.Option(
            "--reproducible",
            help="Same seed, same text in bfloat16 too, whatever the policy (slower).",
        ),
    ] = _PAIR.reproducible,
    start_timeout_s: Annotated[
        float, typer.Option(help="How long the nodes may take to load.")
    ] = _PAIR.start_timeout_s,
    min_target_pass_ms: Annotated[
        float, typer.Option(help="Emulate a slower target: a pass takes at least so long.")
    ] = _PAIR.min_target_pass_ms,
    min_draft_step_ms: Annotated[
        float, typer.Option(help="Emulate a slower drafter: a forward takes at least so long.")
    ] = _PAIR.min_draft_step_ms,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per prompt on stdout, nothing else.")
    ] = False,
) -> None:
    """Continue PROMPT with a target and a draft model in two processes."""
    values = dict(locals())
    pair = checked(PairConfig, **_fields(PairConfig, values))
    speculation = checked(SpeculationConfig, **_fields(SpeculationConfig, values))
    request = checked(RequestConfig, **_fields(RequestConfig, values))
    if (prompt is None) == (prompt_ids is None):
        raise ConfigurationError("give either PROMPT or --prompt-ids")
    ids = None if prompt_ids is None else _parse_ids(prompt_ids)
    speculation.make(reproducible=pair.reproducible)
    console = Console(stderr=True)
    with Progress(console) as progress:
        started = Pair(pair, with_drafter=speculation.policy != "ar", say=progress.say)
    with started as running:
        tokens = running.encode(prompt or "") if ids is None else ids
        stream, used_seed = running.generate(tokens, speculation, request)
        written = _write(running, stream, quiet=as_json)
        _report(stream, written, speculation.policy, request, used_seed, as_json=as_json)


def _fields(
    kind: type[PairConfig | SpeculationConfig | RequestConfig], values: dict[str, object]
) -> dict[str, object]:
    return {name: values[name] for name in kind.model_fields}


def _parse_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigurationError(
            f"--prompt-ids: expected numbers like 1,2,3, got {text!r}"
        ) from error


@dataclasses.dataclass(slots=True)
class _Written:
    text: str
    tokens: list[int]


def _write(running: Pair, stream: Stream, *, quiet: bool) -> _Written:
    """Read the stream to its end; show the text as it comes, unless `quiet`."""
    written = _Written("", [])
    decoder = None if running.tokenization is None else running.tokenization.stream()

    def show(piece: str) -> None:
        written.text += piece
        if piece and not quiet:
            sys.stdout.write(piece)
            sys.stdout.flush()

    for chunk in stream:
        written.tokens += chunk.tokens
        if decoder is not None:
            show(decoder.push(chunk.tokens))
        else:
            ids = ",".join(map(str, chunk.tokens))
            show(ids if len(written.tokens) == len(chunk.tokens) else "," + ids)
    if decoder is not None:
        show(decoder.finish())
    return written


def _report(
    stream: Stream,
    written: _Written,
    policy: str,
    request: RequestConfig,
    seed: int,
    *,
    as_json: bool,
) -> None:
    assert stream.result is not None
    metrics = stream.result.metrics
    if as_json:
        record = {
            "text": written.text,
            "token_ids": written.tokens,
            "finish_reason": str(stream.result.reason),
            "policy": policy,
            "seed": seed,
            "metrics": dataclasses.asdict(metrics),
        }
        sys.stdout.write(json.dumps(record) + "\n")
        return
    if not written.text.endswith("\n"):
        sys.stdout.write("\n")
    sys.stdout.flush()
    shown_seed = seed if request.temperature > 0 else None
    typer.echo("\n" + summary(metrics, policy=policy, seed=shown_seed), err=True)


app.command()(bench)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    """Run the command line; every error of a user or a peer is one line on stderr."""
    signal.signal(signal.SIGTERM, _interrupt)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        status = app(standalone_mode=False)
    except typer.TyperException as error:
        message = getattr(error, "format_message", error.__str__)()
        # Without a command the message is the help itself.
        typer.echo(message if "Usage:" in message else f"error: {message}", err=True)
        return EXIT_USAGE
    except ConfigurationError as error:
        typer.echo(f"error: {error}", err=True)
        return EXIT_USAGE
    except SlipstreamError as error:
        typer.echo(f"error: {error}", err=True)
        return EXIT_FAILED
    except (KeyboardInterrupt, typer.Abort):
        status = EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; what is left to say has nobody to hear it.
        sys.stderr.close()
        return EXIT_FAILED
    except OSError as error:
        typer.echo(f"error: {error}", err=True)
        return EXIT_FAILED
    # typer turns Ctrl-C into this status and returns it.
    if status == EXIT_INTERRUPTED:
        typer.echo("interrupted", err=True)
    return status or 0

"""What a person sees behind the text, on stderr: its figures. docs/screens.md has every word."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill

from coordinator.cli.harmless import harmless
from coordinator.cli.screens.loading import Progress as Progress
from coordinator.cluster.registry import Node
from coordinator.text.metrics import Metrics
from coordinator.text.origins import MODEL, TITLES
from coordinator.text.simulated import Simulated

WIDTH = 80


def summary(metrics: Metrics, *, policy: str, seed: int | None, verbose: bool = False) -> str:
    """The figures of one text, in lines of at most 80 columns.

    Two lines, a third for a long seed or if the drafter was lost, and what says that hardware is
    simulated. `verbose`: all the others too.
    """
    m = metrics
    # Whoever drafted nothing is not faster or slower than plain decoding: he is it.
    worth = [f"{m.speedup:.1f} x plain"] if m.speedup and m.num_draft_tokens else []
    words = [_tokens(m.num_tokens), *_speed(m), *worth, *_accepted(m)]
    lost = m.drafter_lost_at
    more = [] if lost is None else [f"the drafter was lost after {_tokens(lost)}"]
    # A seed that was drawn is long.
    is_long = len(", ".join([*words, *_seed(seed)])) > WIDTH
    (more if is_long else words).extend(_seed(seed))
    lines = [", ".join(words), ", ".join((_reading(m), *_writing(m)))]
    if more:
        lines.append(", ".join(more))
    if verbose:
        lines += _details(m, policy)
    if m.simulated is not None:
        lines.append(simulation(m.simulated))
    return "\n".join(lines)


def rounded(number: float) -> str:
    """Three digits, or all of a larger number."""
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f}"


def shown_time(seconds: float) -> str:
    """A duration: 31 ms, 1.24 s."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{rounded(seconds)} s"


def _tokens(number: int) -> str:
    return "1 token" if number == 1 else f"{number} tokens"


def _speed(m: Metrics) -> list[str]:
    """None where all tokens came at once."""
    return [f"{rounded(m.writing_tokens_per_second)} tokens/s"] if m.writing_s > 0 else []


def _accepted(m: Metrics) -> list[str]:
    return [f"{m.acceptance_rate * 100:.0f} % of drafts accepted"] if m.num_draft_tokens else []


def _seed(seed: int | None) -> list[str]:
    return [] if seed is None else [f"seed {seed}"]


def _reading(m: Metrics) -> str:
    took = shown_time(m.time_to_first_token_s)
    return f"prompt: {_tokens(m.num_prompt_tokens)} in {took}" + (
        f" ({rounded(m.prompt_tokens_per_second)} tokens/s)" if m.prompt_tokens_per_second else ""
    )


def _writing(m: Metrics) -> list[str]:
    passes = "1 pass" if m.num_target_passes == 1 else f"{m.num_target_passes} passes"
    return [f"text: {passes} in {shown_time(m.writing_s)}"] if m.writing_s > 0 else []


def _details(m: Metrics, policy: str) -> list[str]:
    """What only --verbose shows."""
    lines = [
        f"in all {m.tokens_per_second:.1f} tokens/s in {m.elapsed_s:.2f} s, policy {policy}",
        f"target busy {m.target_busy:.0%}, host {m.host_ms_per_pass:.2f} ms a pass",
    ]
    if m.num_draft_tokens:
        lines.append(
            f"{m.tokens_per_pass:.2f} tokens a pass "
            f"({m.num_accepted_tokens} of {m.num_draft_tokens} drafts)"
        )
    lines += _by_source(m.accepted_by_source, m.hits_by_source)
    if m.speculative_decoding is not None:
        lines.append("; ".join(_what_failed(m)))
    return lines


def engines(nodes: Iterable[Node]) -> str:
    """What ran the models, in one line."""
    return "; ".join(
        f"{hello.role}: {hello.backend}, {hello.dtype}, {hello.device}"
        + (f", {hello.heads} heads" if hello.heads else "")
        for node in nodes
        if (hello := node.hello) is not None
    )


def _by_source(accepted: Mapping[str, int], hits: Mapping[str, int]) -> list[str]:
    """Whose drafts were accepted, in lines of at most 80 columns; none if all are the model's."""
    if not set(accepted) - {MODEL}:
        return []
    words = [
        f"{TITLES.get(name, f'drafter {name}')} {number} ({hits.get(name, 0)} hits)"
        for name, number in sorted(accepted.items(), key=lambda item: -item[1])
    ]
    line = f"accepted drafts by source: {', '.join(words)}"
    return [fill(line, WIDTH, subsequent_indent="  ", break_long_words=False)]


def _what_failed(m: Metrics) -> list[str]:
    """How often drafts were of use, and why they were not."""
    misses = ", ".join(f"{number} {why}" for why, number in m.misses.items() if number)
    words = [f"hit rate {m.hit_rate:.0%}" + (f", misses: {misses}" if misses else "")]
    if fallbacks := ", ".join(f"{number} {cause}" for cause, number in m.fallbacks.items()):
        words.append(fallbacks)
    if m.num_reopened:
        words.append(f"{m.num_reopened} reopened")
    return words


def simulation(simulated: Simulated) -> str:
    """That figures are not of this machine, in lines of at most 80 columns."""
    words = f"SIMULATED: {simulated.words}"
    if simulated.verdict:
        words += f"; {simulated.verdict}"
    return fill(words, WIDTH, subsequent_indent="  ", break_long_words=False)


def heading(index: int, total: int, prompt: str | None) -> str:
    """A line of 80 columns above the text of one prompt of several."""
    shown = "" if prompt is None else harmless(" ".join(prompt.split()))
    line = f"── {index + 1} of {total} ── {shown}"
    line = line if len(line) < WIDTH - 3 else line[: WIDTH - 4] + "…"
    return "\n" + line + " " + "─" * (WIDTH - 1 - len(line))


def figures_in_short(metrics: Metrics) -> str:
    """The figures of one text of several, in a line."""
    return ", ".join((_tokens(metrics.num_tokens), *_speed(metrics), *_accepted(metrics)))


def figures_of_all(done: Sequence[Metrics], *, policy: str, verbose: bool = False) -> str:
    """The figures of several texts of one call together, from its start."""
    num_tokens = sum(m.num_tokens for m in done)
    num_passes = sum(m.num_target_passes for m in done)
    # Several are written at once. All were queued at the same time.
    elapsed_s = max(m.queued_s + m.elapsed_s for m in done) - min(m.queued_s for m in done)
    accepted, drafted = (
        sum(m.num_accepted_tokens for m in done),
        sum(m.num_draft_tokens for m in done),
    )
    line = f"{len(done)} texts, {num_tokens} tokens, {rounded(num_tokens / elapsed_s)} tokens/s"
    if drafted:
        line += f", {accepted / drafted * 100:.0f} % of drafts accepted"
    if num_lost := sum(m.drafter_lost_at is not None for m in done):
        line += f"\nthe drafter was lost: {num_lost} texts were without it"
    line += f"\nall of it, prompts and texts, in {shown_time(elapsed_s)}"
    if drafted:
        line += f" ({accepted} of {drafted} drafts)"
    if verbose:
        line += f"\npolicy {policy}, {num_passes} target passes"
        accepted_by, hits_by = Counter[str](), Counter[str]()
        for one in done:
            accepted_by.update(one.accepted_by_source)
            hits_by.update(one.hits_by_source)
        line += "".join(f"\n{more}" for more in _by_source(accepted_by, hits_by))
    # Counted from the start of the call, so the last one to end has all of them.
    simulated = [m.simulated for m in done if m.simulated is not None]
    if simulated:
        line += "\n" + simulation(max(simulated, key=lambda one: one.num_forwards))
    return line

"""What a person sees around the text, on stderr: progress while the nodes load, and the summary."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill
from types import TracebackType

from rich.console import Console
from rich.status import Status

from coordinator.cluster.registry import Node
from coordinator.text.metrics import Metrics
from coordinator.text.origins import MODEL, TITLES
from coordinator.text.simulated import Simulated
from proto.messages import Role

WIDTH = 80


class Progress:
    """What the nodes are doing: one live line on a terminal, a line per change elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._said: dict[Role, str] = {}

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._status = self._console.status("starting two processes")
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, states: dict[Role, str]) -> None:
        """Show what has changed."""
        if states == self._said:
            return
        line = ", ".join(f"{role}: {state}" for role, state in states.items())
        if self._status is not None:
            self._status.update(line)
        else:
            for role, state in states.items():
                if self._said.get(role) != state:
                    self._console.print(f"{role}: {state}", markup=False, highlight=False)
        self._said = dict(states)


def summary(metrics: Metrics, *, policy: str, seed: int | None) -> str:
    """The figures of one text in a few lines of at most 80 columns."""
    m = metrics
    worth = f" ({m.speedup:.2f} x plain)" if m.speedup and m.num_draft_tokens else ""
    lines = [
        f"{m.num_tokens} tokens in {m.elapsed_s:.2f} s: {m.tokens_per_second:.1f} tokens/s{worth}, "
        f"first after {m.time_to_first_token_s * 1e3:.0f} ms",
        f"policy {policy}: {m.num_target_passes} target passes, target busy "
        f"{m.target_busy:.0%}, host {m.host_ms_per_pass:.2f} ms a pass",
    ]
    if m.num_draft_tokens:
        lines.append(
            f"{m.tokens_per_pass:.2f} tokens a pass, acceptance rate "
            f"{m.acceptance_rate:.0%} ({m.num_accepted_tokens} of {m.num_draft_tokens} drafts)"
        )
    lines += _by_source(m.accepted_by_source, m.hits_by_source)
    if m.speculative_decoding is not None:
        lines.append("; ".join(_what_failed(m)))
    if seed is not None:
        lines.append(f"seed {seed}")
    if m.simulated is not None:
        lines.append(simulation(m.simulated))
    return "\n".join(lines)


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
    if m.drafter_lost_at is not None:
        words.append(f"drafter lost after {m.drafter_lost_at} tokens")
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
    shown = "" if prompt is None else " ".join(prompt.split())
    line = f"── {index + 1} of {total} ── {shown}"
    line = line if len(line) < WIDTH - 3 else line[: WIDTH - 4] + "…"
    return "\n" + line + " " + "─" * (WIDTH - 1 - len(line))


def figures_in_short(metrics: Metrics) -> str:
    """The figures of one prompt of several, in a line."""
    line = f"{metrics.num_tokens} tokens, {metrics.tokens_per_second:.1f} tokens/s"
    if metrics.num_draft_tokens:
        line += f", {metrics.tokens_per_pass:.2f} tokens a pass"
    return line


def figures_of_all(done: Sequence[Metrics], *, policy: str) -> str:
    """The figures of several prompts of one call together, from its start."""
    num_tokens = sum(m.num_tokens for m in done)
    num_passes = sum(m.num_target_passes for m in done)
    # Several are written at once. All were queued at the same time.
    elapsed_s = max(m.queued_s + m.elapsed_s for m in done) - min(m.queued_s for m in done)
    line = (
        f"{len(done)} texts, {num_tokens} tokens in {elapsed_s:.2f} s: "
        f"{num_tokens / elapsed_s:.1f} tokens/s, policy {policy}"
    )
    accepted, drafted = (
        sum(m.num_accepted_tokens for m in done),
        sum(m.num_draft_tokens for m in done),
    )
    if num_lost := sum(m.drafter_lost_at is not None for m in done):
        line += f"\nthe drafter was lost: {num_lost} texts were without it"
    if drafted:
        line += (
            f"\n{1 + accepted / num_passes:.2f} tokens a pass, acceptance rate "
            f"{accepted / drafted:.0%} ({accepted} of {drafted} drafts)"
        )
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

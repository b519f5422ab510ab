"""Large pairs in docs/speculative-decoding.md: what was published, and what is predicted."""

from lab.plan.report import case_of
from lab.plan.settings import Costs, Texts
from lab.testbeds.shapes import Published
from proto.policies import POLICIES
from rehearsal import planning
from tests.theory.closed_forms import synchronous, tokens_per_pass

# Leviathan et al., arXiv 2211.17192, tables 2 and 4: target T5-XXL (11 B), English to German,
# temperature 0. (drafter, acceptance, draft step in passes, K, times plain decoding as measured)
T5 = (
    ("T5-small", 0.75, 0.02, 7, 3.4),
    ("T5-base", 0.80, 0.04, 7, 2.8),
    ("T5-large", 0.82, 0.11, 7, 1.7),
)
# Chen et al., arXiv 2302.01318, table 1: Chinchilla 70B with a draft model of 4 B, K = 4.
CHINCHILLA_MS, DRAFT_MS, CHINCHILLA_K = 14.1, 1.8, 4
CHINCHILLA = (
    ("XSum, nucleus sampling", 1.92),
    ("XSum, greedy", 2.01),
    ("HumanEval, nucleus sampling", 2.46),
)
# (target, drafter, their names on the page)
SHAPES: tuple[tuple[Published, Published, str], ...] = (
    ("llama-3.1-70b", "llama-3.2-1b", "Llama 3.1 70B and 3.2 1B"),
    ("llama-3.1-405b", "llama-3.2-1b", "Llama 3.1 405B and 3.2 1B"),
    ("llama-3.1-405b", "llama-3.1-8b", "Llama 3.1 405B and 3.1 8B"),
    ("qwen3-32b", "qwen3-0.6b", "Qwen 3 32B and 0.6B"),
)
# Times plain decoding by `plan`, in the order of CHINCHILLA and SHAPES; a long test computes them.
AUTO_OF_CHINCHILLA = (2.8, 3.0, 4.1)
SYNC_AND_AUTO = ((2.8, 3.4), (2.6, 3.4), (1.4, 2.2), (3.2, 3.6))


def facts() -> list[str]:
    """What the page must say of large pairs, word for word."""
    return [*_t5(), *_chinchilla(), *_shapes()]


def acceptance_of(tokens: float, k: int) -> float:
    """The acceptance at which a pass with K drafts makes so many tokens, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_pass(middle, k) < tokens else (low, middle)
    return low


def _t5() -> list[str]:
    lines = ["T5-XXL with 11 billion parameters"]
    for drafter, a, step, k, measured in T5:
        predicted = 1 / step / synchronous(a, k, 1 / step, 0.0)
        row = (f"{a:.2f}", f"{step:.2f}", f"{k}", f"{measured} x", f"{predicted:.1f} x")
        lines.append(f"| {drafter} | {' | '.join(row)} |")
    return lines


def _chinchilla() -> list[str]:
    lines = [
        "Chinchilla with 70 billion parameters, a drafter of 4 billion, `K = 4`, "
        f"{CHINCHILLA_MS} ms a pass and {DRAFT_MS} ms a draft step",
        "2 to 2.5 times as fast",
    ]
    for (task, measured), auto in zip(CHINCHILLA, AUTO_OF_CHINCHILLA, strict=True):
        tokens = _tokens(measured)
        a = acceptance_of(tokens, CHINCHILLA_K)
        lines.append(f"| {task} | {measured} x | {tokens:.2f} | {a:.2f} | {auto} x |")
    return lines


def _tokens(measured: float) -> float:
    """Tokens of a pass that explain how much faster Chinchilla became."""
    return measured * (CHINCHILLA_MS + CHINCHILLA_K * DRAFT_MS) / CHINCHILLA_MS


def _shapes() -> list[str]:
    lines = ["Llama 3.1 70B on two H100, 405B on sixteen, the others on one each"]
    for (target, drafter, names), (sync, auto) in zip(SHAPES, SYNC_AND_AUTO, strict=True):
        case = case_of_shapes(target, drafter)
        pass_, step = (node.forward.of(1) * 1e3 for node in (case.target, case.drafter))
        lines.append(f"| {names} | {pass_:.1f}, {step:.2f} ms | {sync} x | {auto} x |")
    return lines


def case_of_shapes(target: Published, drafter: Published) -> planning.Case:
    """What `plan --like TARGET --drafter-like DRAFTER` rehearses."""
    return case_of(Costs(like=target, drafter_like=drafter), Texts())


def case_of_chinchilla(measured: float) -> planning.Case:
    """The costs of Chinchilla, with drafts that are right as often as its speed-up implies."""
    acceptance = f"{acceptance_of(_tokens(measured), CHINCHILLA_K):.2f}"
    costs = Costs(target_ms=CHINCHILLA_MS, draft_ms=DRAFT_MS)
    return case_of(costs, Texts(acceptance=acceptance))


def gain(policy: str, case: planning.Case) -> float:
    """Times plain decoding, at the K and window that `plan` finds."""
    row = POLICIES[policy]
    window = planning.WINDOW if row.runs_ahead else None
    cells = planning._climbed(row, case, planning.DRAFTS, window)
    if row.runs_ahead:
        best = max(cells, key=planning._speed)
        cells += [planning._cell(row, case, best.k, wide) for wide in planning.WIDER]
    plain = planning._cell(POLICIES["ar"], case, None, None)
    return max(map(planning._speed, cells)) / planning._speed(plain)

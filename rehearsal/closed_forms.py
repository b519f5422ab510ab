"""What theory says of speculative decoding, where it is a formula (pure functions).

Units are draft steps: one forward of the drafter is 1. In all of them

    alpha   chance that a draft is right, the same for each, whatever came before
    pass_   a pass of the target (t_t), whatever its rows
    hop     a message between drafter and target, one way (h)

They leave out host time, what more rows of a pass cost, and everything that a machine decides by
what it measures. `rehearsal.performance` has all that; tests compare the two where both hold.
"""


def tokens_per_pass(alpha: float, k: int) -> float:
    """E(K) = (1 - alpha^(K+1)) / (1 - alpha): a pass that verifies a chain of K drafts.

    The target's own token included (Leviathan et al., arXiv 2211.17192, equation 1).
    """
    if alpha == 1.0:
        return k + 1.0
    return float((1.0 - alpha ** (k + 1)) / (1.0 - alpha))


def synchronous(alpha: float, k: int, pass_: float, hop: float) -> float:
    """Time of a token where drafter and target wait for each other: (K + t_t + 2h) / E(K).

    `pass_` is that of K + 1 rows. With h = 0 the improvement over plain decoding is theorem 3.8 of
    Leviathan et al. (arXiv 2211.17192).
    """
    return (k + pass_ + 2 * hop) / tokens_per_pass(alpha, k)


def free_running_chain(alpha: float, first: int, pass_: float, hop: float) -> float:
    """Time of a token where the drafter never waits, and a chain is drafted:

        (1 - alpha) [2h + m + t_t (1 + alpha^(m+1) / (1 - alpha^c))],    c = t_t

    After a miss the target hears nothing for 2h + m, and starts with the first m drafts. If these
    and one more are right (the one that the target says by itself must be what was drafted), what
    was drafted meanwhile is there: c more for every pass, whose last verdict is the next miss. Each
    miss ends 1 / (1 - alpha) tokens. (DESIGN 4; PEARL, arXiv 2408.11850, and AMUSD, 2410.17375,
    describe the policy.)

    Holds for m >= 1, if nothing keeps the drafter from running ahead: 2h + m < t_t, no bound on
    drafts in a pass below c, and a target that waits for the m drafts.
    """
    return (1.0 - alpha) * _after_a_miss(alpha, first, first, pass_, hop)


def branch_cache(
    alpha: float, first: int, pass_: float, hop: float, hit_rate: float, depth: int
) -> float:
    """The same where what follows a miss has been drafted as well, in a share of the cases:

        (1 - alpha) {(1 - rho) [2h + m + t_t (1 + alpha^(m+1) / (1 - alpha^c))]
                     + rho t_t (1 + alpha^(D+1) / (1 - alpha^c))}

    hit_rate  rho: that the target's own token at a miss was among the branches
    depth     D: drafts that are there below it (SSD, arXiv 2603.03251)
    """
    missed = _after_a_miss(alpha, first, first, pass_, hop)
    hit = _after_a_miss(alpha, 0, depth, pass_, 0.0)
    return (1.0 - alpha) * ((1.0 - hit_rate) * missed + hit_rate * hit)


def _after_a_miss(alpha: float, waited: int, at_hand: int, pass_: float, hop: float) -> float:
    """Time from a miss to the next one, the first pass with so many drafts at hand."""
    num_passes = 1.0 + alpha ** (at_hand + 1) / (1.0 - alpha**pass_)
    return float(2 * hop + waited + pass_ * num_passes)


def step_s(num_bytes: float, bandwidth: float, flops: float, peak: float) -> float:
    """Seconds of a forward on the roofline: max(bytes moved / bandwidth, FLOPs / peak).

    (Williams, Waterman and Patterson, "Roofline", CACM 2009.) Decoding reads every weight once a
    forward, whatever its rows, and multiplies each with every row.
    """
    return max(num_bytes / bandwidth, flops / peak)

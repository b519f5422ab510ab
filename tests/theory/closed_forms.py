"""What theory says of the speed of speculative decoding, where it is a formula.

Units are draft steps: one forward of the drafter is 1. In all of them

    alpha   chance that a draft is right, the same for each, whatever came before
    pass_   a pass of the target (t_t), whatever its rows
    hop     a message between drafter and target, one way (h)

They leave out host time, what more rows of a pass cost, and everything that a machine decides by
what it measures. `rehearsal/planning.py` has all that; tests compare the two where both hold.
"""


def tokens_per_pass(alpha: float, k: int) -> float:
    """E(K): tokens of a pass that verifies a chain of K drafts, the target's own token included.

    (Leviathan et al., arXiv 2211.17192, equation 1.)
    """
    return sum(alpha**i for i in range(k + 1))


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
    miss ends 1 / (1 - alpha) tokens. (PEARL, arXiv 2408.11850, and AMUSD, 2410.17375, describe the
    policy.)

    Holds for m >= 1, if nothing keeps the drafter from running ahead: 2h + m < t_t, no bound on
    drafts in a pass below c, and a target that waits for the m drafts.
    """
    num_passes = 1.0 + alpha ** (first + 1) / (1.0 - alpha**pass_)
    return float((1.0 - alpha) * (2 * hop + first + pass_ * num_passes))

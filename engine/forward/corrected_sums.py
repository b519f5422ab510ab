"""The delta rule with decays (gated DeltaNet, Kimi's delta attention): a rule of running states.

    S_t = a_t S_(t-1) + k_t b_t (v_t - k_t' a_t S_(t-1))'          o_t = q_t' S_t

A decay a is a number for each head, or one for each channel of its keys. What b (v - ...) becomes
depends on all tokens before: u_t below. The tokens of a chain have one system of equations for
these, which is triangular with ones on its diagonal; its matrix has the products of keys with the
decays between them (https://arxiv.org/abs/2412.06464, https://arxiv.org/abs/2510.26692).
"""

import torch

_BLOCK = 16  # rows whose decays by channel are multiplied pair by pair


def corrected_sums(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    betas: torch.Tensor,
    decays: torch.Tensor,
    state: torch.Tensor | None,
    *,
    goes_on: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run chains of tokens (`running_states.Rule`); return (outputs [B, q, heads, v], the state).

    In the shapes: k numbers of a key, v of a value. All are float32, and what is no token has
    zeros. Queries and keys are brought to length 1 here.

    queries  [B, q, heads, k] of the last q tokens of each chain
    keys, values, betas  [B, n, heads, k], [B, n, heads, v], [B, n, heads]
    decays   [B, n, heads, k] or [B, n, heads, 1]: logarithms
    state    [1, heads, k, v]
    """
    queries, keys, values, betas = (
        one.transpose(1, 2)
        for one in (_short(queries) * keys.shape[-1] ** -0.5, _short(keys), values, betas)
    )
    # Sums of logarithms from the beginning on, whose differences must stay exact.
    sums = decays.double().cumsum(1).transpose(1, 2)
    num_tokens, num_rows = keys.shape[2], queries.shape[2]
    of_rows = sums[:, :, num_tokens - num_rows :]
    if state is not None:
        values = values - (keys * sums.exp().float()) @ state
    matrix = betas[..., None] * _products(keys, sums, keys, sums, is_strict=True)
    right = betas[..., None] * values
    u = torch.linalg.solve_triangular(matrix, right, upper=False, unitriangular=True)
    made = _products(queries, of_rows, keys, sums, is_strict=False) @ u
    if state is not None:
        made = made + (queries * of_rows.exp().float()) @ state
    behind = None
    if goes_on:
        behind = (keys * (sums[:, :, -1:] - sums).exp().float()).transpose(2, 3) @ u
        if state is not None:
            behind = behind + state * sums[:, :, -1, :, None].exp().float()
    return made.transpose(1, 2), behind


def _short(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [..., dim] with length 1, in float32."""
    rows = rows.float()
    return rows * (rows.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _products(
    left: torch.Tensor,
    left_sums: torch.Tensor,
    right: torch.Tensor,
    sums: torch.Tensor,
    *,
    is_strict: bool,
) -> torch.Tensor:
    """Return the products of rows and tokens with the decays between, [B, heads, m, n].

    They are zero where the token comes after the row.

    left, left_sums  of the last m tokens, [B, heads, m, k] and [B, heads, m, k or 1]
    right, sums      of all n tokens
    is_strict        True: zero also where the token is the row's own
    """
    num_rows, num_tokens = left.shape[2], right.shape[2]
    offset = num_tokens - num_rows
    seen = torch.ones(num_rows, num_tokens, dtype=torch.bool, device=left.device)
    seen.tril_(offset - is_strict)
    if sums.shape[-1] == 1:
        since = (left_sums - sums.transpose(2, 3)).masked_fill_(seen.logical_not(), -torch.inf)
        return (left @ right.transpose(2, 3)) * since.exp_().float()
    made = left.new_zeros(*left.shape[:2], num_rows, num_tokens)
    for start in range(0, num_rows, _BLOCK):
        stop, before = min(start + _BLOCK, num_rows), offset + start
        rows, their_sums = left[:, :, start:stop], left_sums[:, :, start:stop]
        # From the block's first row on both ways decays only shrink, so nothing overflows.
        middle = their_sums[:, :, :1]
        old = right[:, :, :before] * (middle - sums[:, :, :before]).exp().float()
        own = rows * (their_sums - middle).exp().float()
        made[:, :, start:stop, :before] = own @ old.transpose(2, 3)
        near = slice(before, offset + stop)
        hidden = seen[start:stop, near].logical_not()[..., None]
        since = (their_sums[:, :, :, None] - sums[:, :, None, near]).masked_fill_(
            hidden, -torch.inf
        )
        pairs = rows[:, :, :, None] * right[:, :, None, near] * since.exp_().float()
        made[:, :, start:stop, near] = pairs.sum(-1)
    return made

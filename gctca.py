"""GCTCA: give most of the credit to the tokens that a contrast singles out.

**The idea.** The sign of a token's credit stays the response's own (good or bad); only its size is set, by asking how
differently the token would have been rated under a contrast. `--guidance prompt` scores the same tokens again after a
prompt that asks for a *wrong* answer; `--guidance group` counts in the other responses of the same group which tokens
the right ones write where the wrong ones do not. The ranks of the answers become weights: the top 40 % of a response's
tokens carry 80 % of its credit.

**The equation**, for a response of n valid tokens, k_t the divergence and r_t its rank among them (1 = smallest):

    prompt:  d = clamp(log p(y_t | negative prompt) - log p(y_t | prompt), -20, 20)     k_t = min(e^d - d - 1, 10)
    group:   k_t = max(0, sign(A) (log q+(y_t) - log q-(y_t)))     q+, q-: n-gram models of the right and the wrong ones
    w_t = n u_t / sum(u)      u_t = (r_t / n)^a      a = ln(1 - mass) / ln(1 - top) - 1      top, mass = 0.4, 0.8

**What differs from grpo.py.** Step 4, and the base settings (DAPO's: clip 0.2 / 0.28, dual clip 3, no KL, the mean over
all tokens, three mini-batches). `prompt` costs one forward without gradient more; `group` costs none and no model.

**Provenance.** The prompt contrast, the ranks and the base settings are the authors' code's. The group contrast is what
the public summary of the paper describes; its formulas (n-gram models that back off to the policy, the response itself
left out, one-sided differences) are our reconstruction. So the summary that circulates and the code describe two
different contrasts, and this script has both. Published: GenEval 0.89 against 0.85 and MathVerse 71.7 against 68.3 for
DAPO (the summary's numbers); nothing here claims to reproduce them.
"""
import math

import torch


# ------------------------------------------------------------------------------------------ the method's pure functions

def guidance_divergence(logp_pos, logp_neg):
    """How much the negative prompt changes the probability of each sampled token, ``k = min(e^d - d - 1, 10)``.

    logp_pos, logp_neg: (N,T) natural log-probs of the same tokens after the normal and after the negative prompt, same
    policy, same temperature. Returns (N,T) in nats, detached, in [0, 10]; 0 where the negative prompt changes nothing.
    d = logp_neg - logp_pos is cut to [-20, 20] first. k is the k3 estimate of KL(normal || negative) from one token.
    Raises ValueError when the shapes differ. Source: the authors' code.

    The first token becomes twice as likely under the negative prompt, the second does not change:

    >>> guidance_divergence(torch.tensor([[0.3, 0.7]]).log(), torch.tensor([[0.6, 0.7]]).log())       # 2 - ln 2 - 1
    tensor([[0.3069, 0.0000]])
    """
    if logp_pos.shape != logp_neg.shape:
        raise ValueError(f"logp_pos {tuple(logp_pos.shape)} and logp_neg {tuple(logp_neg.shape)} differ in shape")
    d = (logp_neg.detach().double() - logp_pos.detach().double()).clamp(-20, 20)                            # (N,T)
    # expm1 in float64: for small d the value is d^2 / 2, which e^d - d - 1 in float32 loses below d = 3e-4, and then
    # the ranks, which is all that is used of it, would be rounding noise.
    return (torch.expm1(d) - d).clamp(0, 10).to(logp_pos.dtype)                                             # (N,T)


def group_divergence(prompt_ids, completions, advantages, policy_logps, order=2, tau=1.0):
    """How much rather a token's own side of the group would write it than the other side, counted, for one prompt.

    Each side, right (A > 0) and wrong (A < 0), is an n-gram model of that side's responses *without* the response being
    rated: what only that response wrote would otherwise always look typical of its side. With c_n the last n tokens
    (they may reach into the prompt, whose tokens are not counted themselves):

        q_s(v | c_n) = (count_s(c_n, v) + tau q_s(v | c_{n-1})) / (count_s(c_n) + tau),    n = 0 .. order
        k = max(0, sign(A) (log q_+(y_t) - log q_-(y_t)))

    The outermost back-off is the policy's own probability, the same for both sides: where neither side has evidence, k
    is 0. One-sided, because |.| would blame a wrong response for opening as the right ones do.

    prompt_ids: list of token ids. completions: G lists of token ids, the end token included, no padding.
    advantages: (G,) A of each; 0 or NaN: on neither side. policy_logps: G tensors (T_i,), natural log-probs of the
    sampled tokens. order: longest context in tokens. tau: strength of the back-off in counts.
    Returns G tensors (T_i,) in nats, >= 0; all zeros (so weight 1) for a response on neither side and for a group that
    lacks a side.
    Raises ValueError for order < 0, tau <= 0 or lists that do not belong together. Source: ours, after the summary.

    Two right responses (7, 2) and a wrong one (7, 3). All open with 7, which gets nothing; 2 is what right ones write:

    >>> half = torch.tensor([0.5, 0.5]).log()
    >>> group_divergence([9], [[7, 2], [7, 2], [7, 3]], torch.tensor([1.0, 1.0, -2.0]), [half, half, half])
    [tensor([0.0000, 3.0445]), tensor([0.0000, 3.0445]), tensor([0.0000, 3.8067])]
    """
    logps = [torch.as_tensor(lp).detach() for lp in policy_logps]
    lengths = [len(completion) for completion in completions]
    if lengths != [len(lp) for lp in logps] or len(advantages) != len(lengths):
        raise ValueError("need G completions of T_i tokens, G advantages and G policy_logps of T_i")
    if order < 0 or tau <= 0:
        raise ValueError(f"need order >= 0 and tau > 0, not order = {order}, tau = {tau}")
    A = torch.as_tensor(advantages).detach().cpu()                                        # (G,)
    side = torch.stack([A > 0, A < 0]).double()                                           # (2,G)  right, wrong; NaN 0
    if not side.any(dim=1).all():
        return [torch.zeros_like(lp) for lp in logps]

    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))      # (M,)   whose token it is

    def counts_of_others(keys):
        """How often each of the M keys occurs on the right and on the wrong side outside its own response: (2,M)."""
        names = {}
        ids = torch.tensor([names.setdefault(key, len(names)) for key in keys])           # (M,)   one id per key
        table = torch.bincount(row * len(names) + ids, minlength=len(lengths) * len(names))   # counted once for all
        table = table.view(len(lengths), len(names)).double()                             # (G,U)
        return (side @ table)[:, ids] - side[:, row] * table[row, ids]                    # (2,M)  less its own

    # A start mark in front, so that a context longer than the text so far is a context like any other.
    texts = [(None,) * order + tuple(prompt_ids) + tuple(completion) for completion in completions]
    places = [(text, t) for text, length in zip(texts, lengths) for t in range(len(text) - length, len(text))]    # M
    q = torch.cat(logps).cpu().double().clamp(min=-700).exp()      # (M,)   the policy's p(y_t), above 0 for log's sake
    for n in range(order + 1):                                     #        q(y_t | c_0), then up to q(y_t | c_order)
        total = counts_of_others([text[t - n:t] for text, t in places])                   # (2,M)  count_s(c_n)
        count = counts_of_others([text[t - n:t + 1] for text, t in places])               # (2,M)  count_s(c_n, y_t)
        q = (count + tau * q) / (total + tau)                                             # (2,M)
    sign = (side[0] - side[1])[row]                                                       # (M,)
    k = (sign * (q[0].log() - q[1].log())).clamp(min=0)                                   # (M,)
    # Back to the caller's float32: what ties in exact arithmetic then ties here, for the last bits of float64 are gone.
    return [part.to(lp) for part, lp in zip(k.split(lengths), logps)]


def credit_weights(divergence, mask, top=0.4, mass=0.8):
    """Weights from ranks: the `top` share of a response's tokens, by divergence, carries `mass` of its credit.

    Ranks, because divergences have a long tail: one token at the cap of 10 would take everything. The power law
    ``u = x^a`` of x = r / n leaves ``(1 - top)^(a + 1)`` of its integral below 1 - top; that this be 1 - mass gives
    a = 2.15066. Exact for long responses without ties.

    divergence: (N,T), any scale, as only its order within a response counts. mask: (N,T), 1 on valid tokens.
    Returns (N,T), detached: mean 1 over the n valid tokens of each response, 0 on padding, > 0 else. Tokens that tie
    share their mean rank; a response whose divergences are all equal (n = 1 too) gets exactly 1, and so does all when
    top = mass. Without ties no weight exceeds a + 1 = 3.151; with ties none exceeds 4.441.
    Raises ValueError when the shapes differ or not 0 < top <= mass < 1. Source: the authors' code.

    >>> credit_weights(torch.tensor([[0.1, 9.0, 0.1, 0.5]]), torch.tensor([[1, 1, 1, 1]]))     # ranks 1.5, 4, 1.5, 3
    tensor([[0.2724, 2.2456, 0.2724, 1.2096]])
    """
    if divergence.shape != mask.shape:
        raise ValueError(f"divergence {tuple(divergence.shape)} and mask {tuple(mask.shape)} differ in shape")
    if not 0 < top <= mass < 1:
        raise ValueError(f"need 0 < top <= mass < 1, not top = {top}, mass = {mass}: "
                         "with mass < top the tokens that differ least would get the most credit")
    valid = mask.bool()                                                              # (N,T)
    a = math.log(1 - mass) / math.log(1 - top) - 1
    k = divergence.detach().double().masked_fill(~valid, math.inf).contiguous()      # (N,T)  padding ranks last
    ordered = k.sort(dim=-1).values                                                  # (N,T)
    below = torch.searchsorted(ordered, k)                                           # (N,T)  how many are < k
    up_to = torch.searchsorted(ordered, k, right=True)                               # (N,T)  how many are <= k
    r = (below + up_to + 1).double() / 2                                             # (N,T)  mean of below + 1 .. up_to
    # u = (r / n)^a but for a constant that cancels. Over the *largest* rank instead of n, u is exactly 1 there: however
    # large a is, not all u vanish; and where all tokens tie, or a = 0, every u and so every weight is exactly 1.
    largest = r.masked_fill(~valid, 1).amax(-1, keepdim=True)                        # (N,1)
    u = ((r / largest) ** a).masked_fill(~valid, 0)                                  # (N,T)
    w = u * valid.sum(-1, keepdim=True) / u.sum(-1, keepdim=True).clamp(min=1)       # (N,T)  a row of padding: 0 / 1
    return w.to(torch.promote_types(divergence.dtype, torch.float32))                # (N,T)

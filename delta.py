"""DelTA: which tokens tell good responses from bad ones?

**The idea.** GRPO pushes every token of a good response up and every token of a bad one down, although most tokens (the
names, the full stops) occur in both, so that the pushes cancel or do harm. DelTA looks at the gradient that each token
would cause, finds the mean gradient of the good side and of the bad side, and asks of every token how much closer it is
to its own side than to the other. Tokens that discriminate get up to 1.2 / 0.8 times the credit of those that do not.

**The equation**, with v_t = (1 - p(y_t)) h_t as a cheap stand-in for the gradient of log p(y_t):

    mu+ = mean of v weighted by max(A, 0)      mu- = mean of v weighted by max(-A, 0)          over the whole batch
    m_t = |v_t - mu-|^2 - |v_t - mu+|^2        alpha_t = sigmoid(sign(A) m_t / std of m on that side)
    w_t = lambda_t / mean(lambda)              lambda_t = low + (high - low) alpha_t     (low if A = 0)

**What differs from grpo.py.** Step 4, and the base settings (DAPO's: clip 0.2 / 0.28, dual clip 10, no KL, the mean
over all tokens, four mini-batches). The hidden states h come from the pass that scores the old log-probs anyway: no
extra forward. The mean weight is 1 over the batch, not per response, so the loss of step 1 need not be 0.

**Provenance.** The formulas, the defaults and the base settings are the paper's and its authors' code's. One side empty
in the batch (w = 1 instead of a contrast with nothing) is ours, and so is taking h from the old-log-prob pass, which
makes the authors' three extra forwards (+10.2 % of a step, their number) unnecessary. They report +3.26 and +2.62
points over the best baseline on 8B and 14B models; nothing here claims to reproduce that.
"""
import torch


# ------------------------------------------------------------------------------------------ the method's pure functions

def token_proxies(hidden, logps):
    """The stand-in for each token's gradient, ``v_t = (1 - p(y_t)) h_t``.

    Why this one: with logits ``W h / T`` the gradient of log p(y) with respect to y's own row of W is
    ``(1 - p(y)) h / T``. So v is, but for the constant 1/T, the push that the token would give to its own output row:
    long when the policy was surprised, almost nothing when it was sure.

    hidden: (N,T,H) input of lm_head (after the final norm) at the position that *predicts* y_t.
    logps: (N,T) log p(y_t), natural log, under the policy that sampled. Returns (N,T,H), at least float32, detached.
    Raises ValueError when the shapes do not belong together. Source: paper and the authors' code.

    >>> token_proxies(torch.tensor([[[2.0, 4.0]]]), torch.tensor([[0.25]]).log())      # (1 - 0.25) * (2, 4)
    tensor([[[1.5000, 3.0000]]])
    """
    if hidden.shape[:2] != logps.shape:
        raise ValueError(f"hidden {tuple(hidden.shape)} and logps {tuple(logps.shape)} must be (N,T,H) and (N,T)")
    hidden, logps = hidden.detach(), logps.detach()
    if hidden.dtype != torch.float64:
        hidden = hidden.float()                              # a mean over many tokens loses too much in bfloat16
    surprise = -torch.expm1(logps.to(hidden.dtype))          # (N,T)    1 - p; expm1 keeps its digits when p is near 1
    return surprise.unsqueeze(-1) * hidden                   # (N,T,H)


def credit_weights(proxies, advantages, mask, refine=1, low=0.8, high=1.2):
    """DelTA's weight of every token: how clearly it belongs to its own side, good or bad.

    proxies: (N,T,H) from `token_proxies`. advantages: (N,) A. mask: (N,T), 1 on valid tokens. Give the *whole* rollout
    batch: the two means and the normaliser run over all of it. refine: how often the means are re-estimated from the
    tokens that already look typical of their side. low, high: least and largest lambda.
    Returns (N,T) non-negative and detached: mean 1 over all valid tokens of the batch (not of each response), inside
    [low/high, high/low], 0 on padding. Exactly 1 where no contrast exists: one side empty (ours), or low = high.
    Raises ValueError for shapes that do not belong together, refine < 0, or not 0 < low <= high.
    Source: paper and the authors' code; the case of an empty side is ours.

    A good response of two tokens and a bad one of two; the second token is the same in both, so it tells nothing:

    >>> v = torch.tensor([[[2.0, 0.0], [1.0, 1.0]], [[0.0, 2.0], [1.0, 1.0]]])
    >>> credit_weights(v, torch.tensor([1.0, -1.0]), torch.ones(2, 2))
    tensor([[1.0788, 0.9212],
            [1.0788, 0.9212]])
    """
    if proxies.shape[:2] != mask.shape or advantages.shape != mask.shape[:1]:
        raise ValueError(f"proxies {tuple(proxies.shape)}, advantages {tuple(advantages.shape)} and mask "
                         f"{tuple(mask.shape)} must be (N,T,H), (N,) and (N,T) with the same N and T")
    if refine < 0 or not 0 < low <= high:
        raise ValueError(f"need refine >= 0 and 0 < low <= high, not refine = {refine}, low = {low}, high = {high}")
    valid = mask.bool()                                                      # (N,T)
    weights = valid.to(torch.promote_types(proxies.dtype, torch.float32))    # (N,T)    w = 1 until there is a contrast
    # From here on only the M valid tokens exist, in one flat list: whatever lies on padding cannot get in.
    v = proxies.detach()[valid].to(weights.dtype)                            # (M,H)
    A = advantages.detach().to(v)[:, None].expand(mask.shape)[valid]         # (M,)
    good, bad = A > 0, A < 0                                                 # (M,) (M,)
    if low == high or not good.any() or not bad.any():
        return weights

    def centroid(a):             # mu = sum(a v) / max(sum(a), 1e-8), for weights a >= 0
        return a @ v / a.sum().clamp(min=1e-8)                               # (M,) @ (M,H) -> (H,)

    def signed_margin(alpha):    # m if A > 0, -m if A < 0: positive where the token is closer to its own side
        plus, minus = centroid(A.clamp(min=0) * alpha), centroid((-A).clamp(min=0) * alpha)                # (H,) (H,)
        # |v - mu-|^2 - |v - mu+|^2 = 2 (v - (mu+ + mu-)/2) . (mu+ - mu-): no second (M,H) tensor, no large squares
        m = 2 * (v @ (plus - minus) - (plus + minus) / 2 @ (plus - minus))                                 # (M,)
        return A.sign() * m                                                                                # (M,)

    def temperature(margin):     # population std of the margin over its side's tokens, each counted once whatever |A|
        g_good, g_bad = (margin[side].var(correction=0).clamp(min=1e-8).sqrt() for side in (good, bad))
        return torch.where(good, g_good, g_bad)                              # (M,)     the value on A = 0 is never used

    margin = signed_margin(torch.ones_like(A))                               # (M,)
    alpha = torch.sigmoid(margin / temperature(margin))                      # (M,)
    for _ in range(refine):
        g = temperature(margin)  # (M,)  taken *before* the centroids move: it lags one round behind the margin, as in
        margin = signed_margin(alpha)       # (M,)      the authors' code; the centroids are now weighted by a * alpha
        alpha = torch.sigmoid(margin / g)   # (M,)
    lam = low + (high - low) * torch.where(A != 0, alpha, 0)                 # (M,)     lambda = low where A = 0
    weights[valid] = lam / lam.mean()    # over all valid tokens: those with A = 0 move no weight but count in the mean
    return weights

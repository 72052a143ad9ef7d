"""DATC: direction-aware token credit assignment.

GRPO gives every token of a response the same advantage. DATC asks a differentiable reward model which way its score
would like each token to move, and asks the policy which way the update will move that token. Where the two agree,
the update does work *for* the reward and the token gets more of the response's credit; where they disagree, less.
"""
import torch


# ---------------------------------------------------------------------------------------------------------------------
# The method's pure functions
# ---------------------------------------------------------------------------------------------------------------------
@torch.no_grad()
def work(logits, gradients, embeddings, actions, *, decodable=None, top_k=128):
    """Work W_t = <F_t, s_t> that reinforcing the sampled token does on the reward.   [steps 2-5; formulas ours]

    `f_t(v) = g_t . E[v]` is the score's first-order change if v stood at t, `F_t = p (f - fbar)` that slope carried into
    the policy's logits (the chain rule through the expected embedding), `s_t = onehot(y) - p` the direction in which
    log p(y) rises. W is the work of the *update*, not "y is better than the average token": the second term below can
    outvote the first, so the signs of W and f_y - fbar differ on some tokens.

        W = p_y (f_y - fbar) - sum_v p_v^2 (f_v - fbar)

    Args:
        logits:     (N, T, V) already divided by the sampling temperature. Any leading shape will do.
        gradients:  (N, T, d) reward units per unit of embedding, at the slot of the sampled token.
        embeddings: (V, d)    the reward model's embedding of each token of the *policy's* vocabulary, finite.
        actions:    (N, T)    the sampled tokens y.
        decodable:  (V,) bool, only for a reward model with another tokenizer: the tokens whose row of `embeddings` means
            something. The sums then run over S = the `top_k` likeliest of them plus y, `fbar = sum_S p f / sum_S p`. An
            undecodable y has no f_y: its first term is 0.
    Returns: (N, T), reward units, detached. No tensor here is larger than the logits.

    >>> E, g = torch.tensor([[0.], [1.]]), torch.tensor([[[2.]]])     # token 1 would raise the reward by 2
    >>> work(torch.zeros(1, 1, 2), g, E, torch.tensor([[1]])).item()  # p = (.5, .5): .5 (2 - 1) - .25 (-1 + 1)
    0.5
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    y = actions.unsqueeze(-1)                                              # (N, T, 1)
    p = logits.to(dtype).softmax(-1)                                       # (N, T, V)
    f = gradients.to(dtype) @ embeddings.to(dtype).T                       # (N, T, V)
    r = f - f.gather(-1, y)                                                # (N, T, V) f_v - f_y: any pivot would do
    p_y = p.gather(-1, y).squeeze(-1)                                      # (N, T)
    po = p.scatter(-1, y, 0.0)                                             # (N, T, V) p without y
    # 1 - p_y as a sum of small numbers. Most sampled tokens have p_y near 1: there `1 - p_y` and `f_y - fbar` would
    # subtract nearly equal floats, and what is left of W would be rounding.
    e = po.sum(-1)                                                         # (N, T)
    if decodable is not None:
        ranked = p.masked_fill(~decodable, -1.0).topk(min(top_k, p.shape[-1]), dim=-1).indices   # (N, T, k)
        in_s = torch.zeros_like(p, dtype=torch.bool).scatter(-1, ranked, True) & decodable       # (N, T, V)
        po = po.where(in_s, 0.0)
        p_y = p_y.where(decodable[actions], 0.0)
    p_s = (p_y + po.sum(-1)).clamp_min(torch.finfo(dtype).tiny)            # (N, T) P_S; 1 without a restriction
    s2 = po.square().sum(-1)                                               # (N, T)
    b = (po * r).sum(-1) / p_s                                             # (N, T) fbar - f_y
    c = (po.square() * r).sum(-1)                                          # (N, T)
    return -(p_y * e - s2) * b - c                                         # (N, T) the equation above, regrouped


@torch.no_grad()
def credit_weights(work, advantages, mask, lam=4.0, gate="sigmoid", *, scored=None, control="none", seed=0):
    """Credit weights w from the work: positive, mean 1 over each response's valid tokens.   [steps 6-8; formulas ours]

        a_t = sign(A) tanh(W_t / rms(W)),    u_t = 2 sigmoid(lam a_t)  or  exp(lam a_t),    w_t = u_t / mean(u)

    sign(A) because the update moves along A s_t: in a bad response the tokens that the reward model likes are blamed less.

    Args:
        work:       (N, T) from `work`; a non-finite entry counts as not scored.
        advantages: (N,)   only the sign is used; 0 gives w = 1.
        mask:       (N, T) 1 on valid tokens.
        lam:        strength >= 0; 0 gives exactly 1 [4 is the summary's].
        gate:       "sigmoid" bounds u by 2, "exp" by e^lam.
        scored:     (N, T) or None: positions that the reward model saw. The others stay out of the rms and have u = 1.
        control:    "shuffle" permutes w inside each response (same numbers, wrong places); "no-direction" uses |a|.
        seed:       of the shuffle; the global random state is not touched.
    Returns: (N, T), detached, 0 on padding.
    Raises: ValueError for an unknown gate or control, or a negative lam.

    >>> w = credit_weights(torch.tensor([[3., -3., 9.]]), torch.tensor([1.]), torch.tensor([[1., 1., 0.]]))
    >>> [round(x, 4) for x in w[0].tolist()]                               # rms = 3, a = +-tanh(1) = +-.7616
    [1.9093, 0.0907, 0.0]
    """
    if gate not in ("sigmoid", "exp") or control not in ("none", "shuffle", "no-direction") or not lam >= 0:
        raise ValueError(f"unknown gate {gate!r} or control {control!r}, or lam {lam} < 0")
    valid = mask > 0                                                       # (N, T)
    used = valid & work.isfinite() if scored is None else valid & work.isfinite() & (scored > 0)
    x = work.where(used, 0.0).to(torch.promote_types(work.dtype, torch.float32))                 # (N, T)
    # Only the shape of W inside its response matters. Dividing by the largest entry first keeps the squares from
    # overflowing or vanishing, so that a reward in any unit gives the same weights.
    x = x / x.abs().amax(1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    rms = (x.square().sum(1, keepdim=True) / used.sum(1, keepdim=True).clamp_min(1)).sqrt()      # (N, 1)
    # All work 0 (or nothing scored): 0 / tiny = 0 = no opinion. A = 0 and lam = 0 end there too: u = 1, w = 1.
    a = advantages.sign().unsqueeze(1) * torch.tanh(x / rms.clamp_min(torch.finfo(x.dtype).tiny))   # (N, T)
    a = a.abs() if control == "no-direction" else a
    z = lam * a                                                            # (N, T)
    # A common factor cancels in w, so exp may be taken relative to its largest argument: it cannot overflow.
    u = 2 * torch.sigmoid(z) if gate == "sigmoid" else torch.exp(z - z.amax(1, keepdim=True))
    u = u.where(valid, 0.0)
    w = u * valid.sum(1, keepdim=True) / u.sum(1, keepdim=True).clamp_min(torch.finfo(u.dtype).tiny)
    if control == "shuffle":
        generator = torch.Generator().manual_seed(seed)
        for row, ok in zip(w, valid):                                      # (T,), (T,)
            row[ok] = row[ok][torch.randperm(int(ok.sum()), generator=generator).to(row.device)]
    return w


def overlap_shares(spans, other):
    """Share of each character span of `other` (M, 2) that lies inside each of `spans` (T, 2): -> (T, M) float.   [ours]

    `shares @ g` hands the gradient of every reward-model token to the policy's tokens that spell it, in proportion to
    their characters. A token spelled by two others gets the *sum* of their gradients: the first-order change of the
    score when all its slots move together. Empty spans overlap nothing.

    >>> overlap_shares(torch.tensor([[0, 2], [2, 6]]), torch.tensor([[0, 4], [4, 6]]))   # "un|able" against "unab|le"
    tensor([[0.5000, 0.0000],
            [0.5000, 1.0000]])
    """
    start = torch.maximum(spans[:, None, 0], other[None, :, 0])            # (T, M)
    end = torch.minimum(spans[:, None, 1], other[None, :, 1])              # (T, M)
    length = (other[:, 1] - other[:, 0]).clamp_min(1)                      # (M,)
    return (end - start).clamp_min(0) / length                             # (T, M)


# ---------------------------------------------------------------------------------------------------------------------
# The pieces that touch a model or a tokenizer
# ---------------------------------------------------------------------------------------------------------------------
def score_and_gradient(reward_model, input_ids, attention_mask):
    """Score R of each row and its gradient with respect to the *input embeddings*.   [step 1, summary]

    One forward, one backward. `torch.autograd.grad` asks for the embeddings only, so that no weight gradient is computed
    or stored. Whatever the padding (left, right, or both), the model sees its tokens first and padding last: positions
    then count from 0 for every architecture, and the model's own pooling finds the token whose score it returns. That
    pooling looks at `input_ids`; with `inputs_embeds` it would read the last *slot*, padding or not. Hence the hook, which
    swaps the embedding layer's output for a leaf of the graph.

    Args:
        reward_model:   an AutoModelForSequenceClassification with one label and a pad_token_id, in eval mode.
        input_ids:      (N, L).
        attention_mask: (N, L) 1 on tokens, 0 on padding.
    Returns: scores (N,) float32, each the number that the model gives for that row alone; gradients (N, L, d) float32,
        in the caller's order, 0 on padding.
    """
    order = attention_mask.argsort(dim=1, descending=True, stable=True)    # (N, L) tokens first, their order kept
    mask = attention_mask.gather(1, order)                                 # (N, L)
    pad = reward_model.config.get_text_config().pad_token_id
    ids = input_ids.gather(1, order).masked_fill(mask == 0, pad)           # (N, L)
    leaf = []

    def make_leaf(module, inputs, output):
        leaf.append(output.detach().requires_grad_())                      # (N, L, d)
        return leaf[-1]

    hook = reward_model.get_input_embeddings().register_forward_hook(make_leaf)
    try:
        with torch.enable_grad():
            scores = reward_model(input_ids=ids, attention_mask=mask).logits[:, 0]               # (N,)
            # Rows do not see each other: the gradient of the sum holds every row's own gradient.
            (g,) = torch.autograd.grad(scores.sum(), leaf)                 # (N, L, d)
    finally:
        hook.remove()
    g = g.float() * mask.unsqueeze(-1)
    gradients = torch.zeros_like(g).scatter(1, order.unsqueeze(-1).expand_as(g), g)              # (N, L, d)
    return scores.detach().float(), gradients


@torch.no_grad()
def work_from_hidden(hidden, head, gradients, embeddings, actions, mask, *, temperature, chunk_size, **restriction):
    """`work` without the (N, T, V) logits: the head runs over `chunk_size` valid positions at a time.

    Args: hidden (N, T, H), the inputs of `head` (H -> V) at the positions that predict `actions` (N, T); `gradients`
        (N, T, d) and `embeddings` (V, d) as in `work`, which also explains `restriction`. Returns: (N, T), 0 on padding.
    """
    rows = (mask > 0).flatten().nonzero().squeeze(1)                       # (M,) valid positions
    h, g, y = hidden.flatten(0, 1), gradients.flatten(0, 1), actions.flatten()
    out = torch.zeros(y.shape, device=h.device)                            # (N T,)
    for i in rows.split(chunk_size):
        logits = head(h[i]).float() / temperature                          # (chunk, V)
        out[i] = work(logits, g[i], embeddings, y[i], **restriction)
    return out.view(actions.shape)


def respell(policy_tokenizer, reward_tokenizer, ids, eos_ids):
    """One response in the reward model's own tokens, and which of them spell which policy token.   [ours]

    The span of policy token t in the text is what t adds to the few tokens before it: linear in T, and right for joining
    spaces and for characters that several tokens spell. The end token, which has no characters, stands for the reward
    model's end token.

    Args: `ids` (T,) one response without padding. Returns: reward-model ids, list of M; spans (T, 2); their spans (M, 2).
    """
    ids, spans, end = [int(i) for i in ids], [], 0

    def text(some):
        return policy_tokenizer.decode(some, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    for t in range(len(ids)):
        start, end = end, end + max(0, len(text(ids[max(0, t - 8):t + 1])) - len(text(ids[max(0, t - 8):t])))
        spans.append((start, end))
    spelled = reward_tokenizer(text(ids), add_special_tokens=False, return_offsets_mapping=True)
    reward_ids, reward_spans = list(spelled["input_ids"]), [tuple(x) for x in spelled["offset_mapping"]]
    if ids and ids[-1] in eos_ids and reward_tokenizer.eos_token_id is not None:
        spans[-1] = (end, end + 1)
        reward_ids, reward_spans = reward_ids + [reward_tokenizer.eos_token_id], reward_spans + [(end, end + 1)]
    return reward_ids, torch.tensor(spans).view(-1, 2), torch.tensor(reward_spans).view(-1, 2)


@torch.no_grad()
def vocabulary_embeddings(policy_tokenizer, reward_tokenizer, table, vocab_size, eos_ids):
    """E[v] = mean reward-model embedding of reward-tokenise(string(v)), for a policy with another tokenizer.   [ours]

    Args: `table` (M, d) the reward model's embeddings; `vocab_size` the policy's number of logits V.
    Returns: E (V, d), and decodable (V,) bool: False (and E = 0) for parts of a character, unused ids and special tokens,
        except that the policy's end tokens stand for the reward model's.
    """
    size, special = min(vocab_size, len(policy_tokenizer)), set(policy_tokenizer.all_special_ids)
    strings = policy_tokenizer.batch_decode([[v] for v in range(size)], clean_up_tokenization_spaces=False)
    strings = ["" if v in special or "\ufffd" in s else s for v, s in enumerate(strings)]
    pieces = reward_tokenizer(strings, add_special_tokens=False)["input_ids"] + [[]] * (vocab_size - size)
    for v in eos_ids:
        pieces[v] = [i for i in [reward_tokenizer.eos_token_id] if i is not None]
    counts = torch.tensor([len(x) for x in pieces], device=table.device)   # (V,)
    flat = torch.tensor([i for x in pieces for i in x], dtype=torch.long, device=table.device)
    E = torch.nn.functional.embedding_bag(flat, table, counts.cumsum(0) - counts, mode="mean")   # (V, d)
    return E, counts > 0

"""DATC: direction-aware token credit assignment, with a reward model that says which way each token should move.

The idea. A differentiable reward model can be asked, token by token, which way its score would like the token to move;
the policy can be asked which way its update will move it. Where the two agree, the update does work *for* the reward,
and the token gets more of its response's credit; where they disagree, less.

    g_t = dR/de_t                                               gradient of the score R at the input embedding of y_t
    f_t(v) = g_t . E[v],   F_t = p (f - sum_v p_v f(v))         slope of R in the policy's logits (E: R's embeddings)
    W_t = <F_t, onehot(y_t) - p_t>                              work of reinforcing y_t on the score
    a_t = sign(A) tanh(W_t / rms_t(W)),  u = 2 sigmoid(lam a)   alignment, gate
    w   = u / mean of u over the response                       credit per token; sign of A kept, mean 1

What differs from grpo.py: the reward is a reward model's score (step 2), and w comes from its gradient (step 4). The
verifiable accuracy is still measured beside it: reward up, accuracy not is reward hacking.

Where it comes from. A public summary's: the direction from the input gradient, its alignment with the policy's update,
the sigmoid gate with lam = 4, both controls. Ours, because the paper's text could not be read: every formula above, the
base settings (GRPO's), the way between two tokenizers, the toy's reward model. Published: reward 13.35 against 10.87
without DATC, +5.7 to 9.1 % GPU time; nothing here claims to reproduce that.

Run it on a CPU (a toy, no download; its reward model gets hacked, watch `accuracy`; --lam 0 is uniform credit):

    python datc.py

and on one GPU with a real checkpoint (needs a hub):

    python datc.py --model Qwen/Qwen3-0.6B --reward-model Skywork/Skywork-Reward-V2-Qwen3-0.6B --data openai/gsm8k:main
"""
import os
import random
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from common import (InputError, Meter, Run, RunArgs, adapter_off, clipped_kl_loss, draw_batch, encode_prompts, evaluate, freeze,
                    generate, group_advantages, load_policy, load_problems, loss_denominator, main, make_trainable, picture,
                    plot_curve, reward_correct, score, slices, step_metrics, token_logps,
                    autocast, backbone, chat_ids, end_ids, is_toy, pad_right, save_folder, story_problems,
                    story_solution)


@dataclass
class Args(RunArgs):
    """DATC's own settings; defaults for real models. The toy's are in TOY below."""
    reward_model: str = field(default="toy", metadata={"help": "hub id or folder of a sequence classifier with one "
                              "label; 'train:NAME' grows one from a causal LM on story answers; 'toy' is 'train:toy'"})
    reward_steps: int = field(default=40, metadata={"help": "training steps of 'train:NAME' (ours)"})
    lam: float = field(default=4.0, metadata={"help": "strength of the credit (summary); 0: uniform credit, the base"})
    gate: str = field(default="sigmoid", metadata={"help": "sigmoid (summary) or exp (ours)"})
    control: str = field(default="none", metadata={"help": "ablation: shuffle the weights, or no-direction (|a|)"})
    top_k: int = field(default=128, metadata={"help": "likeliest tokens compared when the tokenizers differ (ours)"})
    scale: str = field(default="std", metadata={"help": "advantage divided by the group's 'std' (GRPO) or by 'none' (Dr. GRPO)"})
    clip_low: float = field(default=0.2, metadata={"help": "lower clip range (PPO, GRPO)"})
    clip_high: float = field(default=0.2, metadata={"help": "upper clip range (GRPO); DAPO's clip-higher: 0.28"})
    dual_clip: float | None = field(default=None, metadata={"help": "c > 1 bounds the loss of bad tokens with a huge ratio; off in GRPO"})
    beta: float = field(default=0.04, metadata={"help": "weight of the KL to the starting model (GRPO); 0 loads no reference model"})
    kl: str = field(default="k3", metadata={"help": "KL estimate in the loss: k3 (GRPO; gradient of KL(ref||pi)), k2 (that of "
                                            "KL(pi||ref)), k1 (expected gradient 0: only a monitor)"})
    aggregate: str = field(default="sequence", metadata={"help": "sequence (GRPO), token (DAPO) or constant (Dr. GRPO)"})
    inner_iterations: int = field(default=1, metadata={"help": "passes over a rollout batch (GRPO's mu)"})
    mini_batches: int = field(default=1, metadata={"help": "optimiser steps in a pass; groups stay whole if it divides --prompts-per-step"})
    learning_rate: float = field(default=1e-6, metadata={"help": "AdamW, constant (GRPO)"})
    max_grad_norm: float = field(default=1.0, metadata={"help": "gradient clipping (usual)"})


# The toy is tiny and starts from random weights, so it takes larger steps on more samples.
TOY = dict(steps=60, prompts_per_step=64, max_new_tokens=32, learning_rate=3e-4, micro_batch=512, sample_batch=4096,
           chunk_size=4096, eval_problems=128, eval_samples=8, reward_steps=800)


def check_options(args):
    """Arguments that only this script has."""
    for name, allowed in (("scale", ("std", "none")), ("kl", ("k1", "k2", "k3")), ("aggregate", ("sequence", "token", "constant"))):
        if getattr(args, name) not in allowed:
            raise InputError(f"--{name} must be one of {', '.join(allowed)}, not {getattr(args, name)}")
    if not 0 < args.clip_low < 1 or args.clip_high <= 0 or args.beta < 0 or (args.dual_clip is not None and args.dual_clip <= 1):
        raise InputError("needs 0 < --clip-low < 1, --clip-high > 0, --beta >= 0 and --dual-clip > 1")
    if args.gate not in ("sigmoid", "exp") or args.control not in ("none", "shuffle", "no-direction"):
        raise InputError("--gate must be sigmoid or exp, --control none, shuffle or no-direction")
    if args.reward_model == "toy" and not is_toy(args.model):
        raise InputError(f"--reward-model: name one for --model {args.model}; the default knows the toy's stories only")
    if not 0 <= args.lam <= 20 or args.top_k < 1 or args.reward_steps < 1:
        raise InputError("needs 0 <= --lam <= 20, --top-k >= 1 and --reward-steps >= 1")


@torch.no_grad()
def work(logits, gradients, embeddings, actions, *, decodable=None, top_k=128):
    """Work W_t = <F_t, s_t> that reinforcing the sampled token does on the reward.   [ours]

    `f_t(v) = g_t . E[v]` is the score's first-order change if v stood at t, `F_t = p (f - fbar)` that slope carried
    into the policy's logits (chain rule through the expected embedding), `s_t = onehot(y) - p` the direction in which
    log p(y) rises. W is the work of the *update*, not "y is better than average": its second term can win.

        W = p_y (f_y - fbar) - sum_v p_v^2 (f_v - fbar)

    Args:
        logits:     (N,T,V) divided by the sampling temperature already. Any leading shape will do.
        gradients:  (N,T,d) reward per unit of embedding, at the slot of the sampled token.
        embeddings: (V,d)   the reward model's embedding of each token of the *policy's* vocabulary, finite.
        actions:    (N,T)   the sampled tokens y.
        decodable:  (V,) bool, if the reward model has another tokenizer: the rows of `embeddings` that mean something.
            Sums then run over S = the `top_k` likeliest of these and y; an undecodable y has no f_y, no first term.
    Returns: (N,T), in units of reward, detached. No tensor in here is larger than the logits.

    >>> p, E = torch.tensor([[[0.5, 0.3, 0.2]]]), torch.tensor([[5.], [-9.], [1.]])          # g = 1: f = E, fbar = 0
    >>> round(work(p.log(), torch.ones(1, 1, 1), E, torch.tensor([[2]])).item(), 4)          # .2 * 1 - (.25 * 5 - .09 * 9 + .04 * 1)
    -0.28
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    y = actions.unsqueeze(-1)                                               # (N,T,1)
    p = logits.to(dtype).softmax(-1)                                        # (N,T,V)
    f = gradients.to(dtype) @ embeddings.to(dtype).T                        # (N,T,V)
    r = f - f.gather(-1, y)                                                 # (N,T,V) f_v - f_y: any pivot would do
    p_y, po = p.gather(-1, y).squeeze(-1), p.scatter(-1, y, 0.0)            # (N,T), (N,T,V) p without y
    # e = 1 - p_y as a sum of small numbers. Most sampled tokens have p_y near 1, where `1 - p_y` and `f_y - fbar`
    # subtract nearly equal floats and leave little but rounding.
    e = po.sum(-1)                                                          # (N,T)
    if decodable is not None:
        likely = p.masked_fill(~decodable, -1.0).topk(min(top_k, p.shape[-1]), dim=-1).indices   # (N,T,k)
        in_s = torch.zeros_like(p, dtype=torch.bool).scatter(-1, likely, True) & decodable       # (N,T,V)
        p_y, po = p_y.where(decodable[actions], 0.0), po.where(in_s, 0.0)
    p_s = (p_y + po.sum(-1)).clamp_min(torch.finfo(dtype).tiny)             # (N,T) P_S, 1 without a restriction
    b = (po * r).sum(-1) / p_s                                              # (N,T) fbar - f_y, fbar = sum_S p f / P_S
    s2, c = po.square().sum(-1), (po.square() * r).sum(-1)                  # (N,T) each
    return -(p_y * e - s2) * b - c                                          # (N,T) the equation above, regrouped


@torch.no_grad()
def credit_weights(work, advantages, mask, lam=4.0, gate="sigmoid", *, scored=None, control="none", seed=0):
    """Credit weights: positive, mean 1 over each response's valid tokens.   [gate and lam: summary; the rest: ours]

        a_t = sign(A) tanh(W_t / rms(W)),    u_t = 2 sigmoid(lam a_t)  or  exp(lam a_t),    w_t = u_t / mean(u)

    sign(A), because the update moves along A s_t: in a bad response the tokens that the model likes are blamed less.

    Args:
        work:       (N,T) from `work`; a non-finite entry counts as not scored.
        advantages: (N,)  only the sign is used; 0 gives w = 1.
        mask, lam:  (N,T) 1 on valid tokens; strength >= 0, of which 0 gives exactly 1.
        gate:       "sigmoid" bounds u by 2, "exp" by e^lam.
        scored:     (N,T) or None: positions that the reward model saw. The others are left out of the rms, with u = 1.
        control:    "shuffle" permutes w inside each response, by its own `seed`; "no-direction" uses |a|.
    Returns: (N,T), detached, 0 on padding. Raises: ValueError for an unknown gate or control, or a negative lam.

    >>> W, A, mask = torch.tensor([[3., 1., 9.], [3., 1., -1.]]), torch.tensor([1., -1.]), torch.tensor([[1., 1., 0.], [1., 1., 1.]])
    >>> credit_weights(W, A, mask)                                          # rms = sqrt(5), sqrt(11 / 3)
    tensor([[1.0704, 0.9296, 0.0000],
            [0.0730, 0.3750, 2.5520]])
    """
    if gate not in ("sigmoid", "exp") or control not in ("none", "shuffle", "no-direction") or not lam >= 0:
        raise ValueError(f"unknown gate {gate!r} or control {control!r}, or lam {lam} < 0")
    valid = mask > 0                                                        # (N,T)
    used = valid & work.isfinite() & (valid if scored is None else scored > 0)                   # (N,T)
    x = work.where(used, 0.0).to(torch.promote_types(work.dtype, torch.float32))                 # (N,T)
    tiny = torch.finfo(x.dtype).tiny
    # Only the shape of W within its response matters. Dividing by the largest entry first keeps the squares from
    # overflowing or vanishing: a reward in any unit gives the same weights.
    x = x / x.abs().amax(1, keepdim=True).clamp_min(tiny)
    rms = (x.square().sum(1, keepdim=True) / used.sum(1, keepdim=True).clamp_min(1)).sqrt()      # (N,1)
    # No work at all (or nothing scored) gives 0 / tiny = 0, no opinion. A = 0 and lam = 0 end there too: u = 1, w = 1.
    a = advantages.sign().unsqueeze(1) * torch.tanh(x / rms.clamp_min(tiny))                     # (N,T)
    z = lam * (a.abs() if control == "no-direction" else a)                 # (N,T)
    # A common factor cancels in w, so exp may be taken relative to its largest argument: it cannot overflow.
    u = 2 * torch.sigmoid(z) if gate == "sigmoid" else torch.exp(z - z.amax(1, keepdim=True))
    u = u.where(valid, 0.0)                                                 # (N,T)
    w = u * valid.sum(1, keepdim=True) / u.sum(1, keepdim=True).clamp_min(tiny)                  # (N,T)
    if control == "shuffle":
        generator = torch.Generator().manual_seed(seed)
        for row, ok in zip(w, valid):                                       # (T,), (T,)
            row[ok] = row[ok][torch.randperm(int(ok.sum()), generator=generator).to(row.device)]
    return w


@torch.no_grad()
def work_from_hidden(hidden, head, gradients, embeddings, actions, mask, *, temperature, chunk_size, **restriction):
    """`work` without the (N,T,V) logits: the head (H -> V) runs over `chunk_size` valid positions at a time -> (N,T).

    hidden (N,T,H): the inputs of lm_head at the positions that predict `actions`. Padding gets 0.
    """
    rows = (mask > 0).flatten().nonzero().squeeze(1)                        # (M,) valid positions
    h, g, y = hidden.flatten(0, 1), gradients.flatten(0, 1), actions.flatten()                   # (N T, ...)
    W = torch.zeros(y.shape, device=h.device)                               # (N T,)
    for i in rows.split(chunk_size):
        logits = head(h[i].to(head.weight.dtype)).float() / temperature     # (chunk,V)
        W[i] = work(logits, g[i], embeddings, y[i], **restriction)
    return W.view(actions.shape)


def score_and_gradient(reward_model, input_ids, attention_mask):
    """Score of each row and its gradient with respect to the *input embeddings* -> (N,), (N,L,d).   [summary]

    One forward, one backward; `autograd.grad` asks for the embeddings only, so no weight gradient is computed. However
    the rows (N,L) are padded, the model sees their tokens first and padding last: every architecture then counts its
    positions from 0, and the model's own pooling finds the token whose score it returns, by looking at `input_ids`;
    given `inputs_embeds` it would read the last slot, padding or not. Hence the hook, which swaps the embeddings in.
    Scores are what the model gives for each row alone; gradients keep the caller's order, 0 on padding.
    """
    order = attention_mask.argsort(dim=1, descending=True, stable=True)     # (N,L) tokens first, their order kept
    mask = attention_mask.gather(1, order)                                  # (N,L)
    ids = input_ids.gather(1, order).masked_fill(mask == 0, reward_model.config.get_text_config().pad_token_id)  # (N,L)
    leaf = reward_model.get_input_embeddings()(ids).detach().requires_grad_()                    # (N,L,d)
    hook = reward_model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: leaf)
    try:
        with torch.enable_grad():
            scores = reward_model(input_ids=ids, attention_mask=mask).logits[:, 0]               # (N,)
            (g,) = torch.autograd.grad(scores.sum(), leaf)                  # (N,L,d): rows do not see each other
    finally:
        hook.remove()
    g = g.float() * mask.unsqueeze(-1)                                      # (N,L,d)
    return scores.detach().float(), torch.zeros_like(g).scatter(1, order.unsqueeze(-1).expand_as(g), g)


def respell(policy_tokenizer, reward_tokenizer, ids, eos_ids):
    """One response (T ids) in the reward model's own tokens -> M ids, shares (T,M).   [ours]

    shares[t, m]: which part of token m's characters policy token t spells. `shares @ g` hands out each gradient once,
    and a policy token that is several tokens there gets their *sum*: the change of the score when all of them move.
    A policy token's span is what it adds to the text of the few tokens before it: linear in T, and right for joining
    spaces and split characters. The end token, which has no characters, stands for the reward model's end token.
    """
    text = lambda some: policy_tokenizer.decode(some, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    spelled = reward_tokenizer(text(ids), add_special_tokens=False, return_offsets_mapping=True)
    own, own_spans = spelled["input_ids"], spelled["offset_mapping"]
    length = [max(0, len(text(ids[max(0, t - 8):t + 1])) - len(text(ids[max(0, t - 8):t]))) for t in range(len(ids))]
    if ids[-1] in eos_ids and reward_tokenizer.eos_token_id is not None:
        own, own_spans = own + [reward_tokenizer.eos_token_id], own_spans + [(sum(length), sum(length) + 1)]
        length[-1] = 1
    length, (a, b) = torch.tensor(length)[:, None], torch.tensor(own_spans).view(-1, 2).T        # (T,1), (M,), (M,)
    end = length.cumsum(0)                                                  # (T,1)
    overlap = torch.minimum(end, b) - torch.maximum(end - length, a)        # (T,M) characters in common
    return own, overlap.clamp_min(0) / (b - a).clamp_min(1)


@torch.no_grad()
def vocabulary_embeddings(policy_tokenizer, reward_tokenizer, table, vocab_size, eos_ids):
    """The reward model's embedding of each token of the policy -> E (V,d), decodable (V,) bool or None.   [ours]

    table (M,d): the reward model's embeddings; vocab_size: V, the policy's number of logits. One vocabulary for both:
    its rows, None. Two: E[v] = mean of the rows of reward-tokenise(string(v)). Not decodable (E = 0) are then parts of
    a character, unused ids and special tokens, except that the policy's end tokens stand for the reward model's.
    """
    if policy_tokenizer.get_vocab() == reward_tokenizer.get_vocab():
        return torch.nn.functional.pad(table[:vocab_size], (0, 0, 0, max(0, vocab_size - len(table)))), None
    size, special = min(vocab_size, len(policy_tokenizer)), set(policy_tokenizer.all_special_ids)
    strings = policy_tokenizer.batch_decode([[v] for v in range(size)], clean_up_tokenization_spaces=False)
    strings = ["" if v in special or "\ufffd" in s else s for v, s in enumerate(strings)]
    pieces = reward_tokenizer(strings, add_special_tokens=False)["input_ids"] + [[]] * (vocab_size - size)
    for v in eos_ids:
        pieces[v] = [i for i in [reward_tokenizer.eos_token_id] if i is not None]
    counts = torch.tensor([len(x) for x in pieces], device=table.device)    # (V,)
    flat = torch.tensor([i for x in pieces for i in x], dtype=torch.long, device=table.device)
    E = torch.nn.functional.embedding_bag(flat, table, counts.cumsum(0) - counts, mode="mean")   # (V,d)
    return E, counts > 0


def load_reward_model(args):
    """(reward model, its tokenizer), frozen, from a hub id or folder; 'toy' and 'train:NAME' are trained once."""
    import transformers
    name = args.reward_model
    if name == "toy" or name.startswith("train:"):
        name = str(train_reward_model(args, name.removeprefix("train:")))
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=args.trust_remote_code)
        model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
            name, dtype=getattr(torch, args.dtype), output_loading_info=True, trust_remote_code=args.trust_remote_code)
    except Exception as error:  # as in load_policy
        raise InputError(f"--reward-model {name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from None
    if model.config.num_labels != 1 or report["missing_keys"]:  # a missing head would be random, without any error
        raise InputError(f"--reward-model {name}: needs a trained head with one label; 'train:{name}' trains one")
    rows, pad = model.get_input_embeddings().num_embeddings, model.config.get_text_config().pad_token_id
    if tokenizer.chat_template is None or pad is None or len(tokenizer) > rows:
        raise InputError(f"--reward-model {name}: needs a chat template, a pad_token_id and embeddings for all tokens")
    return freeze(model.eval().to(args.device)), tokenizer


def train_reward_model(args, name):
    """Grow a reward model from the causal LM `name` on right and slipped story answers -> checkpoint folder.   [ours]

    Bradley-Terry: minimise -log sigmoid(R(right) - R(slipped)), at every position: a slip is easier to learn where it
    stands (two slips may cancel: still slipped). In a quarter of the pairs one token is replaced by another token of the
    solution instead: a model that has seen nothing but wrong sums likes right sums about another story. (In 2 % of all
    pairs it is replaced by itself, and counts as ranked wrong.) The toy trains all weights, a real model its head: to try.
    """
    import transformers
    path = os.path.realpath(name) if os.path.isdir(name) else name  # the folder's own name is mostly "checkpoint"
    origin = "" if name == "toy" else f"-{zlib.crc32(repr((path, args.instruction, args.thinking, args.dtype)).encode()):x}"
    folder = Path(args.checkpoints, f"rm-{Path(name).name}-{args.story_steps}-{args.warmup_steps}-{args.reward_steps}{origin}")
    if folder.is_dir():
        return folder
    (policy, tokenizer), rng = load_policy(args, name), random.Random(0)
    torch.manual_seed(0)
    policy.config.num_labels, policy.config.pad_token_id = 1, tokenizer.pad_token_id
    model = transformers.AutoModelForSequenceClassification.from_config(policy.config).to(args.device).eval()
    model.base_model.load_state_dict(backbone(policy).state_dict())
    model.base_model.requires_grad_(is_toy(name))

    def pairs(problems):
        rows = []
        for problem in problems:
            prompt = chat_ids(tokenizer, problem["question"], args.instruction, args.thinking)
            right = slipped = problem["answer"]
            while slipped == right:
                slipped = story_solution(problem, rng, error=0.5)
            right, slipped = tokenizer([right, slipped], add_special_tokens=False)["input_ids"]
            if rng.random() < 0.25:
                slipped = right[:]
                slipped[rng.randrange(len(right))] = rng.choice(right)
            rows += [prompt + ids + [tokenizer.eos_token_id] for ids in (right, slipped)]
        return (x.to(args.device) for x in pad_right(rows, tokenizer.pad_token_id))              # (2B,L) ids, mask

    problems, size = story_problems(8192, 0, "train", args.story_steps), 64 if is_toy(name) else 8   # pairs in a step
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3, weight_decay=0.0)
    for _ in tqdm(range(args.reward_steps), desc="reward model"):
        ids, mask = pairs(rng.sample(problems, size))
        R = model.score(model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state)[..., 0]   # (2B,L)
        both = mask[::2] * mask[1::2]                                       # (B,L)
        loss = -(torch.nn.functional.logsigmoid(R[::2] - R[1::2]) * both).sum() / both.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        ids, mask = pairs(story_problems(128, 0, "test", args.story_steps))
        R = model(input_ids=ids, attention_mask=mask).logits[:, 0]          # (2B,) as it will be used: one score each
    print(f"reward model {folder}: ranks {(R[::2] > R[1::2]).float().mean():.3f} of the held-out pairs right")
    save_folder(folder, lambda path: (model.save_pretrained(path), tokenizer.save_pretrained(path)))
    return folder


def judge(reward_model, reward_tokenizer, policy_tokenizer, rollout, problems, args, eos_ids, same_tokens):
    """Score a rollout -> rewards (N,), gradients (N,T,d), scored (N,T): the tokens that the reward model saw.   [ours]

    Its input is its own chat template around the question, then the sampled ids: tokenised again, the text could split
    differently. What lies past its length limit is cut off. NaN: not a finite score, or no token of the response seen.
    """
    (N, T), device, config = rollout.completion_mask.shape, args.device, reward_model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or 10 ** 9
    prefixes = [chat_ids(reward_tokenizer, p["question"], args.instruction, args.thinking) for p in problems]
    inputs, shares = [], []
    for row, mask, group in zip(rollout.completion_ids.tolist(), rollout.completion_mask, rollout.group_ids.tolist()):
        ids = row[:int(mask.sum())]
        own, share = ids, torch.eye(len(ids))                               # (T_i,M) share of reward token m in token t
        if not same_tokens:
            own, share = respell(policy_tokenizer, reward_tokenizer, ids, eos_ids)
        own = own[:max(0, limit - len(prefixes[group]))]
        while own and own[-1] == config.pad_token_id:  # the end token pads too, and the model's pooling looks before it
            own = own[:-1]
        inputs.append((prefixes[group] + own)[:limit])
        shares.append(share[:, :len(own)].to(device))
    rewards, scored = torch.zeros(N), torch.zeros(N, T, device=device)
    gradients = torch.zeros(N, T, reward_model.get_input_embeddings().embedding_dim, device=device)
    for rows in torch.arange(N).split(args.micro_batch):
        ids, mask = (x.to(device) for x in pad_right([inputs[i] for i in rows], config.pad_token_id))    # (rows,L) each
        with autocast(mask.device), torch.no_grad():
            if args.lam:
                found, g = score_and_gradient(reward_model, ids, mask)      # (rows,), (rows,L,d)
            else:                                                           # no credit, no backward pass
                found, g = reward_model(input_ids=ids, attention_mask=mask).logits[:, 0], None
        rewards[rows] = found.float().cpu()
        for j, i in enumerate(rows.tolist()):
            n, m = shares[i].shape
            scored[i, :n] = (shares[i].sum(1) > 0).float()
            if args.lam:
                gradients[i, :n] = shares[i] @ g[j, len(inputs[i]) - m:len(inputs[i])]           # (T_i,M) @ (M,d)
    return rewards.where(rewards.isfinite() & (scored.sum(1) > 0).cpu(), torch.nan), gradients, scored


def train(args):
    """The whole algorithm. The six numbered steps are the same in every script, in the README and in the notebooks."""
    check_options(args)
    problems, held_out = load_problems(args)
    if args.eval_only:
        model, tokenizer = load_policy(args)
        print(evaluate(model, tokenizer, encode_prompts(tokenizer, held_out, args), args))
        return
    reward_model, reward_tokenizer = load_reward_model(args)
    run = Run(args, "datc")
    model, tokenizer = load_policy(args, run.model)
    reference = freeze(model if args.lora_rank else load_policy(args)[0]) if args.beta else None  # where training starts
    layer, eos_ids = reward_model.get_input_embeddings(), end_ids(model, tokenizer)
    table = layer(torch.arange(layer.num_embeddings, device=args.device)).float()           # (M,d) some layers scale it
    embeddings, decodable = vocabulary_embeddings(                                          # (V,d), (V,) or None
        tokenizer, reward_tokenizer, table, model.get_output_embeddings().weight.shape[0], eos_ids)
    model, optimizer = make_trainable(model, args)
    run.restore(model, optimizer)
    problems, held_out = encode_prompts(tokenizer, problems, args), encode_prompts(tokenizer, held_out, args)
    if run.step == 0:
        run.log(0, run.evaluate(0, model, tokenizer, held_out))

    for step in run.loop(model, tokenizer, optimizer):
        # 1. Sample: G responses for each prompt of the batch, N in all.
        batch = draw_batch(problems, step, args.prompts_per_step, args.seed)
        rollout = generate(model, tokenizer, [p["prompt_ids"] for p in batch], args.group_size, args)
        mask = rollout.completion_mask                                                      # (N,T)

        # 2. Reward: the reward model's score, and its gradient at each token. NaN: cannot be scored.
        rewards, gradients, scored = judge(                                                 # (N,), (N,T,d), (N,T)
            reward_model, reward_tokenizer, tokenizer, rollout, batch, args, eos_ids, decodable is None)
        accuracy = torch.tensor([float("nan") if r is None else float(r) for r in (
            reward_correct(text, batch[g]) for text, g in zip(rollout.texts, rollout.group_ids.tolist()))])  # (N,)

        # 3. Group advantage: better or worse than the other responses to the same prompt?
        advantages = group_advantages(rewards, rollout.group_ids.cpu(), args.scale).to(mask.device)  # (N,)

        # 4. Token credit: how much of its response's advantage does each token get?
        # The old policy's log-probs come from one scoring pass, not from the sampler, so that the ratio starts at exactly 1.
        old = score(model, rollout, args, want=("entropy", "hidden")[:1 + bool(args.lam)])  # logps, entropy (N,T)
        with adapter_off(model):
            ref_logps = score(reference, rollout, args).logps if reference else None        # (N,T)
        # ---- what this method changes ----
        weights = torch.ones_like(mask)                                                     # (N,T) w = 1
        credit_stats = {}
        if args.lam:
            W = work_from_hidden(                                                           # (N,T)
                old.hidden, model.get_output_embeddings(), gradients, embeddings, rollout.completion_ids, mask,
                temperature=args.temperature, chunk_size=args.chunk_size, decodable=decodable, top_k=args.top_k)
            weights = credit_weights(W, advantages, mask, args.lam, args.gate, scored=scored, control=args.control,
                                     seed=args.seed * 1_000_003 + step)                     # (N,T)
            with_reward = (W * advantages[:, None] > 0)[mask.bool()].float().mean().item()
            credit_stats = {"weight_std": weights[mask.bool()].std(correction=0).item(), "with_reward": with_reward}
        # ----------------------------------
        token_advantages = advantages[:, None] * weights                                    # (N,T) A * w

        # 5. Clipped loss and update. Mini-batches are optimiser steps; micro-batches only save memory.
        meter = Meter()
        for rows in list(torch.arange(len(mask)).tensor_split(args.mini_batches)) * args.inner_iterations:
            denominator, batch_loss = loss_denominator(mask[rows], args.aggregate, args.max_new_tokens), 0.0
            for micro in slices(rows, args.micro_batch):
                logps = token_logps(model, *rollout.rows(micro), temperature=args.temperature, chunk_size=args.chunk_size).logps
                loss, stats = clipped_kl_loss(
                    logps, old.logps[micro], ref_logps[micro] if reference else None, token_advantages[micro], mask[micro],
                    clip_low=args.clip_low, clip_high=args.clip_high, dual_clip=args.dual_clip, beta=args.beta, kl=args.kl,
                    aggregate=args.aggregate, max_len=args.max_new_tokens, denominator=denominator)
                loss.backward()
                batch_loss += loss.detach()
                meter.add(stats)
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            made = run.finite(batch_loss, grad_norm)
            if made:
                optimizer.step()
            optimizer.zero_grad()
            meter.add_update(batch_loss, grad_norm, made)

        # 6. Measure.
        row = {**step_metrics(step, rollout, rewards, accuracy, advantages, old.entropy, meter), **credit_stats}
        if run.evaluation_due(step):
            row.update(run.evaluate(step, model, tokenizer, held_out))
            picture(run.folder / "credit.png", tokenizer, rollout, rewards, weights)
        run.log(step, row)
    plot_curve(run.rows, run.folder / "curve.png")


if __name__ == "__main__":
    main(train, Args, TOY, __doc__)

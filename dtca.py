"""DTCA: denoising token credit assignment for masked diffusion models.

The idea. A diffusion model writes a response in steps; some of the tokens that it writes (a number, a verb) settle much
of what is still masked, others (a full stop) nothing. DTCA measures once, before training, how much each part of speech
adds to the confidence of the rest; tokens get credit in that proportion, on the steps with the hardest commits. Then a
calibration balances the tokens whose update raises the policy's entropy against those whose update lowers it.

    c_i    = max(0, sum over masked j != i of [ max_u p(u | x with i) - max_u p(u | x) ]_j)   measured before training
    w_pos  = min-max of the mean c of each class to [0.8, 1.2];   alpha_i = w_pos(i) / mean of w_pos over T_t
    T_t    = what step t wrote, up to the end token; p_i: the probability of y_i then;  S_t = sum over T_t of w_pos(i) (1 - p_i)
    chosen = the fewest t that hold 70 % of the sum of S_t, but at least 2 and at most 32
    d_i    = change of the entropy at i along A alpha_i;   lam = (N - P) / (N + P),   P, N: masses of d > 0 and d < 0
    w_i    = (1 + lam) alpha_i where d > 0, (1 - lam) alpha_i where d < 0, rescaled to the same total   (x: a state, A: advantage)
    L      = mean over responses of mean over their chosen t of mean over T_t of [ the clipped loss of grpo.py ]

What differs from grpo.py: the model and its sampler; a token is scored in the very state in which it was written, so
step 5 runs over states, a row per chosen step, instead of responses; in step 4 the weights above instead of 1.

Where it comes from. A public summary of the paper (its text could not be read): the contributions, the class weights, the
choice of steps, the calibration, the opefo estimate of d. Ours: what the targets of a step are, the exact d (the default),
the weights 1/|T_t| inside the calibration, and the base: std advantages, clip, beta, one update per rollout.
Its claims, to be checked: without credit gradient norms are larger (grad_norm, against a run of --no-credit), without
calibration the KL grows faster (kl, --no-calibration). Published, and not reproduced here: MATH500 39.8 / 43.2 / 44.0 at
length 128 / 256 / 512 (base 30.8 / 36.4 / 39.2), GSM8K 80.6 / 85.3 / 85.4 (base 75.3 / 83.2 / 82.9).

Run it on a CPU (a toy, no download; some minutes; what came out: README, "learning on the toy"):

    python dtca.py                                              all of it
    python dtca.py --pos-low 1 --pos-high 1 --no-calibration    the base: a plain step-selected loss

and on one GPU with a real checkpoint (needs a hub, and pip install spacy && python -m spacy download en_core_web_sm):

    python dtca.py --model dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1 --data openai/gsm8k:main --max-new-tokens 256
"""
import csv
import dataclasses
import json
import re
import statistics
from collections import Counter, namedtuple
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from common import (DiffusionArgs, InputError, Meter, Run, adapter_off, at_budget, chunked_logps, clipped_kl_loss, draw_batch,
                    encode_prompts, evaluate, freeze, generate, group_advantages, load_diffusion_policy, load_problems,
                    main, make_trainable, picture, places, plot_curve, plot_denoising, reward_correct, slices, step_metrics)


@dataclass
class Args(DiffusionArgs):
    """DTCA's own settings; defaults for real models. The toy's are in TOY below."""
    table: str | None = field(default=None, metadata={"help": "an earlier run's table.json; default: measure"})
    table_rollouts: int = field(default=128, metadata={"help": "responses to measure the table on (summary)"})
    tagger: str = field(default="en_core_web_sm", metadata={"help": "a spaCy model, or 'words': the toy's word list"})
    pos_low: float = field(default=0.8, metadata={"help": "weight of the class that contributes least (summary)"})
    pos_high: float = field(default=1.2, metadata={"help": "weight of the class that contributes most (summary)"})
    no_credit: bool = field(default=False, metadata={"help": "ablation: alpha = 1, the same steps"})
    step_mass: float = field(default=0.7, metadata={"help": "share of the scores that chosen steps reach (summary)"})
    min_steps: int = field(default=2, metadata={"help": "least steps to choose in a response (summary)"})
    max_steps: int = field(default=32, metadata={"help": "most steps to choose in a response (summary)"})
    estimator: str = field(default="exact", metadata={"help": "of the entropy change: exact (ours) or opefo (summary)"})
    no_calibration: bool = field(default=False, metadata={"help": "ablation: lam = 0"})
    scale: str = field(default="std", metadata={"help": "advantage divided by the group's 'std' (ours) or by 'none'"})
    clip_low: float = field(default=0.2, metadata={"help": "lower clip range (ours)"})
    clip_high: float = field(default=0.2, metadata={"help": "upper clip range (ours)"})
    dual_clip: float | None = field(default=None, metadata={"help": "c > 1 bounds the loss of bad tokens; off"})
    beta: float = field(default=0.01, metadata={"help": "weight of the KL to the starting model (ours); 0: none"})
    kl: str = field(default="k3", metadata={"help": "KL estimate in the loss: k3, k2 or k1, as in grpo.py"})
    inner_iterations: int = field(default=1, metadata={"help": "passes over a rollout batch (ours)"})
    mini_batches: int = field(default=1, metadata={"help": "optimiser steps in a pass; groups stay whole if it divides --prompts-per-step"})
    learning_rate: float = field(default=1e-6, metadata={"help": "AdamW, constant (ours)"})
    max_grad_norm: float = field(default=1.0, metadata={"help": "gradient clipping (usual)"})


# The toy is tiny and starts from random weights, so it takes larger steps on more samples.
TOY = dict(warmup_steps=1000, steps=40, prompts_per_step=64, max_new_tokens=24, inner_iterations=1, mini_batches=2,
           learning_rate=5e-4, micro_batch=512, sample_batch=4096, chunk_size=4096, eval_problems=128, eval_samples=8,
           tagger="words", table_rollouts=64)


def check_options(args):
    """Arguments that only this script has."""
    for name, allowed in (("scale", ("std", "none")), ("kl", ("k1", "k2", "k3")), ("estimator", ("exact", "opefo"))):
        if getattr(args, name) not in allowed:
            raise InputError(f"--{name} must be one of {', '.join(allowed)}, not {getattr(args, name)}")
    if not 0 < args.clip_low < 1 or args.clip_high <= 0 or args.beta < 0 or (args.dual_clip is not None and args.dual_clip <= 1):
        raise InputError("needs 0 < --clip-low < 1, --clip-high > 0, --beta >= 0 and --dual-clip > 1")
    if not 0 < args.pos_low <= args.pos_high:
        raise InputError("needs 0 < --pos-low <= --pos-high: a class of weight 0 would never be trained")
    if not 0 < args.step_mass <= 1 or not 1 <= args.min_steps <= args.max_steps or args.table_rollouts < 1:
        raise InputError("needs 0 < --step-mass <= 1, 1 <= --min-steps <= --max-steps and --table-rollouts >= 1")


# ---- the formulas ------------------------------------------------------------------------------------------

def contributions(lm, ids, attention_mask, masked, commits):
    """How much each candidate commit adds to the confidence at the other masked positions, each candidate alone.

        c_i = max(0, sum over j in M without i of [ max_u p(u | x with i)_j - max_u p(u | x)_j ]),   M: masked positions

    Args: lm: has mask_id, hidden(ids, attention_mask) -> (rows,L,H) and head(hidden) -> logits; ids (B,L): the finished
    sequences; attention_mask (B,L); masked (B,L) bool: what each state hides; commits (B,L) bool: the C candidates.
    Returns three (C,) vectors in the order of commits.nonzero(): c (probability, summed over positions) and, before the
    commit, the token's probability and the entropy there (nats). One forward of B + C rows, logits at masked positions.
    Raises ValueError when a candidate is not masked. Source: summary.
    """
    if (commits & ~masked).any():
        raise ValueError("a candidate commit must be a masked position of its state")
    row, place = commits.nonzero(as_tuple=True)                                           # (C,) each
    candidate = torch.arange(len(row), device=row.device)                                 # (C,)
    state = ids.masked_fill(masked, lm.mask_id)                                           # (B,L) x
    after, others = state[row], masked[row]                                               # (C,L) each
    after[candidate, place], others[candidate, place] = ids[row, place], False            # x with one commit; M without i
    hidden = lm.hidden(torch.cat([state, after]), torch.cat([attention_mask, attention_mask[row]]))  # (B+C,L,H)
    wanted = torch.cat([masked, others])                                                  # (B+C,L) bool
    top = lm.head(hidden[wanted]).softmax(-1).amax(-1)                                    # (K,) max_u p(u | .)
    top = torch.zeros(wanted.shape, dtype=top.dtype, device=top.device).masked_scatter(wanted, top)  # (B+C,L)
    gain = torch.where(others, top[len(ids):] - top[row], 0.0).sum(-1)                    # (C,)
    p = lm.head(hidden[row, place]).softmax(-1)                                           # (C,V) before the commit
    return gain.clamp(min=0), p.gather(-1, ids[row, place][:, None])[:, 0], torch.special.entr(p).sum(-1)


def pos_weights(means, low=0.8, high=1.2):
    """Mean contribution per part of speech -> weight per part of speech, by min-max to [low, high].

    means {class: mean}; all equal: 1 for each, since nothing tells them apart. A class seen once weighs as much as any
    other in the min-max: look at `count` and `se`. (A class that is not in the table gets 1 in train: ours.) Raises ValueError unless 0 < low <= high. Source: summary.

    >>> pos_weights({"NOUN": 2.0, "VERB": 3.0, "DET": 1.0})
    {'NOUN': 1.0, 'VERB': 1.2, 'DET': 0.8}
    """
    if not 0 < low <= high:
        raise ValueError(f"needs 0 < low <= high, not {low} and {high}")
    least, most = min(means.values(), default=0.0), max(means.values(), default=0.0)
    if most == least:
        return {name: 1.0 for name in means}
    return {name: low + (high - low) * (mean - least) / (most - least) for name, mean in means.items()}


def select_steps(scores, mass=0.7, low=2, high=32):
    """The fewest steps whose scores reach `mass` of the total: where the hard commits of a response are.

    scores: a number >= 0 per step; low, high: least and most steps (never more than there are). Of equal steps the
    earlier comes first. Returns their indices, ascending. Source: summary; the order of ties is ours.

    >>> select_steps([0.1, 0.5, 0.3, 0.2, 0.5]), select_steps([1, 0, 0, 0])      # 0.7 * 1.6 needs three; raised to two
    ([1, 2, 4], [0, 1])
    >>> select_steps([1, 2, 2], low=1, high=1)                                  # a tie, and one step at most
    [1]
    """
    order = sorted(range(len(scores)), key=lambda step: (-scores[step], step))
    needed, reached, count = mass * sum(scores) * (1 - 1e-9), 0.0, 0  # 1e-9: rounding must not cost a step
    while count < len(scores) and reached < needed:
        reached += scores[order[count]]
        count += 1
    return sorted(order[:min(max(count, low), high)])


def step_credit(weight, target):
    """alpha_i = w_pos(i) / mean of w_pos over the targets of the same step: mean 1 in each step -> (B,T), 0 elsewhere.

    weight (B,T): w_pos of each token; target (B,T) bool: T_t, one step per row. Source: summary.

    >>> step_credit(torch.tensor([[1.2, 0.8, 0.9]]), torch.tensor([[True, True, False]]))
    tensor([[1.2000, 0.8000, 0.0000]])
    """
    mean = (weight * target).sum(1, keepdim=True) / target.sum(1, keepdim=True).clamp(min=1)  # (B,1)
    return torch.where(target, weight / mean, 0.0)


def entropy_change(logits, actions, advantages, estimator="exact"):
    """How fast the entropy H of a token's distribution moves when its logits are pushed along A (onehot(y) - p).

        exact   d = -A [ p_y (log p_y + H) - sum_b p_b^2 (log p_b + H) ]     the derivative of H in that direction
        opefo   d = -A (1 - p_y)^2 (log p_y + H)     as the summary gives it: the sign is right for V = 2, not in general

    logits (...,V), -inf allowed (the mask token); actions (...) y; advantages (...) A, credit included. Returns (...), in
    nats per unit of step size, detached. Raises ValueError for other estimators. Source: opefo: summary; exact: ours.

    >>> z, y, A = torch.tensor([[0.5, 0.4, 0.1], [0.99, 0.01, 0.0]]).log(), torch.tensor([1, 1]), torch.tensor([1.0, 2.0])
    >>> entropy_change(z, y, A), entropy_change(z, y, A, "opefo")               # the signs differ in the first
    (tensor([0.0425, 0.1801]), tensor([-0.0097,  8.9173]))
    """
    if estimator not in ("exact", "opefo"):
        raise ValueError(f'estimator must be "exact" or "opefo", not {estimator!r}')
    log_p = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)  # (...,V)
    p, y = log_p.exp(), actions[..., None]                                                # (...,V), (...,1)
    H = torch.special.entr(p).sum(-1)                                                     # (...) entr(p) = -p log p
    log_p_y, others = log_p.gather(-1, y)[..., 0], p.scatter(-1, y, 0.0)                  # (...), (...,V)
    rest = others.sum(-1)                                                                 # (...) 1 - p_y, exact near 0
    if estimator == "opefo":
        return -advantages * rest ** 2 * (log_p_y + H)
    # The sum's term b = y goes to the first one: p_y (1 - p_y) instead of a difference of two nearly equal numbers.
    own = log_p_y.exp() * rest * (log_p_y + H)                                            # (...)
    return -advantages * (own - (others * (others * H[..., None] - torch.special.entr(others))).sum(-1))


def calibrate(alpha, change, clip=0.95, weights=None):
    """Balance one response's credit between tokens that raise the entropy and tokens that lower it -> (alpha'', lam).

        lam = clip((N - P) / (N + P), -clip, clip),  alpha' = (1 + lam) alpha where d > 0,  (1 - lam) alpha where d < 0

    so that, unclipped, (1 + lam) P = (1 - lam) N: to first order the entropy stays where it is. Then all tokens with
    d != 0 are rescaled to their old total, hence one sign alone changes nothing; d = 0 keeps its credit. At the clip the
    two sides do not balance, and a d of nearly 0 counts by its sign alone: d = (1, -1e-6) turns alpha (1, 1) into (.05, 1.95).

    Args: alpha (M,) > 0; change (M,): d for A alpha; weights (M,): what a token counts in the loss (1/|T_t|), in every
    sum, default 1. Returns alpha'' (M,) > 0 and lam (scalar). Raises ValueError unless 0 <= clip < 1: at 1 a side could
    lose all its credit. Source: summary; the weights are ours.

    >>> calibrate(torch.tensor([1.2, 0.8, 1.0]), torch.tensor([0.1, -0.3, 0.0]), weights=torch.tensor([1.0, 0.5, 1.0]))
    (tensor([1.3091, 0.5818, 1.0000]), tensor(0.2000))
    >>> calibrate(torch.tensor([1.2, 0.8]), torch.tensor([0.1, 0.3]))                   # one sign: clipped, and no change
    (tensor([1.2000, 0.8000]), tensor(-0.9500))
    """
    if not 0 <= clip < 1:
        raise ValueError(f"needs 0 <= clip < 1, not {clip}")
    weights = torch.ones_like(alpha) if weights is None else weights
    up, down = change > 0, change < 0                                                     # (M,) bool
    P, N = (weights * change)[up].sum(), -(weights * change)[down].sum()
    if not P + N > 0:
        return alpha.clone(), torch.zeros_like(P)
    lam = ((N - P) / (N + P)).clamp(-clip, clip)
    shifted, moved = torch.where(up, (1 + lam) * alpha, (1 - lam) * alpha), up | down     # (M,) alpha' where d != 0
    scale = (weights * alpha)[moved].sum() / (weights * shifted)[moved].sum()
    return torch.where(moved, scale * shifted, alpha), lam


# ---- parts of speech ---------------------------------------------------------------------------------------

# Universal tags of every word of the toy's stories: the toy needs no tagger. Numbers are NUM, any other word X.
WORD_TAGS = {word: name for name, words in {
    "PROPN": "Tom Anna Ben Mia", "NOUN": "apples books coins pens Answer answer", "ADJ": "many wrong",
    "VERB": "has buys finds gives loses starts Give", "ADV": "then How now", "ADP": "with", "DET": "a",
    "PUNCT": ". , ? :", "SYM": "+ - ="}.items() for word in words.split()}


def load_tagger(name):
    """(key, tag): tag turns texts into [(start, end, class)] per text; the key is the tagger's name and version.

    name: "words" or any installed spaCy model. Classes: universal tags and SPACE; anything else X. Raises InputError
    that says what to install.
    """
    if name == "words":
        known = lambda word: "NUM" if word.isdigit() else WORD_TAGS.get(word, "X")
        return "words 1", lambda texts: [[(*m.span(), known(m[0])) for m in re.finditer(r"\w+|[^\w\s]", text)]
                                         for text in texts]
    try:
        import spacy
        nlp = spacy.load(name, exclude=["parser", "ner", "lemmatizer"])  # tags need none of these
    except ImportError:
        raise InputError(f"--tagger {name} needs spaCy: pip install spacy && python -m spacy download {name}") from None
    except OSError:
        raise InputError(f"--tagger {name}: no such spaCy model; install it: python -m spacy download {name}") from None
    if not any(token.pos_ for token in nlp("It has two apples.")):
        raise InputError(f"--tagger {name}: gives no parts of speech; take a spaCy model that does, as en_core_web_sm")
    return (f"{name} {nlp.meta['version']}",
            lambda texts: [[(t.idx, t.idx + len(t), t.pos_ or "X") for t in doc] for doc in nlp.pipe(texts)])


def align_tags(spans, words):
    """Class of each token: that of the word whose characters it overlaps most, of equals the earlier; None without one.

    spans: (start, end) per token; words: (start, end, class), not overlapping. Source: summary.

    >>> align_tags([(0, 3), (3, 6), (6, 8)], [(0, 4, "NOUN"), (4, 6, "VERB")])
    ['NOUN', 'VERB', None]
    """
    owner = {place: word for word, (start, end, _) in enumerate(words) for place in range(start, end)}
    overlaps = [Counter(owner[place] for place in range(*span) if place in owner) for span in spans]
    return [words[overlap.most_common(1)[0][0]][2] if overlap else None for overlap in overlaps]


def tag_tokens(tokenizer, completion_ids, mask, tag, special_ids=()):
    """N lists of T classes. X: special tokens (the tokenizer's and special_ids), and what stands behind the end token.

    A token's characters are those by which it lengthens the decoded text, whatever the kind of tokenizer; one that adds
    none (later bytes of a character) takes the last. Blanks between words belong to none: a token of blanks is SPACE (ours).
    """
    special = {*tokenizer.all_special_ids, *special_ids}
    decode = lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    places = [[i for i, token in enumerate(ids[:int(length)]) if token not in special]
              for ids, length in zip(completion_ids.tolist(), mask.sum(1))]               # N lists: where there is text
    kept = [ids[row].tolist() for ids, row in zip(completion_ids, places)]
    texts = [decode(ids) for ids in kept]
    tags = [["X"] * completion_ids.shape[1] for _ in texts]
    for row, ids, text, words, out in zip(places, kept, texts, tag(texts), tags):
        ends = [0] + [len(decode(ids[:k + 1])) for k in range(len(ids))]
        spans = [(min(start, end - 1), end) for start, end in zip(ends, ends[1:])]
        for i, (start, end), name in zip(row, spans, align_tags(spans, words)):
            out[i] = name or ("SPACE" if text[start:end].isspace() else "X")
    return tags


# ---- the table: measured once, on the model that training starts from ----------------------------------------

TABLE_VERSION = 1  # of what is measured
STAGES = ("early", "middle", "late")
COLUMNS = {"count", "contribution", "se", *STAGES, "confidence", "entropy"}  # of class_table's rows


def measure_classes(lm, tokenizer, tag, prompts, args):
    """Sample a response per prompt, at most two commits per step, and replay it. Source: summary.

    Returns records (class, contribution, stage, confidence, entropy), one per valid token.
    """
    torch.manual_seed(args.seed)
    block = min(args.block_length, args.max_new_tokens)
    steps = args.max_new_tokens // block * ((block + 1) // 2)                             # half a block's length, rounded up
    exact = dataclasses.replace(args, diffusion_steps=steps, threshold=None, prefix_cache=False)
    rollout = generate(lm, tokenizer, prompts, 1, exact)
    mask, commit_step = rollout.completion_mask.bool(), rollout.trace.commit_step         # (N,T) each
    tags = tag_tokens(tokenizer, rollout.completion_ids, mask, tag, lm.eos_ids)
    records, steps, P = [], int(commit_step.max()) + 1, rollout.prompt_ids.shape[1]
    pieces = torch.arange(len(mask)).split(max(1, args.micro_batch // 3))                 # a state, two commits: 3 rows
    for rows, step in tqdm([(r, s) for r in pieces for s in range(steps)], desc="contributions", leave=False):
        ids = torch.cat([rollout.prompt_ids[rows], rollout.completion_ids[rows]], dim=1)  # (n,P+T)
        attention = F.pad(rollout.prompt_mask[rows], (0, mask.shape[1]), value=1)         # (n,P+T)
        masked = F.pad(commit_step[rows] >= step, (P, 0))                                 # (n,P+T) M
        commits = F.pad((commit_step[rows] == step) & mask[rows], (P, 0))                 # (n,P+T)
        with torch.no_grad():
            values = contributions(lm, ids, attention, masked, commits)                   # three (C,)
        for (n, i), c, p, H in zip(commits.nonzero().tolist(), *(v.tolist() for v in values)):
            records.append((tags[int(rows[n])][i - P], c, step * len(STAGES) // steps, p, H))
    return records


def class_table(records):
    """Records -> {class: row}, the largest contribution first.

    A row: count; mean contribution and its standard error (None for one token; tokens of a response are taken as
    independent, so it is a bit small); the share of the class written in each third of the steps; mean probability and
    entropy (nats) when written.

    >>> row = class_table([("NUM", 1.0, 0, 0.5, 0.7), ("NUM", 3.0, 2, 0.7, 0.5), ("DET", 0.0, 2, 1.0, 0.0)])["NUM"]
    >>> row["count"], row["contribution"], row["se"], row["early"], row["late"]
    (2, 2.0, 1.0, 0.5, 0.5)
    """
    table, mean = {}, lambda x: sum(x) / len(x)
    for name in {record[0] for record in records}:
        _, c, stage, p, H = zip(*(record for record in records if record[0] == name))
        n = len(c)
        table[name] = {"count": n, "contribution": mean(c), "se": statistics.stdev(c) / n ** 0.5 if n > 1 else None,
                       **{s: stage.count(k) / n for k, s in enumerate(STAGES)}, "confidence": mean(p), "entropy": mean(H)}
    return dict(sorted(table.items(), key=lambda row: -row[1]["contribution"]))


def load_table(path, key):
    """The rows of a saved table. Raises InputError if it is none, or is another model's, tagger's or version's."""
    try:
        saved = json.loads(Path(path).read_text(encoding="utf-8"))
        found, table = dict(saved["key"]), dict(saved["classes"])
        if not table or not all(row.keys() >= COLUMNS for row in table.values()):
            raise ValueError
        [float(row["contribution"]) for row in table.values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"--table {path}: not a table of this script; leave --table out to measure one") from None
    for what, value in key.items():
        if found.get(what) != value:
            raise InputError(f"--table {path} is for {what} {found.get(what)!r}, not {value!r}; leave --table out")
    return table


def report_classes(table, weights, folder):
    """The table on the screen, in classes.csv and as classes.png."""
    from matplotlib.figure import Figure  # without pyplot: a notebook's own pictures are left alone
    rows = [["class", "weight", *next(iter(table.values()))], *([k, weights[k], *r.values()] for k, r in table.items())]
    with open(folder / "classes.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    for row in rows:
        print("  ".join(f"{f'{v:.3g}' if isinstance(v, float) else str(v):>12}" for v in row))
    figure = Figure(figsize=(13, 0.3 * len(table) + 1.5))
    axes = figure.subplots(1, 3, sharey=True)
    for axis, keys in zip(axes, (("contribution",), STAGES, ("confidence", "entropy"))):
        for key in keys:
            error = [row["se"] or 0.0 for row in table.values()] if key == "contribution" else None
            axis.errorbar([row[key] for row in table.values()], list(table), xerr=error, fmt="o", label=key)
        axis.legend()
        axis.grid(alpha=0.3)
    axes[0].invert_yaxis()  # the largest contribution on top
    for axis, title in zip(axes, ("confidence added to the rest", "share of the class written", "when it is written")):
        axis.set_title(title)
    figure.savefig(folder / "classes.png", dpi=110, bbox_inches="tight")


# ---- the states that are trained ---------------------------------------------------------------------------

# One row per chosen step of a response, B in all. row (B,): its response; ids, attention (B,P+T): the prompt, and y with
# all that the step or a later one wrote masked; y (B,T); target (B,T) bool: T_t; divisor (B,T): on each target the number
# of steps chosen in the response. Given as the loss's mask (not 0/1 here: only its sum divides), it makes a row's divisor
# |T_t| times that number: the mean over targets, then over steps. count (B,): |T_t|, on the CPU.
States = namedtuple("States", "row ids attention y target divisor count")


def choose_states(rollout, weight, mask_id, mass, low, high):
    """States of the chosen steps: S_t = sum over valid i written at t of w_pos(i) (1 - p_i), then select_steps.

    weight (N,T): w_pos. A step that wrote only padding is no candidate. Source: summary; T_t = all that t wrote: ours.
    """
    commit_step, confidence, _ = rollout.trace                                            # (N,T) each
    valid, T = rollout.completion_mask.bool(), commit_step.shape[1]                       # (N,T)
    per_step = weight.new_zeros(len(weight), int(commit_step.max()) + 1)                  # (N,S)
    hardness = torch.where(valid, weight * (1 - confidence), 0.0)                         # (N,T)
    scores = per_step.scatter_add(1, commit_step, hardness).cpu()                         # (N,S) S_t
    candidates = (per_step.scatter_add(1, commit_step, valid.float()) > 0).cpu()          # (N,S)
    chosen = torch.zeros_like(candidates)                                                 # (N,S)
    for n, steps in enumerate(c.nonzero()[:, 0] for c in candidates):
        chosen[n, steps[select_steps(scores[n, steps].tolist(), mass, low, high)]] = True
    row, step = (x.to(weight.device) for x in chosen.nonzero(as_tuple=True))              # (B,) each
    y, written = rollout.completion_ids[row], commit_step[row]                            # (B,T) each
    ids = torch.cat([rollout.prompt_ids[row], y.masked_fill(written >= step[:, None], mask_id)], dim=1)  # (B,P+T)
    target = valid[row] & (written == step[:, None])                                      # (B,T) T_t
    attention = F.pad(rollout.prompt_mask[row], (0, T), value=1)                          # (B,P+T)
    return States(row, ids, attention, y, target, target * row.bincount()[row, None], target.sum(1).cpu())


def state_logps(lm, states, micro, chunk_size):
    """log p of the targets of some states -> logps (b,T), 0 elsewhere, and what lm.head reads there, hidden (m,H)."""
    _, ids, attention, y, target, _, count = (x[micro] for x in states)
    at = places(target, int(count.sum()))                                                 # (m,)
    hidden = lm.hidden(ids, attention)[:, -y.shape[1]:].flatten(0, 1)[at]                 # (m,H)
    logps, _ = chunked_logps(hidden, lm.head, y.flatten()[at], 1.0, chunk_size)           # (m,)
    return torch.zeros(y.numel(), device=logps.device).index_copy(0, at, logps).view(y.shape), hidden


@torch.no_grad()
def score_states(lm, states, args, advantages=None):
    """One pass over all states, no gradients -> logps (B,T) and, given advantages (B,T), the entropy change d (B,T)."""
    logps, change = [], []
    for micro in torch.arange(len(states.row)).split(args.micro_batch):
        part, hidden = state_logps(lm, states, micro, args.chunk_size)                    # (b,T), (m,H)
        logps.append(part)
        if advantages is not None:
            y, A = (x[micro][states.target[micro]] for x in (states.y, advantages))       # (m,) each
            chunks = zip(*(x.split(args.chunk_size) for x in (hidden, y, A)))
            change += [entropy_change(lm.head(h), y, A, args.estimator) for h, y, A in chunks]
    logps = torch.cat(logps)                                                              # (B,T)
    return logps, torch.zeros_like(logps).masked_scatter(states.target, torch.cat(change)) if change else None


def train(args):
    """The whole algorithm. The six numbered steps are the same in every script, in the README and in the notebooks."""
    check_options(args)
    problems, held_out = load_problems(args)
    if args.eval_only:
        lm, tokenizer = load_diffusion_policy(args)
        for at in (args, *(at_budget(args, budget) for budget in args.eval_budgets)):
            print(at.max_new_tokens, "tokens:", evaluate(lm, tokenizer, encode_prompts(tokenizer, held_out, at), at))
        return
    tagger, tag = load_tagger(args.tagger)
    grown = f", {args.story_steps} steps, warm start {args.warmup_steps}" if args.model == "toy" else ""
    key = {"version": TABLE_VERSION, "model": args.model + grown, "tagger": tagger}
    table = load_table(args.table, key) if args.table else None
    run = Run(args, "dtca")
    lm, tokenizer = load_diffusion_policy(args, run.model)
    reference = (lm if args.lora_rank else load_diffusion_policy(args)[0]) if args.beta else None  # where training starts
    if reference:
        freeze(reference.model)
    lm.model, optimizer = make_trainable(lm.model, args)
    run.restore(lm.model, optimizer)
    problems, held_out = encode_prompts(tokenizer, problems, args), encode_prompts(tokenizer, held_out, args)
    if run.step == 0:
        prompts = [p["prompt_ids"] for p in draw_batch(problems, 1, args.table_rollouts, args.seed)]
        table = table or class_table(measure_classes(lm, tokenizer, tag, prompts, args))
        (run.folder / "table.json").write_text(json.dumps({"key": key, "classes": table}, indent=1))
        run.log(0, run.evaluate(0, lm, tokenizer, held_out))
    table = load_table(run.folder / "table.json", key)
    w_pos = pos_weights({name: row["contribution"] for name, row in table.items()}, args.pos_low, args.pos_high)
    report_classes(table, w_pos, run.folder)

    for step in run.loop(lm.model, tokenizer, optimizer):
        # 1. Sample: G responses for each prompt of the batch, N in all.
        batch = draw_batch(problems, step, args.prompts_per_step, args.seed)
        rollout = generate(lm, tokenizer, [p["prompt_ids"] for p in batch], args.group_size, args)
        mask = rollout.completion_mask                                                      # (N,T)

        # 2. Reward: one number per response, from its text and its problem. NaN: cannot be scored.
        rewards = torch.tensor([float("nan") if r is None else float(r) for r in (
            reward_correct(text, batch[g]) for text, g in zip(rollout.texts, rollout.group_ids.tolist()))])  # (N,)
        accuracy = rewards                                                                  # (N,) what the run is judged by

        # 3. Group advantage: better or worse than the other responses to the same prompt?
        advantages = group_advantages(rewards, rollout.group_ids.cpu(), args.scale).to(mask.device)  # (N,)

        # 4. Token credit: how much of its response's advantage does each token get?
        surprise = -rollout.trace.confidence.log() * mask                                   # (N,T) a low guess at entropy
        # ---- what this method changes ----
        tags = tag_tokens(tokenizer, rollout.completion_ids, mask, tag, lm.eos_ids)         # N lists of T classes
        pos = torch.tensor([[w_pos.get(name, 1.0) for name in row] for row in tags], device=mask.device)  # (N,T)
        states = choose_states(rollout, pos, lm.mask_id, args.step_mass, args.min_steps, args.max_steps)  # B rows
        alpha = states.target.float() if args.no_credit else step_credit(pos[states.row], states.target)  # (B,T)
        # The old policy's log-probs come from one scoring pass, not from the sampler, so that the ratio starts at exactly 1.
        A = advantages[states.row, None]                                                    # (B,1)
        old, change = score_states(lm, states, args, A * alpha)                             # (B,T) each
        with adapter_off(lm):
            ref_logps = score_states(reference, states, args)[0] if reference else None     # (B,T)
        weights, lam = alpha.clone(), torch.zeros_like(advantages)                          # (B,T) w = alpha'', (N,)
        share = 1 / states.target.sum(1, keepdim=True).expand_as(alpha)                     # (B,T) 1/|T_t|
        for n in range(0 if args.no_calibration else len(mask)):
            own = states.target & (states.row == n)[:, None]                                # (B,T) response n's targets
            weights[own], lam[n] = calibrate(alpha[own], change[own], weights=share[own])
        credit_stats = {"chosen_steps": len(alpha) / len(mask), "trained_tokens": (states.target.sum() / mask.sum()).item(),
                        "lam": lam.abs().mean().item(), "clipped": (lam.abs() > 0.949).float().mean().item(),
                        "largest_credit": weights.max().item()}
        # ----------------------------------
        token_advantages = A * weights                                                      # (B,T) A * w

        # 5. Clipped loss and update. Mini-batches are optimiser steps; micro-batches only save memory.
        meter = Meter()
        for rows in list(torch.arange(len(mask)).tensor_split(args.mini_batches)) * args.inner_iterations:
            denominator, batch_loss = len(rows), 0.0                                        # each response has a chosen step
            for micro in slices(torch.isin(states.row.cpu(), rows).nonzero()[:, 0], args.micro_batch):
                logps, _ = state_logps(lm, states, micro, args.chunk_size)                  # (b,T)
                loss, stats = clipped_kl_loss(
                    logps, old[micro], ref_logps[micro] if reference else None, token_advantages[micro], states.divisor[micro],
                    clip_low=args.clip_low, clip_high=args.clip_high, dual_clip=args.dual_clip, beta=args.beta, kl=args.kl,
                    aggregate="sequence", denominator=denominator)
                loss.backward()
                batch_loss += loss.detach()
                meter.add(stats)
            grad_norm = torch.nn.utils.clip_grad_norm_(lm.model.parameters(), args.max_grad_norm)
            made = run.finite(batch_loss, grad_norm)
            if made:
                optimizer.step()
            optimizer.zero_grad()
            meter.add_update(batch_loss, grad_norm, made)

        # 6. Measure.
        row = {**step_metrics(step, rollout, rewards, accuracy, advantages, surprise, meter), **credit_stats}
        if run.evaluation_due(step):
            row.update(run.evaluate(step, lm, tokenizer, held_out))
            shown = torch.zeros_like(mask).index_add(0, states.row, weights)                # (N,T) 0: not trained
            picture(run.folder / "credit.png", tokenizer, rollout, rewards, shown)
            n = int(mask[0].sum())  # of the first response
            tokens = [tokenizer.decode([t]) for t in rollout.completion_ids[0, :n].tolist()]
            commit_step, C = rollout.trace.commit_step[0, :n], rollout.trace.C[:, 0, :n]     # (n,), (S,n)
            plot_denoising(run.folder / "denoising.png", tokens, commit_step, C)
        run.log(step, row)
    plot_curve(run.rows, run.folder / "curve.png")


if __name__ == "__main__":
    main(train, Args, TOY, __doc__)

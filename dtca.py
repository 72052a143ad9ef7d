"""DTCA: of the tokens that a diffusion model commits, which ones made the others easier?

**The idea.** A masked diffusion model writes a response in any order: each denoising step commits a few tokens, and some
commits (a number, a verb) settle much of what is still masked, others (a full stop) settle nothing. DTCA measures once,
before training, how much each *part of speech* adds to the confidence of the rest, and gives tokens credit in that
proportion, on the steps where hard commits happen. A calibration then balances the tokens that would raise the policy's
entropy against those that would lower it, so that sharper credit does not make the policy collapse or drift.

**The equation**, for a token i of class pos(i) that step t commits (T_t: all the tokens it commits):

    c_i      = max(0, sum over masked j != i of  [ max_u p(u | x with i) - max_u p(u | x) ]_j )     measured offline
    w_pos    = min-max of the mean c of each class, to [0.8, 1.2]           alpha_i = w_pos(i) / mean of w_pos over T_t
    d_i      = change of the entropy at i along the update alpha_i A        lam = (N - P) / (N + P),  P, N: sums of d > 0, d < 0
    alpha''  = alpha (1 + lam) where d > 0, alpha (1 - lam) where d < 0,    rescaled to the same total
    L        = mean over responses of the mean over chosen steps of the mean over T_t of [ clipped loss with alpha'' A ]
"""
import csv
import json
import math
import re
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from common import InputError, completion_mask, pad_left, sample_diffusion


# ------------------------------------------------------------------------------------------ the method's pure functions

def contributions(lm, ids, attention_mask, masked, commits):
    """What each candidate commit does to the confidence of the other masked positions, each candidate evaluated alone.

    ``c_i = max(0, sum over j in M without i of (max_u p(u | x with i)_j - max_u p(u | x)_j))``, M the masked positions.

    lm: anything with ``mask_id`` and ``logits(ids, attention_mask) -> (rows,L,V)``. ids: (B,L) the finished sequences.
    attention_mask: (B,L) or None. masked: (B,L) bool, what is still hidden in each state. commits: (B,L) bool, the
    candidates, a part of masked. One forward of B + C rows, C = commits.sum(); split B if that is too many.
    Returns three (C,) vectors in the order of ``commits.nonzero()``: the contribution (in units of probability, summed
    over positions), and, from the state before the commit, the probability of the token and the entropy (nats) there.
    Raises ValueError when a candidate is not masked. Source: public summary.
    """
    if (commits & ~masked).any():
        raise ValueError("a candidate commit must be a masked position of its state")
    row, position = commits.nonzero(as_tuple=True)                                     # (C,) each
    state = ids.masked_fill(masked, lm.mask_id)                                        # (B,L)    x
    after = state[row]                                                                 # (C,L)    x with i := y_i ...
    after[torch.arange(len(row)), position] = ids[row, position]                       #          ... one commit per row
    attention = None if attention_mask is None else torch.cat([attention_mask, attention_mask[row]])
    p = lm.logits(torch.cat([state, after]), attention).float().softmax(-1)            # (B+C,L,V)
    top, before = p.amax(-1), p[row, position]                                         # (B+C,L) and (C,V)
    others = masked[row]                                                               # (C,L)    M without i
    others[torch.arange(len(row)), position] = False
    gain = torch.where(others, top[len(ids):] - top[row], 0.0).sum(-1)                 # (C,)
    confidence = before.gather(-1, ids[row, position].unsqueeze(-1)).squeeze(-1)       # (C,)     p(y_i | x)
    return gain.clamp(min=0), confidence, torch.special.entr(before).sum(-1)


def pos_weights(means, low=0.8, high=1.2):
    """Mean contribution per part-of-speech class -> weight per class, by min-max to [low, high].

    means: {class: mean contribution}. Returns {class: weight}; 1 for every class when all means are equal, since nothing
    tells them apart. A class that is not in `means` is for the caller to treat as 1 (ours).
    Raises ValueError unless 0 < low <= high: a weight of 0 would silence a class. Source: public summary.

    >>> pos_weights({"NOUN": 2.0, "VERB": 3.0, "DET": 1.0})
    {'NOUN': 1.0, 'VERB': 1.2, 'DET': 0.8}
    """
    if not 0 < low <= high:
        raise ValueError(f"the weights must satisfy 0 < low <= high, got low={low}, high={high}")
    least, most = min(means.values(), default=0.0), max(means.values(), default=0.0)
    if most == least:
        return {name: 1.0 for name in means}
    return {name: low + (high - low) * (mean - least) / (most - least) for name, mean in means.items()}


def select_steps(scores, mass=0.7, low=2, high=32):
    """The fewest steps whose scores add up to `mass` of the total: where the hard commits of a response happen.

    scores: one non-negative number per step that committed a valid token. low, high: least and most steps to choose (never
    more than there are). Steps of equal score: the earlier first. Returns their indices in ascending order.
    Source: public summary; the order of ties is ours.

    >>> select_steps([0.1, 0.9, 0.3, 0.2, 0.9]), select_steps([1, 0, 0, 0])      # the second: raised to two steps
    ([1, 4], [0, 1])
    """
    order = sorted(range(len(scores)), key=lambda step: (-scores[step], step))
    needed, reached, count = mass * sum(scores) * (1 - 1e-9), 0.0, 0     # 1e-9: rounding must not cost a step
    while count < len(scores) and reached < needed:
        reached += scores[order[count]]
        count += 1
    return sorted(order[:min(max(count, low), high)])


def entropy_change(logits, actions, advantages, estimator="exact"):
    """How fast the entropy H of a token's distribution moves when the update pushes its logits along A (onehot(y) - p).

    ``exact``:  ``d = -A [ p_y (log p_y + H) - sum_b p_b^2 (log p_b + H) ]``, the derivative of H in that direction.
    ``opefo``:  ``d = -A (1 - p_y)^2 (log p_y + H)``, a proxy from y's own change alone: its sign is right for two
    tokens, not in general.

    logits: (...,V); -inf is allowed (the mask token). actions: (...) the tokens y. advantages: (...) A of each token,
    credit included. Returns (...) in nats per unit of step size, detached.
    Raises ValueError for an unknown estimator. Source: opefo is the public summary's, exact is ours.

    >>> entropy_change(torch.tensor([[0.8, 0.2], [0.99, 0.01]]).log(), torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
    tensor([-0.0887,  0.1801])
    """
    if estimator not in ("exact", "opefo"):
        raise ValueError(f"unknown estimator {estimator!r}: exact or opefo")
    log_p = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)     # (...,V)
    p, y = log_p.exp(), actions.unsqueeze(-1)                                                        # (...,V) and (...,1)
    H = torch.special.entr(p).sum(-1)                        # (...)    entr(p) = -p log p, 0 at p = 0
    log_p_y, others = log_p.gather(-1, y).squeeze(-1), p.scatter(-1, y, 0.0)                         # (...) and (...,V)
    rest = others.sum(-1)                                    # (...)    1 - p_y, with its digits kept when p_y is near 1
    if estimator == "opefo":
        return -advantages * rest ** 2 * (log_p_y + H)
    # The term b = y of the sum is taken to the first one: p_y (1 - p_y), again without subtracting two near-equal numbers.
    first = log_p_y.exp() * rest * (log_p_y + H)                                                     # (...)
    second = (others * (others * H.unsqueeze(-1) - torch.special.entr(others))).sum(-1)              # (...)
    return -advantages * (first - second)


def calibrate(alpha, change, clip=0.95, weights=None):
    """Balance one response's credit between the tokens that raise the entropy and those that lower it.

    With P and N the masses of d > 0 and d < 0, ``lam = clip((N - P) / (N + P), -clip, clip)`` scales the first side by
    1 + lam and the second by 1 - lam: without the clip (1+lam) P = (1-lam) N, the entropy stays where it is to first
    order. Then all the moved tokens are rescaled together, so that the response keeps its total credit.

    alpha: (M,) positive credit of one response's tokens. change: (M,) their d of `entropy_change`, for alpha * A.
    weights: (M,) what each token counts in the loss (1/|T_t|); it enters every sum; None: all 1.
    Returns (alpha'' (M,) positive, lam scalar). Tokens with d = 0 keep their credit; all d of one sign: nothing changes,
    because there is nothing to balance against. Raises ValueError unless 0 <= clip < 1 (at 1 a side would lose
    all its credit). Source: public summary; the weights are ours.

    >>> credit, lam = calibrate(torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.1, -0.3, 0.0]))
    >>> credit, round(float(lam), 4)               # lam = (0.3 - 0.1) / 0.4;  1.5 * 0.1 = 0.5 * 0.3
    (tensor([1.5000, 0.5000, 1.0000]), 0.5)
    """
    if not 0 <= clip < 1:
        raise ValueError(f"clip must be in [0, 1), got {clip}")
    weights = torch.ones_like(alpha) if weights is None else weights
    up, down = change > 0, change < 0                                                  # (M,) bool each
    P, N = (weights * change)[up].sum(), -(weights * change)[down].sum()
    if not P + N > 0:
        return alpha.clone(), torch.zeros_like(P)
    lam = ((N - P) / (N + P)).clamp(-clip, clip)
    shifted = torch.where(up, (1 + lam) * alpha, (1 - lam) * alpha)                    # (M,)     alpha', where d != 0
    moved = up | down
    scale = (weights * alpha)[moved].sum() / (weights * shifted)[moved].sum()
    return torch.where(moved, scale * shifted, alpha), lam


def choose_targets(weight, confidence, commit_step, mask, mass=0.7, low=2, high=32):
    """Which tokens a rollout is trained on: those that the chosen steps of each response committed.

    ``S_t = sum over valid i committed at t of w_pos(i) (1 - p_i)``, then `select_steps` per response. A step that committed only
    padding is no candidate.

    weight: (N,T) w_pos. confidence: (N,T) p_i at commitment. commit_step: (N,T) int >= 0. mask: (N,T), 1 on valid tokens.
    mass, low, high: see `select_steps`. Returns (N,T) bool. Source: public summary.
    """
    valid = mask.bool()                                                                # (N,T)
    per_step = weight.new_zeros(len(weight), int(commit_step.max()) + 1)               # (N,S)
    scores = per_step.scatter_add(1, commit_step, torch.where(valid, weight * (1 - confidence), 0.0))    # (N,S)   S_t
    candidate = per_step.scatter_add(1, commit_step, valid.to(weight.dtype)) > 0       # (N,S)
    chosen = torch.zeros_like(candidate)                                               # (N,S)
    for n, steps in enumerate(row.nonzero()[:, 0] for row in candidate):
        chosen[n, steps[select_steps(scores[n, steps].tolist(), mass, low, high)]] = True
    return valid & chosen.gather(1, commit_step)


def step_credit(weight, commit_step, targets):
    """Credit of the tokens that one step commits together: their class weights, divided by the step's mean.

    weight: (N,T) w_pos of each token. commit_step: (N,T) int >= 0, the step that committed it. targets: (N,T) bool, the
    tokens of the chosen steps. Returns (alpha (N,T) with mean 1 over each step's targets, share (N,T) = 1/|T_t|), both 0
    where there is no target. Source: public summary; that T_t are the tokens committed at t is ours.

    >>> alpha, share = step_credit(torch.tensor([[1.2, 0.8, 0.9]]), torch.tensor([[0, 0, 1]]), torch.ones(1, 3).bool())
    >>> alpha, share
    (tensor([[1.2000, 0.8000, 1.0000]]), tensor([[0.5000, 0.5000, 1.0000]]))
    """
    inside = targets.to(weight.dtype)                                                  # (N,T)
    per_step = weight.new_zeros(len(weight), int(commit_step.max()) + 1)               # (N,S)
    count = per_step.scatter_add(1, commit_step, inside).gather(1, commit_step).clamp(min=1)             # (N,T)   |T_t|
    mean = per_step.scatter_add(1, commit_step, weight * inside).gather(1, commit_step) / count          # (N,T)
    return torch.where(targets, weight / mean, 0.0), inside / count


def align_tags(spans, words):
    """Class of each sub-word token: that of the word whose characters it overlaps most (the earlier one if equal).

    spans: [(start, end)] in characters, one per token. words: [(start, end, class)], not overlapping. Returns one class
    per token, None where a token overlaps no word. Source: public summary.

    >>> align_tags([(0, 3), (3, 6), (6, 8)], [(0, 4, "NOUN"), (4, 6, "VERB")])
    ['NOUN', 'VERB', None]
    """
    owner = {place: word for word, (start, end, _) in enumerate(words) for place in range(start, end)}
    overlaps = [Counter(owner[place] for place in range(*span) if place in owner) for span in spans]
    return [words[overlap.most_common(1)[0][0]][2] if overlap else None for overlap in overlaps]


# ------------------------------------------------------------------------------------------ parts of speech

# Universal tags of every word of the toy's stories, so that the toy needs no tagger. Numbers are NUM, any other word X.
WORD_TAGS = {word: name for name, words in {
    "PROPN": "Tom Anna Ben Mia", "NOUN": "apples books coins pens Answer answer", "ADJ": "many wrong",
    "VERB": "has buys finds gives loses starts Give", "ADV": "then How now", "ADP": "with", "DET": "a",
    "PUNCT": ". , ? :", "SYM": "+ - ="}.items() for word in words.split()}


def load_tagger(name):
    """(key, tag): tag maps texts to [(start, end, class)] per text, class a universal part of speech, SPACE or X.

    name: "words" for the toy's list, else the name or folder of any installed spaCy model. The key names the tagger with
    its version, since another tagger's classes are other classes. Raises InputError saying what to install.
    """
    if name == "words":
        known = lambda word: "NUM" if word.isdigit() else WORD_TAGS.get(word, "X")
        return "words 1", lambda texts: [[(m.start(), m.end(), known(m.group())) for m in re.finditer(r"\w+|[^\w\s]", text)]
                                         for text in texts]
    try:
        import spacy
        nlp = spacy.load(name, exclude=["parser", "ner", "lemmatizer"])              # tags need none of the three
    except ImportError:
        raise InputError(f"--tagger {name} needs spaCy: pip install spacy && python -m spacy download en_core_web_sm "
                         "(or --tagger words, which knows the toy's words only)") from None
    except OSError:
        raise InputError(f"--tagger {name}: spaCy finds no such model; python -m spacy download {name}, or name one that "
                         "`pip list` shows") from None
    if not any(token.pos_ for token in nlp("It has two apples.")):
        raise InputError(f"--tagger {name}: this spaCy model gives no parts of speech; take one with a tagger, as en_core_web_sm")
    return (f"{name} {nlp.meta['version']}",
            lambda texts: [[(t.idx, t.idx + len(t), t.pos_ or "X") for t in doc] for doc in nlp.pipe(texts)])


def tag_tokens(tokenizer, completion_ids, mask, tag, special_ids=()):
    """Class of every completion token: N lists of T names. X: special tokens (those of the tokenizer and `special_ids`)
    and what lies behind the end token.

    A token's characters are what it adds to the decoded text of the tokens before it, which is right for every kind of tokenizer;
    a token that adds none (the later bytes of one character) takes the last character. Blanks between two words belong to
    no word of a tagger: a token of blanks alone is SPACE (ours).
    """
    special, rows, texts = {*tokenizer.all_special_ids, *special_ids}, [], []
    decode = lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    for ids, valid in zip(completion_ids.tolist(), mask.tolist()):
        places = [i for i, token in enumerate(ids) if valid[i] and token not in special]
        ends = [0] + [len(decode([ids[i] for i in places[:k + 1]])) for k in range(len(places))]
        rows.append((places, [(min(start, end - 1), end) for start, end in zip(ends, ends[1:])]))
        texts.append(decode([ids[i] for i in places]))
    tags = [["X"] * completion_ids.shape[1] for _ in rows]                            # N lists of T
    for n, ((places, spans), text, words) in enumerate(zip(rows, texts, tag(texts))):
        for i, (start, end), name in zip(places, spans, align_tags(spans, words)):
            tags[n][i] = name or ("SPACE" if text[start:end].isspace() else "X")
    return tags


# ------------------------------------------------------------------------------------------ the offline table

TABLE_VERSION = 1      # of what is measured; a table of another version is refused
STAGES = ("early", "middle", "late")


def measure_classes(lm, tokenizer, tag, prompts, args):
    """Sample one response per prompt, two commits per step, and replay it: what did each commit do, class by class?

    Returns the records (class, contribution, stage 0-2, confidence, entropy), one per valid token. Source: public summary.
    """
    records, steps = [], args.gen_length // 2
    with tqdm(total=len(prompts) * steps, desc="contribution of each part of speech", leave=False) as bar, torch.no_grad():
        for start in range(0, len(prompts), args.micro_batch):
            batch = prompts[start:start + args.micro_batch]
            prompt_ids, prompt_mask = pad_left(batch, lm.mask_id)                      # (B,P) each
            y, trace = sample_diffusion(lm, prompt_ids, prompt_mask, gen_length=args.gen_length, steps=steps,
                                        block_length=args.block_length, temperature=args.temperature, seed=args.seed + start)
            mask = completion_mask(y, lm.eos_ids)                                      # (B,T)
            tags = tag_tokens(tokenizer, y, mask, tag, lm.eos_ids)
            ids = torch.cat([prompt_ids, y], dim=1)                                    # (B,P+T)
            attention = torch.cat([prompt_mask, torch.ones_like(y)], dim=1)            # (B,P+T)   masks are seen, too
            P = prompt_ids.shape[1]
            for step in range(steps):
                masked = F.pad(trace.commit_step >= step, (P, 0))                      # (B,P+T)   M: not committed before
                commits = F.pad((trace.commit_step == step) & mask.bool(), (P, 0))     # (B,P+T)
                values = contributions(lm, ids, attention, masked, commits)            # three (C,)
                for (n, i), c, p, H in zip(commits.nonzero().tolist(), *(v.tolist() for v in values)):
                    records.append((tags[n][i - P], c, step * len(STAGES) // steps, p, H))
                bar.update(len(batch))
    return records


def class_table(records):
    """Records -> {class: its row}, the largest mean contribution first.

    A row: count; contribution (mean) and its standard error se (None for one token; tokens of one response are taken as
    independent, so it is a little too small); early, middle, late: the share of the class's tokens that each third of
    the steps committed; confidence (mean probability) and entropy (nats) at commitment.

    >>> class_table([("NUM", 1.0, 0, 0.5, 0.7), ("NUM", 3.0, 2, 0.7, 0.5), ("DET", 0.0, 2, 1.0, 0.0)])["NUM"]
    {'count': 2, 'contribution': 2.0, 'se': 1.0, 'early': 0.5, 'middle': 0.0, 'late': 0.5, 'confidence': 0.6, 'entropy': 0.6}
    """
    table = {}
    for name in {record[0] for record in records}:
        _, c, stage, p, H = zip(*(record for record in records if record[0] == name))
        n, mean = len(c), sum(c) / len(c)
        se = math.sqrt(sum((x - mean) ** 2 for x in c) / (n - 1) / n) if n > 1 else None
        table[name] = {"count": n, "contribution": mean, "se": se, **{s: stage.count(k) / n for k, s in enumerate(STAGES)},
                       "confidence": sum(p) / n, "entropy": sum(H) / n}
    return dict(sorted(table.items(), key=lambda row: -row[1]["contribution"]))


def load_table(path, key):
    """The classes of a saved table. Raises InputError when it is none, or was measured with another model or tagger."""
    try:
        saved = json.loads(Path(path).read_text(encoding="utf-8"))
        found, classes = saved["key"], saved["classes"]
        assert all(isinstance(row["contribution"], float) for row in classes.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError):
        raise InputError(f"--table {path}: no table of this script; leave --table out to measure one") from None
    for what, value in key.items():
        if found.get(what) != value:
            raise InputError(f"--table {path} is for {what} {found.get(what)!r}, this run has {value!r}; leave --table out "
                             "to measure a new one")
    return classes

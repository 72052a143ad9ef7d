"""DATC against golden numbers, autograd, enumeration, finite differences, and the plain slow version; then its run."""
import csv
import doctest
import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (BertConfig, BertForSequenceClassification, GPT2Config, GPT2ForSequenceClassification,
                          PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification)

import common
import datc
import grpo
from conftest import WARMUP, golden


def case(seed, n=3, t=6, v=8, d=4, dtype=torch.float64, scale=2.0):
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=dtype)
    return scale * rand(n, t, v), rand(n, t, d), rand(v, d), torch.randint(v, (n, t), generator=g)


def test_doctests():
    assert doctest.testmod(datc).failed == 0


# ---- the work -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("c", golden("datc"), ids=lambda c: f"{c['gate']}-{c['lam']}")
def test_golden(c):
    tensor = lambda key: torch.tensor(c[key], dtype=torch.float64)
    w = datc.work(tensor("logits"), tensor("gradients"), tensor("embeddings"), torch.tensor(c["actions"]))
    torch.testing.assert_close(w, tensor("work"), atol=1e-7, rtol=0)
    got = datc.credit_weights(w, tensor("advantages"), tensor("mask"), lam=c["lam"], gate=c["gate"])
    torch.testing.assert_close(got, tensor("want"), atol=1e-7, rtol=0)


@pytest.mark.parametrize("seed", range(5))
def test_work_is_the_directional_derivative_of_the_score(seed):
    z, g, E, y = case(seed)
    z.requires_grad_()
    expected_score = (g * (z.softmax(-1) @ E)).sum()                       # g . (softmax(z) E)
    (force,) = torch.autograd.grad(expected_score, z)
    s = torch.nn.functional.one_hot(y, z.shape[-1]) - z.softmax(-1)
    torch.testing.assert_close(datc.work(z, g, E, y), (force * s).sum(-1).detach())


def test_expected_work_under_the_policy_is_zero():
    z, g, E, _ = case(0, n=2, t=3, v=7)
    every = torch.stack([datc.work(z, g, E, torch.full((2, 3), v)) for v in range(7)], -1)   # (2, 3, 7)
    assert every.abs().max() > 0.1
    assert (z.softmax(-1) * every).sum(-1).abs().max() < 1e-12


def test_work_is_not_better_than_average():
    """The docstring's warning: the signs of W and f_y - fbar do differ."""
    z, g, E, y = case(0, n=40, t=50, v=30, scale=1.0)
    f = g @ E.T
    better = f.gather(-1, y.unsqueeze(-1)).squeeze(-1) - (z.softmax(-1) * f).sum(-1)
    assert 0.02 < (datc.work(z, g, E, y).sign() != better.sign()).double().mean() < 0.4


def test_constant_in_f_cancels():
    z, g, E, y = case(1)
    g1 = torch.cat([g, torch.ones_like(g[..., :1])], -1)                   # one more dimension adds a constant to f
    E1 = torch.cat([E, torch.full_like(E[:, :1], 37.0)], -1)
    torch.testing.assert_close(datc.work(z, g1, E1, y), datc.work(z, g, E, y), atol=1e-12, rtol=1e-9)


def test_certain_policy_does_no_work():
    z, g, E, y = case(2)
    sure = torch.full_like(z, -1e4).scatter(-1, y.unsqueeze(-1), 0.0)
    assert (datc.work(sure, g, E, y) == 0).all()


def test_digits_survive_in_float32():
    z, g, E, y = case(3, n=8, t=16, v=1000, d=32)
    # Place p_y at .99998 exactly: the other 999 tokens share the rest as their logits say.
    others = z.scatter(-1, y.unsqueeze(-1), -math.inf).logsumexp(-1)
    z = z.scatter(-1, y.unsqueeze(-1), (others + math.log(0.99998 / 0.00002)).unsqueeze(-1))
    exact = datc.work(z, g, E, y)
    got = datc.work(z.float(), g.float(), E.float(), y).double()
    assert ((got - exact).abs() / exact.abs().mean()).max() < 1e-4
    p, f = z.float().softmax(-1), g.float() @ E.float().T                  # the equation as it stands loses them
    fbar, p_y = (p * f).sum(-1), p.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    naive = p_y * (f.gather(-1, y.unsqueeze(-1)).squeeze(-1) - fbar) - (p * p * (f - fbar.unsqueeze(-1))).sum(-1)
    assert ((naive.double() - exact).abs() / exact.abs().mean()).max() > 1e-3


def restricted_slowly(z, g, E, y, decodable, k):
    """The sums over S, one position and one token at a time."""
    out = torch.zeros(y.shape, dtype=z.dtype)
    for n in range(y.shape[0]):
        for t in range(y.shape[1]):
            p, a = z[n, t].softmax(-1), int(y[n, t])
            likely = [v for v in p.argsort(descending=True).tolist() if decodable[v]][:k]
            S = set(likely) | ({a} if decodable[a] else set())
            P, f = sum(p[v] for v in S), {v: g[n, t] @ E[v] for v in S}
            if P > 0:
                fbar = sum(p[v] * f[v] for v in S) / P
                first = p[a] * (f[a] - fbar) if decodable[a] else 0.0
                out[n, t] = first - sum(p[v] ** 2 * (f[v] - fbar) for v in S)
    return out


@pytest.mark.parametrize("k", [1, 3, 20])
def test_restricted_work(k):
    z, g, E, y = case(4, v=12)
    decodable = torch.rand(12, generator=torch.Generator().manual_seed(0)) > 0.4
    assert decodable[y].any() and not decodable[y].all()
    torch.testing.assert_close(datc.work(z, g, E, y, decodable=decodable, top_k=k),
                               restricted_slowly(z, g, E, y, decodable, k))
    nothing = torch.zeros_like(decodable)
    assert (datc.work(z, g, E, y, decodable=nothing, top_k=k) == 0).all()  # P_S = 0
    everything = datc.work(z, g, E, y, decodable=~nothing, top_k=12)
    torch.testing.assert_close(everything, datc.work(z, g, E, y))


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
def test_chunks_equal_the_plain_version(chunk_size):
    _, g, E, y = case(5, v=50, dtype=torch.float32)
    head = torch.nn.Linear(16, 50)
    hidden, mask = torch.randn(3, 6, 16), torch.ones(3, 6)
    mask[1, 2:] = 0
    decodable = torch.arange(50) % 3 > 0
    for restriction in ({}, {"decodable": decodable, "top_k": 9}):
        got = datc.work_from_hidden(hidden, head, g, E, y, mask, temperature=0.7, chunk_size=chunk_size, **restriction)
        want = datc.work(head(hidden) / 0.7, g, E, y, **restriction) * mask
        torch.testing.assert_close(got, want.detach(), atol=1e-6, rtol=1e-5)
        assert not got.requires_grad


# ---- the weights ----------------------------------------------------------------------------------------------------
def test_order_flips_with_the_gradient_and_with_the_advantage():
    z, g, E, y = case(6, n=4, t=9)
    A, mask = torch.tensor([1.0, -2.0, 0.5, -0.1], dtype=torch.float64), torch.ones(4, 9)
    order = lambda w: w.argsort(1)
    W = datc.work(z, g, E, y)
    w = datc.credit_weights(W, A, mask)
    assert torch.equal(order(w), order(A.sign().unsqueeze(1) * W))
    assert torch.equal(order(datc.credit_weights(datc.work(z, -g, E, y), A, mask)), order(w).flip(1))
    assert torch.equal(order(datc.credit_weights(W, -A, mask)), order(w).flip(1))


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 8.0, 1e25])
def test_unit_of_the_reward_is_irrelevant(scale):
    z, g, E, y = case(7, dtype=torch.float32)
    A, mask = torch.tensor([1.0, -1.0, 0.3]), torch.ones(3, 6)
    once = datc.credit_weights(datc.work(z, g, E, y), A, mask)
    torch.testing.assert_close(datc.credit_weights(datc.work(z, scale * g, E, y), A * scale, mask), once,
                               atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gate", ["sigmoid", "exp"])
@pytest.mark.parametrize("control", ["none", "shuffle", "no-direction"])
def test_sign_and_mean_are_preserved(gate, control):
    """Over random shapes, masks and extreme values: w > 0 and mean 1 on each response's valid tokens, 0 elsewhere."""
    g = torch.Generator().manual_seed(0)
    for trial in range(150):
        n, t = (int(x) for x in torch.randint(1, 9, (2,), generator=g))
        W = torch.randn(n, t, generator=g) * 10 ** float(torch.randint(-42, 38, (), generator=g))
        W[torch.rand(n, t, generator=g) < 0.2] = 0.0                       # probabilities of 1, zero gradients
        if trial % 5 == 0:
            W[torch.rand(n, t, generator=g) < 0.2] = [math.nan, math.inf, -math.inf][trial % 3]
        if trial % 7 == 0:
            W[0] = 0.0                                                     # rms = 0
        lengths = torch.randint(1, t + 1, (n,), generator=g)
        mask = (torch.arange(t) < lengths.unsqueeze(1)).float()
        if trial % 4 == 0:                                                 # all masked but one, anywhere
            mask = torch.nn.functional.one_hot(torch.randint(t, (n,), generator=g), t).float()
        A = torch.randn(n, generator=g) * (torch.rand(n, generator=g) > 0.2)
        scored = None if trial % 2 else torch.rand(n, t, generator=g) > 0.3
        before = W.clone()
        w = datc.credit_weights(W, A, mask, lam=float(torch.rand((), generator=g) * 20), gate=gate, scored=scored,
                                control=control)
        assert torch.equal(W.nan_to_num(7.0), before.nan_to_num(7.0))      # arguments untouched
        assert w.dtype == torch.float32 and w.isfinite().all() and (w[mask > 0] > 0).all() and (w[mask == 0] == 0).all()
        torch.testing.assert_close(w.sum(1) / mask.sum(1), torch.ones(n))
        one = mask.sum(1) == 1
        torch.testing.assert_close(w[one], mask[one])                      # one token has all the credit there is
        assert torch.equal(w[A == 0], mask[A == 0])
        if trial % 7 == 0:
            assert torch.equal(w[0], mask[0])


def test_neutral_cases_are_exactly_one():
    W, mask = torch.randn(4, 7), (torch.arange(7) < torch.tensor([[7], [3], [1], [0]])).float()
    A = torch.tensor([1.0, -1.0, 2.0, 1.0])
    for gate in ("sigmoid", "exp"):
        assert torch.equal(datc.credit_weights(W, A, mask, lam=0.0, gate=gate), mask)
        assert torch.equal(datc.credit_weights(W, 0 * A, mask, gate=gate), mask)
        assert torch.equal(datc.credit_weights(0 * W, A, mask, gate=gate), mask)
        assert torch.equal(datc.credit_weights(W / 0, A, mask, gate=gate), mask)   # nothing finite: nothing scored


def test_positions_past_the_limit():
    """Unscored: out of the rms, weight 1 before the normalisation."""
    W, A = torch.tensor([[3.0, -3.0, 100.0, 5.0]]), torch.tensor([1.0])
    w = datc.credit_weights(W, A, torch.ones(1, 4), scored=torch.tensor([[1, 1, 0, 0]]))
    u = torch.tensor([2 / (1 + math.exp(-4 * math.tanh(1))), 2 / (1 + math.exp(4 * math.tanh(1))), 1.0, 1.0])
    torch.testing.assert_close(w, (u / u.mean()).unsqueeze(0))


def test_weights_ignore_padding_and_neighbours():
    W, A, mask = torch.randn(4, 7), torch.randn(4), (torch.arange(7) < torch.tensor([[7], [3], [5], [2]])).float()
    pad = torch.full((4, 3), math.nan)
    for control in ("none", "no-direction"):
        w = datc.credit_weights(W, A, mask, control=control)
        torch.testing.assert_close(datc.credit_weights(torch.cat([W, pad], 1), A, torch.cat([mask, 0 * mask[:, :3]], 1),
                                                       control=control)[:, :7], w)
        torch.testing.assert_close(datc.credit_weights(W[[2, 0]], A[[2, 0]], mask[[2, 0]], control=control), w[[2, 0]])


def test_controls():
    W, A, mask = torch.randn(3, 8), torch.tensor([1.0, -1.0, 2.0]), torch.ones(3, 8)
    w, state = datc.credit_weights(W, A, mask), torch.get_rng_state()
    shuffled = datc.credit_weights(W, A, mask, control="shuffle", seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(shuffled.sort(1).values, w.sort(1).values) and not torch.equal(shuffled, w)
    assert torch.equal(shuffled, datc.credit_weights(W, A, mask, control="shuffle", seed=3))
    blind = datc.credit_weights(W, A, mask, control="no-direction")
    assert torch.equal(blind.argsort(1), W.abs().argsort(1))
    assert torch.equal(blind, datc.credit_weights(-W, -A, mask, control="no-direction"))
    for wrong in ({"gate": "relu"}, {"control": "what"}, {"lam": -1.0}, {"lam": math.nan}):
        with pytest.raises(ValueError):
            datc.credit_weights(W, A, mask, **wrong)


# ---- the reward model's gradient ------------------------------------------------------------------------------------
def reward_model(kind="qwen3", vocab=13, seed=0, d=12):
    torch.manual_seed(seed)
    if kind == "qwen3":
        model = Qwen3ForSequenceClassification(Qwen3Config(
            vocab_size=vocab, hidden_size=d, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=6, num_labels=1, pad_token_id=0, max_position_embeddings=64))
    elif kind == "gpt2":                                                   # learned absolute positions
        model = GPT2ForSequenceClassification(GPT2Config(
            vocab_size=vocab, n_embd=d, n_layer=2, n_head=2, n_positions=32, num_labels=1, pad_token_id=0,
            bos_token_id=1, eos_token_id=2))
    else:                                                                  # an encoder, pooled at its first token
        model = BertForSequenceClassification(BertConfig(
            vocab_size=vocab, hidden_size=d, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
            num_labels=1, pad_token_id=0, max_position_embeddings=32))
    for p in model.parameters():                                           # fresh weights are too small to matter
        p.data.mul_(8.0) if p.dim() > 1 else None
    return model.eval()


def padded(rows, layout, width=9, pad=0):
    """`rows` of ids in a (N, width) tensor with padding on the left, the right, or on both sides."""
    ids, mask = torch.full((len(rows), width), pad), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        start = {"left": width - len(row), "right": 0, "both": (width - len(row)) // 2}[layout]
        ids[i, start:start + len(row)], mask[i, start:start + len(row)] = torch.tensor(row), 1
    return ids, mask


ROWS = [[5, 6, 7, 8, 9, 2], [3, 2], [4, 9, 9, 2], [11]]


@pytest.mark.parametrize("layout", ["left", "right", "both"])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "bert"])
def test_scores_and_gradients_do_not_depend_on_padding(kind, layout):
    model = reward_model(kind)
    ids, mask = padded(ROWS, layout)
    scores, g = datc.score_and_gradient(model, ids, mask)
    assert (g[mask == 0] == 0).all() and (g[mask > 0].abs().sum(-1) > 0).any()
    for i, row in enumerate(ROWS):
        alone = torch.tensor([row])
        with torch.no_grad():
            want = model(input_ids=alone, attention_mask=torch.ones_like(alone)).logits[0, 0]
        torch.testing.assert_close(scores[i], want, atol=1e-5, rtol=1e-5)
        _, g_alone = datc.score_and_gradient(model, alone, torch.ones_like(alone))
        torch.testing.assert_close(g[i][mask[i] > 0], g_alone[0], atol=1e-5, rtol=1e-4)
    assert all(p.grad is None for p in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks                 # the model is left as it was
    assert not g.requires_grad and not scores.requires_grad


def test_pooled_token_when_pad_and_end_token_are_the_same():
    """The model's own rule decides, as it does for the response alone."""
    model = reward_model()
    model.config.pad_token_id = 2
    for layout in ("left", "right"):
        ids, mask = padded(ROWS, layout, pad=2)
        scores, _ = datc.score_and_gradient(model, ids, mask)
        for row, score in zip(ROWS, scores):
            torch.testing.assert_close(score, model(input_ids=torch.tensor([row])).logits[0, 0].detach())


# Qwen3's norms compute in float32 whatever the model's dtype, hence its larger step and tolerance.
@pytest.mark.parametrize("kind, h, tolerance", [("gpt2", 1e-6, 1e-6), ("qwen3", 2e-3, 1e-2)])
def test_gradient_against_finite_differences(kind, h, tolerance):
    """Also along E[v] - E[y], where it is the method's f_t(v) - f_t(y): the score's change per step towards v."""
    model = reward_model(kind).double()
    ids, mask = padded(ROWS, "left")
    _, g = datc.score_and_gradient(model, ids, mask)
    table = model.get_input_embeddings().weight.detach()
    for n, row in enumerate(ROWS[:3]):
        for t in range(len(row)):
            direction = table[(row[t] + 4) % 13] - table[row[t]]
            ends = []
            for sign in (1, -1):                                           # nudge one slot, read the score
                e = table[row].unsqueeze(0).clone()
                e[0, t] += sign * h * direction
                with torch.no_grad():
                    ends.append(model(inputs_embeds=e).logits[0, 0])       # one row, no padding: the last slot is right
            slope = (ends[0] - ends[1]) / (2 * h)
            torch.testing.assert_close(g[n, 9 - len(row) + t].double() @ direction, slope, atol=tolerance, rtol=tolerance)


def test_no_grad_around_and_nan_row():
    model = reward_model()
    ids, mask = padded(ROWS, "left")
    with torch.no_grad():
        scores, g = datc.score_and_gradient(model, ids, mask)
    assert g.abs().sum() > 0
    model.get_input_embeddings().weight.data[11] = math.nan                # only the last row holds token 11
    bad_scores, bad = datc.score_and_gradient(model, ids, mask)
    assert bad_scores[3].isnan()
    torch.testing.assert_close(bad_scores[:3], scores[:3])
    torch.testing.assert_close(bad[:3], g[:3])


# ---- two tokenizers -------------------------------------------------------------------------------------------------
def word_tokenizer(words, split=" "):
    """A word-level tokenizer; with split="" every character of the text is its own token."""
    vocab = {w: i for i, w in enumerate(["?", "</s>"] + words)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(" ", "removed") if split else pre_tokenizers.Split("", "isolated")
    core.decoder = None if split else decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="?", unk_token="?",
                                   chat_template="{{ messages[0]['content'] }}{{ '' if split else ' ' }}")


WORDS = ["ann", "has", "5", "8", "apples", "."]


def test_both_paths_agree_when_the_tokens_are_the_same():
    policy, reward = word_tokenizer(WORDS), word_tokenizer(WORDS + ["zebra"])   # one token more: "another tokenizer"
    model = reward_model(vocab=len(reward))
    table = model.get_input_embeddings().weight.detach()
    ids = policy("ann has 8 apples .")["input_ids"] + [policy.eos_token_id]
    own, shares = datc.respell(policy, reward, ids, {policy.eos_token_id})
    assert own == ids
    torch.testing.assert_close(shares, torch.eye(len(ids)))
    E, decodable = datc.vocabulary_embeddings(policy, reward, table, len(policy) + 3, {policy.eos_token_id})
    assert decodable.tolist() == [False] + [True] * (1 + len(WORDS)) + [False] * 3   # "?" is a special token
    torch.testing.assert_close(E[decodable], table[:len(policy) + 3][decodable[:len(table)]])
    plain_E, everything = datc.vocabulary_embeddings(policy, policy, table, len(policy) + 3, {policy.eos_token_id})
    assert everything is None and torch.equal(plain_E[:len(table)], table) and (plain_E[len(table):] == 0).all()
    _, g = datc.score_and_gradient(model, torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.long))
    logits, y = torch.randn(1, len(ids), len(policy) + 3), torch.tensor([ids])
    logits[..., ~decodable] = -torch.inf                                   # so that S misses nothing
    torch.testing.assert_close(datc.work(logits, shares @ g, E, y, decodable=decodable), datc.work(logits, g, plain_E, y))


def test_mismatched_tokenizers_by_hand():
    """The policy spells words, the reward model characters: every number here can be done on paper."""
    policy = word_tokenizer(["ab", "c"])                                   # ids: ? 0, </s> 1, ab 2, c 3
    reward = word_tokenizer(["a", "b", "c", " "], split="")                # ids: ? 0, </s> 1, a 2, b 3, c 4, space 5
    own, shares = datc.respell(policy, reward, [2, 3, 1], {1})             # "ab c" and the end
    assert own == [2, 3, 5, 4, 1]
    assert shares.tolist() == [[1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]   # the joining space is with "c"
    g = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]])                 # one gradient per character
    assert (shares @ g).flatten().tolist() == [3.0, 12.0, 16.0]            # summed by word
    table = torch.tensor([[0.5], [7.0], [1.0], [3.0], [5.0], [9.0]])
    E, decodable = datc.vocabulary_embeddings(policy, reward, table, 5, {1})
    assert E.flatten().tolist() == [0.0, 7.0, 2.0, 5.0, 0.0]               # end = end, "ab" = mean(a, b)
    assert decodable.tolist() == [False, True, True, True, False]          # "?" is special, id 4 unused
    # The other way round, and cut off before its end: the letters share the gradient of their word.
    own, shares = datc.respell(reward, policy, [2, 3, 5, 4], {1})
    assert own == [2, 3]
    assert shares.tolist() == [[0.5, 0], [0.5, 0], [0, 0], [0, 1]]
    own, shares = datc.respell(policy, reward, [1], {1})                   # nothing but the end
    assert own == [1] and shares.tolist() == [[1]]
    own, shares = datc.respell(policy, reward, [0], {1})                   # nothing at all
    assert own == [] and shares.shape == (1, 0)


def test_a_character_in_several_tokens():
    """Byte tokens: half a character is undecodable, and the whole one still has its place in the text."""
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()) + ["</s>"])}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    policy = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    ids = policy("a é.", add_special_tokens=False)["input_ids"]            # "é" is two bytes
    own, shares = datc.respell(policy, word_tokenizer(["a", "é", ".", " "], split=""), ids, set())
    assert own == [2, 5, 3, 4]
    assert shares.tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
    E, decodable = datc.vocabulary_embeddings(policy, word_tokenizer(["a"]), torch.randn(3, 2), len(policy), set())
    assert decodable[ids[0]] and not decodable[ids[2]] and not decodable[ids[3]] and not decodable[policy.eos_token_id]
    assert (E[ids[2]] == 0).all()


# ---- a rollout's scores ---------------------------------------------------------------------------------------------
def scored_rollout(args, policy, reward, model, texts, same=None):
    ids = [policy(text, add_special_tokens=False)["input_ids"] + [policy.eos_token_id] for text in texts]
    completion, mask = common.pad_right(ids, policy.pad_token_id)
    empty = torch.zeros(len(ids), 1, dtype=torch.long)
    rollout = common.Rollout(empty, empty, completion, mask, torch.arange(len(ids)) // 2, empty[:, 0] > 0, texts)
    problems = [{"question": f"{name} has 5"} for name in ("ann", "8")]
    same = policy.get_vocab() == reward.get_vocab() if same is None else same
    return ids, *datc.judge(model, reward, policy, rollout, problems, args, {policy.eos_token_id}, same)


TEXTS = ["ann has 8", "8 apples .", "has", "ann has 5 apples . 5"]


@pytest.mark.parametrize("micro_batch", [1, 3, 100])
def test_judge_scores_prefix_and_sampled_ids(micro_batch):
    args = datc.Args(micro_batch=micro_batch, instruction="", device="cpu")
    policy, model = word_tokenizer(WORDS), reward_model(vocab=8)
    ids, rewards, g, scored = scored_rollout(args, policy, policy, model, TEXTS)
    for i, own in enumerate(ids):
        row = torch.tensor([policy("ann has 5" if i < 2 else "8 has 5")["input_ids"] + own])
        score, gradient = datc.score_and_gradient(model, row, torch.ones_like(row))
        torch.testing.assert_close(rewards[i], score[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(g[i, :len(own)], gradient[0, 3:], atol=1e-5, rtol=1e-4)
        assert (g[i, len(own):] == 0).all() and scored[i].sum() == len(own)
    args.lam = 0.0                                                         # the same scores without a backward pass
    _, plain, none, _ = scored_rollout(args, policy, policy, model, TEXTS)
    torch.testing.assert_close(plain, rewards, atol=1e-5, rtol=1e-5)
    assert (none == 0).all()


def test_judge_with_another_tokenizer_agrees_where_tokens_do():
    args = datc.Args(instruction="", device="cpu")
    policy, model = word_tokenizer(WORDS), reward_model(vocab=8)
    _, rewards, g, scored = scored_rollout(args, policy, policy, model, TEXTS)
    _, rewards2, g2, scored2 = scored_rollout(args, policy, policy, model, TEXTS, same=False)
    torch.testing.assert_close(rewards2, rewards)
    torch.testing.assert_close(g2, g)
    assert torch.equal(scored2, scored)


def test_judge_where_the_end_token_pads_too():
    """Pooling then reads the token before the end: the end is not "seen", and a response of nothing else has no score."""
    args = datc.Args(instruction="", device="cpu")
    policy, model = word_tokenizer(WORDS), reward_model(vocab=8)
    model.config.pad_token_id = policy.eos_token_id
    ids, rewards, g, scored = scored_rollout(args, policy, policy, model, [*TEXTS[:3], ""])
    assert scored.sum(1).tolist() == [len(row) - 1 for row in ids]
    assert (g[scored > 0] != 0).any(-1).all() and (g[scored == 0] == 0).all()
    assert rewards.isnan().tolist() == [False, False, False, True]
    row = torch.tensor([policy("ann has 5")["input_ids"] + ids[0][:-1]])
    torch.testing.assert_close(rewards[0], model(input_ids=row).logits[0, 0].detach(), atol=1e-5, rtol=1e-5)


def test_judge_past_the_length_limit_and_without_a_score():
    args = datc.Args(instruction="", device="cpu")
    policy, model = word_tokenizer(WORDS), reward_model(vocab=8)
    whole = scored_rollout(args, policy, policy, model, TEXTS)
    model.config.max_position_embeddings = 6                               # 3 for the question, 3 for the response
    ids, rewards, g, scored = scored_rollout(args, policy, policy, model, TEXTS)
    assert scored.sum(1).tolist() == [3, 3, 2, 3]
    assert (g[scored == 0] == 0).all() and (g[scored > 0] != 0).any(-1).all()
    torch.testing.assert_close(rewards[2], whole[1][2])                    # "has" fits
    row = torch.tensor([policy("ann has 5")["input_ids"] + ids[0][:3]])
    torch.testing.assert_close(rewards[0], model(input_ids=row).logits[0, 0].detach(), atol=1e-5, rtol=1e-5)
    model.config.max_position_embeddings = 3                               # no room for any response
    _, rewards, g, scored = scored_rollout(args, policy, policy, model, TEXTS)
    assert rewards.isnan().all() and (scored == 0).all() and (g == 0).all()
    model.config.max_position_embeddings = 64
    model.get_input_embeddings().weight.data[policy.convert_tokens_to_ids("apples")] = math.inf
    _, rewards, g, scored = scored_rollout(args, policy, policy, model, TEXTS)
    assert rewards.isnan().tolist() == [False, True, False, True]          # unscorable, not infinitely good
    advantages = common.group_advantages(rewards, torch.tensor([0, 0, 1, 1]))
    assert (advantages == 0).all()
    w = datc.credit_weights(g.sum(-1), advantages, scored, scored=scored)
    assert torch.equal(w, scored)


# ---- the script -----------------------------------------------------------------------------------------------------
FLAGS = ["--reward-steps", "3"]


@pytest.fixture
def train(tmp_path, toy_checkpoints, monkeypatch):
    """train(module, "--name", "x", ...) runs a script's loop here, small, and returns its run folder."""
    monkeypatch.chdir(tmp_path)

    def run(module, *flags):
        flags = ["--checkpoints", str(toy_checkpoints), "--warmup-steps", str(WARMUP), "--prompts-per-step", "4", "--group-size", "4",
                 "--eval-problems", "4", "--eval-samples", "2", "--eval-every", "0", *(FLAGS if module is datc else []), *flags]
        args = common.parse_args(module.Args, module.TOY, flags)
        module.train(args)
        return tmp_path / "runs" / args.name
    return run


def columns(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def verifiable(reward_model, reward_tokenizer, policy_tokenizer, rollout, problems, args, eos_ids, same_tokens):
    """Stands in for `judge`: grpo.py's own rewards, and a random gradient."""
    rewards = [common.reward_correct(t, problems[g]) for t, g in zip(rollout.texts, rollout.group_ids.tolist())]
    g = torch.randn(*rollout.completion_mask.shape, reward_model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    return torch.tensor(rewards), g, torch.ones_like(rollout.completion_mask)


def test_neutral_setting_is_the_base_bit_for_bit(train, monkeypatch):
    """lam 0 with grpo.py's rewards: the same loss, gradient norm and weights as grpo.py, and no credit is computed."""
    monkeypatch.setattr(datc, "judge", verifiable)
    options = ["--steps", "2", "--inner-iterations", "2", "--mini-batches", "2", "--micro-batch", "8"]
    credited = train(datc, "--name", "credited", *options)
    monkeypatch.setattr(datc, "work_from_hidden", None)
    neutral, base = train(datc, "--name", "neutral", "--lam", "0", *options), train(grpo, "--name", "base", *options)
    assert columns(neutral) == columns(base)
    a, b, c = (load_file(f / "checkpoint" / "model.safetensors") for f in (neutral, base, credited))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert not all(torch.equal(a[k], c[k]) for k in a)
    first, last = columns(credited)[1], columns(credited)[-1]
    assert float(first["weight_std"]) > 0.1 and 0 < float(last["with_reward"]) < 1


def test_resumed_run_equals_the_straight_one(train):
    options = ["--save-every", "1", "--control", "shuffle", "--gate", "exp"]
    straight = train(datc, "--name", "straight", "--steps", "2", *options)
    train(datc, "--name", "halves", "--steps", "1", *options)
    halves = train(datc, "--name", "halves", "--steps", "2", "--resume", *options)
    a, b = (load_file(f / "checkpoint" / "model.safetensors") for f in (straight, halves))
    assert all(torch.equal(a[k], b[k]) for k in a)
    keep = lambda row: {k: v for k, v in row.items() if not k.startswith("eval")}
    assert list(map(keep, columns(straight))) == list(map(keep, columns(halves)))


def test_reward_model_of_another_tokenizer(train, tmp_path):
    """A reward model that reads characters judges the toy's words."""
    reward = word_tokenizer([*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,+-=:"], split="")
    model = reward_model(vocab=len(reward))
    model.config.max_position_embeddings = 150                             # some responses are longer
    model.save_pretrained(tmp_path / "characters")
    reward.save_pretrained(tmp_path / "characters")
    folder = train(datc, "--name", "x", "--steps", "2", "--reward-model", str(tmp_path / "characters"))
    last = columns(folder)[-1]
    assert math.isfinite(float(last["reward"])) and float(last["weight_std"]) > 0.1 and float(last["grad_norm"]) > 0


def test_reward_model_is_trained_once(toy_checkpoints, tmp_path, capsys):
    args = common.parse_args(datc.Args, datc.TOY, ["--checkpoints", str(tmp_path), "--warmup-steps", str(WARMUP)])
    (tmp_path / f"toy-policy-2steps-{WARMUP}").symlink_to(toy_checkpoints / f"toy-policy-2steps-{WARMUP}")
    args.reward_steps, args.reward_model = 2, "train:" + str(toy_checkpoints / f"toy-policy-2steps-{WARMUP}")
    model, tokenizer = datc.load_reward_model(args)
    assert "held-out pairs" in capsys.readouterr().out
    again, _ = datc.load_reward_model(args)
    assert "held-out pairs" not in capsys.readouterr().out                 # read back, not trained again
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert type(model) is Qwen3ForSequenceClassification and model.config.num_labels == 1
    (tmp_path / "elsewhere").mkdir()                                       # every run's checkpoint has the same folder name
    shutil.copytree(toy_checkpoints / f"toy-policy-2steps-{WARMUP}", tmp_path / "elsewhere" / f"toy-policy-2steps-{WARMUP}")
    args.reward_model = "train:" + str(tmp_path / "elsewhere" / f"toy-policy-2steps-{WARMUP}")
    datc.load_reward_model(args)
    assert "held-out pairs" in capsys.readouterr().out and len(list(tmp_path.glob("rm-*"))) == 2


def test_another_policy_needs_its_own_reward_model():
    args = datc.Args(model="owner/name")
    with pytest.raises(common.InputError, match="--reward-model"):
        datc.check_options(args)
    args.reward_model = "owner/judge"
    datc.check_options(args)


def test_script_two_steps(run_script, tmp_path):
    run_script("datc.py", "--steps", 2, "--name", "a", *FLAGS)
    for name in ("args.json", "metrics.csv", "curve.png", "credit.png", "samples.txt", "checkpoint/model.safetensors"):
        assert (tmp_path / "runs" / "a" / name).stat().st_size > 0, name
    assert {"reward", "accuracy", "weight_std", "with_reward", "eval_mean"} <= set(columns(tmp_path / "runs" / "a")[0])
    assert json.loads((tmp_path / "runs" / "a" / "args.json").read_text())["lam"] == 4.0


def test_help(run_script):
    text = run_script("datc.py", "--help", small=False).stdout
    assert all(f"--{name}" in text for name in datc.Args.__dataclass_fields__)


def test_bad_input_is_one_line_and_code_2(run_script, tmp_path):
    done = run_script("datc.py", "--reward-model", tmp_path / "nowhere", code=2)
    error = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(error) == 1 and "nowhere" in error[0] and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()                                # nothing was started


def test_bad_input_says_what_to_do(train, toy_checkpoints, tmp_path):
    policy = str(toy_checkpoints / f"toy-policy-2steps-{WARMUP}")          # a causal LM: no reward head
    silent = tmp_path / "silent"                                           # a reward model whose tokenizer has no template
    reward_model(vocab=8).save_pretrained(silent)
    PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(WORDS).backend_tokenizer).save_pretrained(silent)
    small = tmp_path / "small"                                             # fewer embeddings than its tokenizer has tokens
    reward_model(vocab=5).save_pretrained(small)
    word_tokenizer(WORDS).save_pretrained(small)
    for flags, words in ((["--reward-model", policy], "train:"), (["--reward-model", str(silent)], "chat template"),
                         (["--reward-model", str(small)], "embeddings"), (["--gate", "relu"], "--gate"),
                         (["--control", "what"], "--control"), (["--lam", "-1"], "--lam"), (["--lam", "nan"], "--lam"),
                         (["--top-k", "0"], "--top-k"), (["--reward-model", "train:" + str(tmp_path)], str(tmp_path))):
        with pytest.raises(common.InputError, match=words):
            train(datc, *flags)

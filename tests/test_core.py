"""The shared functions against golden numbers, brute force, finite differences and known faults of such code."""
import copy
import doctest
import itertools
import math
import time
from fractions import Fraction

import pytest
import torch

import common
from common import (clipped_kl_loss, completion_mask, extract_number, group_advantages, loss_denominator, pass_at_k, position_ids,
                    reward_correct, token_logps)
from conftest import golden

CORE = golden("core")


def cases(name):
    return [case for case in CORE if case["fn"] == name]


def test_doctests():
    import grpo
    for module in (common, grpo):
        result = doctest.testmod(module)
        assert result.failed == 0
    assert doctest.testmod(common).attempted >= 14


# ---- rewards --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, number", [
    ("1,234", 1234), ("-7", -7), ("18.", 18), ("18.0", 18), ("$18", 18), (r"\boxed{8,000}", 8000), (r"\boxed{\frac{1}{2}}", Fraction(1, 2)),
    ("#### 18\nbye", 18), ("5 - 3 = 2", 2), ("7-3", 3), ("3/4", Fraction(3, 4)), ("12%", 12), (".5", Fraction(1, 2)),
    ("", None), ("no number", None),
    # the same kinds, other inputs
    (r"\boxed{3} then \boxed{4}", 4), (r"\boxed{7} and 9 more", 7), ("#### 1 #### 2 3", 2), ("(5)-3", 3), ("x = -$18.50", Fraction(-37, 2)),
    ("$-18", -18), (r"\boxed{\text{none}} 5", None), ("12 ####", None), ("1,2345", 2345), ("12,345,678.5", Fraction(24691357, 2)),
    ("\u22125", -5), (r"\boxed{-\frac{3}{4}}", Fraction(-3, 4)), ("1/0", None), (r"\frac{1}{0}", None), ("2e3", 2000),
    ("10 -3", 3), ("a list: -3", -3), (r"\boxed{8{,}000}", 8000), (r"\boxed{3\,000}", 3000), (r"\tfrac{1}{2}", Fraction(1, 2)), (r"\boxed{5", 5), ("it is 18.\n", 18), ("8 apples", 8), ("Answer: 6", 6),
])
def test_extract_number(text, number):
    assert extract_number(text) == number


@pytest.mark.parametrize("text", ["9" * 5000, "1e400", "1e99999999999", "1," * 5000, "-" * 9999 + "1", "\\boxed{" * 3000, "1/" * 5000, "#" * 9999,
                                  "$" * 9999 + "5", "-$" * 5000 + "5", " " * 9999 + "-5", ("9" * 50 + " ") * 200])
def test_extract_number_is_quick_on_hostile_text(text):
    start = time.perf_counter()
    extract_number(text)
    assert time.perf_counter() - start < 0.25  # generous: a backtracking pattern or a huge power takes minutes


def test_reward():
    assert reward_correct("it is 8", {"answer": "#### 8"}) == 1.0
    assert reward_correct("it is 8.0", {"answer": "#### 8"}) == 1.0
    assert reward_correct("no number", {"answer": "#### 8"}) == 0.0
    assert reward_correct("8", {"answer": "eight"}) is None  # the problem itself cannot be scored


# ---- the story task ---------------------------------------------------------------------------------------

def test_story_answers_are_right_and_splits_do_not_meet():
    train, test = common.story_problems(400, 0, "train"), common.story_problems(100, 0, "test")
    sums = lambda problems: {(p["start"], tuple(common.VERBS[v] * n for v, n in p["moves"])) for p in problems}
    assert not sums(train) & sums(test)
    for problem in train + test:
        truth = problem["start"] + sum(common.VERBS[v] * n for v, n in problem["moves"])
        assert reward_correct(problem["answer"], {"answer": str(truth)}) == 1.0


def test_demonstrations_are_wrong_as_often_as_said():
    import random
    rng, problems = random.Random(0), common.story_problems(2000, 1)
    texts = [common.story_solution(p, rng, error=0.3) for p in problems]
    wrong = 0
    for text in texts:
        for step in text.split(" then ")[1:]:
            left, result = step.split(".")[0].split(" = ")
            a, sign, b = left.split()
            wrong += int(a) + int(sign + b) != int(result)
    assert abs(wrong / 4000 - 0.3) < 0.025  # 3 standard errors
    right = sum(reward_correct(t, p) for t, p in zip(texts, problems)) / 2000
    assert 0.49 - 0.04 < right < 0.49 + 0.07  # both steps right, or two slips that cancel


def test_toy_tokenizer_is_lossless_and_knows_every_word():
    tokenizer = common.toy_tokenizer()
    for steps in (1, 2, 5):
        for problem in common.story_problems(50, 3, steps=steps):
            for text in (problem["question"], problem["answer"], f"{problem['question']} {common.WRONG_ANSWER}"):
                ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                assert tokenizer.unk_token_id not in ids
                assert tokenizer.decode(ids) == text
    answers = {len(tokenizer(p["answer"])["input_ids"]) for p in common.story_problems(50, 0)}
    assert answers == {23}  # with the end token 24, which block lengths of 2, 3, 4, 6, 8, 12 divide


# ---- tokens, masks, positions ------------------------------------------------------------------------------

@pytest.mark.parametrize("case", cases("completion_mask"))
def test_completion_mask_golden(case):
    assert completion_mask(torch.tensor(case["completion_ids"]), case["eos_ids"]).tolist() == case["want"]


def test_completion_mask_pad_is_eos():
    ids = torch.tensor([[5, 9, 9, 9], [5, 6, 7, 8], [9, 9, 9, 9]])
    assert completion_mask(ids, [9]).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]


def test_position_ids():
    assert position_ids(torch.tensor([[0, 0, 1, 1, 1]])).tolist() == [[0, 0, 0, 1, 2]]


def tiny_model(kind, vocab=50):
    from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM
    torch.manual_seed(0)
    if kind == "gpt2":  # learned absolute positions: wrong position ids show at once
        model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                                             num_key_value_heads=2, head_dim=16, initializer_range=0.3))
    return model.eval()


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_left_padding_does_not_change_logps(kind):
    model = tiny_model(kind)
    prompt, completion = torch.tensor([[7, 8, 9]]), torch.tensor([[11, 12, 13, 14]])
    ones = torch.ones_like
    alone = token_logps(model, prompt, ones(prompt), completion, ones(completion)).logps
    padded, mask = torch.tensor([[0, 0, 0, 7, 8, 9]]), torch.tensor([[0, 0, 0, 1, 1, 1]])
    behind = token_logps(model, padded, mask, completion, ones(completion)).logps
    assert (alone - behind).abs().max() < 1e-5
    assert alone.abs().min() > 1e-3  # the comparison is about something


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
@pytest.mark.parametrize("chunk_size", [1, 3, 7, 1000])
def test_token_logps_against_plain_log_softmax(kind, chunk_size):
    """Values, entropies, hidden states and gradients of the chunked scorer equal the plain ones."""
    model, plain = tiny_model(kind), tiny_model(kind)
    prompt, mask = torch.tensor([[0, 7, 8], [4, 5, 6]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    completion, valid = torch.tensor([[11, 12, 13, 14], [21, 22, 0, 0]]), torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0]])
    scores = token_logps(model, prompt, mask, completion, valid, temperature=0.5, chunk_size=chunk_size, want=("entropy", "hidden"))
    attention = torch.cat([mask, valid.long()], 1)
    logits = plain(input_ids=torch.cat([prompt, completion], 1), attention_mask=attention, position_ids=position_ids(attention)).logits
    logp_all = (logits[:, 2:6] / 0.5).log_softmax(-1)
    logps = logp_all.gather(2, completion[..., None])[..., 0] * valid
    torch.testing.assert_close(scores.logps, logps, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(scores.entropy, -(logp_all.exp() * logp_all).sum(-1) * valid, atol=1e-5, rtol=1e-5)
    head = plain.get_output_embeddings()
    torch.testing.assert_close(head(scores.hidden) * valid[..., None], logits[:, 2:6] * valid[..., None], atol=1e-5, rtol=1e-5)
    weight = torch.randn_like(logps)
    (scores.logps * weight).sum().backward()
    (logps * weight).sum().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-5, rtol=1e-4, msg=name)


class Certain(torch.nn.Module):
    """A model whose logits name the next token of a fixed sequence with certainty."""
    def __init__(self, sequence, vocab=20):
        super().__init__()
        self.sequence, self.vocab, self.device = sequence, vocab, torch.device("cpu")
        self.head = torch.nn.Identity()

    @property
    def base_model(self):
        return self

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, **_):
        nxt = torch.cat([self.sequence[1:], self.sequence[:1]])[None]  # (1,L)
        hidden = torch.full((1, len(self.sequence), self.vocab), -1e4).scatter(2, nxt[..., None], 0.0)
        return type("Output", (), {"last_hidden_state": hidden})


@pytest.mark.parametrize("prompt_length, length", [(3, 4), (1, 5), (4, 1), (1, 1)])
def test_logit_shift(prompt_length, length):
    sequence = torch.arange(prompt_length + length) + 3
    prompt, completion = sequence[None, :prompt_length], sequence[None, prompt_length:]
    logps = token_logps(Certain(sequence), prompt, torch.ones_like(prompt), completion, torch.ones_like(completion)).logps
    assert logps.abs().max() == 0.0  # a shift by one gives -1e4


def test_temperature():
    model = Certain(torch.tensor([1, 0, 2]), vocab=3)
    model.forward = lambda **_: type("Output", (), {"last_hidden_state": torch.tensor([[[2.0, 1.0, 0.0]] * 4])})
    one = torch.ones(1, 1)
    logps = token_logps(model, one.long(), one.long(), torch.tensor([[0, 1, 2]]), torch.ones(1, 3), temperature=0.5).logps
    torch.testing.assert_close(logps, torch.tensor([[-0.1429, -2.1429, -4.1429]]), atol=1e-4, rtol=0)


def test_scorer_equals_the_samplers_own_scores(toy):
    """The distribution that generate drew from is the one that token_logps scores, also at temperature 0.7."""
    model, tokenizer, args = toy
    problems = common.encode_prompts(tokenizer, common.story_problems(3, 0, "test"), args)
    prompt_ids, prompt_mask = common.pad_left([p["prompt_ids"] for p in problems], tokenizer.pad_token_id)
    torch.manual_seed(0)
    out = model.generate(input_ids=prompt_ids, attention_mask=prompt_mask, max_new_tokens=32, do_sample=True, temperature=0.7, top_k=0,
                         top_p=1.0, return_dict_in_generate=True, output_scores=True)
    ids = out.sequences[:, prompt_ids.shape[1]:]
    mask = completion_mask(ids, [tokenizer.eos_token_id])
    theirs = torch.stack(out.scores, 1).log_softmax(-1).gather(2, ids[..., None])[..., 0] * mask
    ours = token_logps(model, prompt_ids, prompt_mask, ids, mask, temperature=0.7).logps
    assert (ours - theirs).abs().max() < 1e-4
    args = copy.copy(args)
    args.temperature = 0.7
    torch.manual_seed(0)
    rollout = common.generate(model, tokenizer, [p["prompt_ids"] for p in problems], 1, args)
    assert torch.equal(rollout.completion_ids, ids)  # our thin wrapper draws the very same tokens


def test_sampling_ignores_the_checkpoints_own_defaults(toy):
    """A checkpoint that asks for top_k = 1 or a repetition penalty (as chat models do) is sampled in full all the same."""
    model, tokenizer, args = toy
    model = copy.deepcopy(model)
    prompt = common.chat_ids(tokenizer, common.story_problems(1, 0)[0]["question"])
    torch.manual_seed(0)
    plain = common.generate(model, tokenizer, [prompt], 64, args).completion_ids
    for key, value in dict(top_k=1, top_p=0.1, temperature=0.01, repetition_penalty=5.0, do_sample=False).items():
        setattr(model.generation_config, key, value)
    torch.manual_seed(0)
    assert torch.equal(common.generate(model, tokenizer, [prompt], 64, args).completion_ids, plain)


def test_loading_drops_hidden_sampling_defaults(toy, tmp_path):
    model, tokenizer, args = toy
    model, args = copy.deepcopy(model), copy.copy(args)
    model.generation_config.no_repeat_ngram_size = 2
    model.generation_config.suppress_tokens = [7]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, 9]
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    loaded, _ = common.load_policy(args, tmp_path / "m")
    assert loaded.generation_config.suppress_tokens is None and loaded.generation_config.no_repeat_ngram_size is None
    assert common.end_ids(loaded, tokenizer) == sorted([tokenizer.eos_token_id, 9])  # both end tokens are honoured


def test_text_behind_the_end_token_is_cut():
    tokenizer = common.toy_tokenizer()
    ids = [tokenizer("Answer: 6")["input_ids"] + [tokenizer.eos_token_id] + tokenizer(" 9 9")["input_ids"]]
    ids = torch.tensor(ids)
    assert common.decode(tokenizer, ids, completion_mask(ids, [tokenizer.eos_token_id])) == ["Answer: 6"]


def test_bos_stands_once():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    core = Tokenizer(models.WordLevel({"<s>": 0, "hello": 1, "<unk>": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", unk_token="<unk>",
                                        chat_template="{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert tokenizer("hello")["input_ids"] == [0, 1]  # this tokenizer adds a BOS of its own
    assert common.chat_ids(tokenizer, "hello") == [0, 1]


# ---- advantages ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("case", cases("group_advantages"))
def test_group_advantages_golden(case):
    got = group_advantages(torch.tensor(case["rewards"], dtype=torch.float32), torch.tensor(case["group_ids"]), case["scale"], case["eps"])
    torch.testing.assert_close(got, torch.tensor(case["want"]), atol=1e-6, rtol=0)


def test_group_advantages_edge_cases():
    ids = lambda n: torch.zeros(n, dtype=torch.long)
    for value, n in ((0.1, 8), (0.7, 12)):
        assert group_advantages(torch.full((n,), value), ids(n)).tolist() == [0.0] * n
    nan = float("nan")
    got = group_advantages(torch.tensor([1.0, nan, 0.0, 0.0]), ids(4))
    want = group_advantages(torch.tensor([1.0, 0.0, 0.0]), ids(3))
    assert got[1] == 0.0 and torch.equal(got[[0, 2, 3]], want)
    assert torch.equal(group_advantages(torch.tensor([1.0, float("inf"), 0.0, 0.0]), ids(4)), got)  # infinite: not scored either
    assert group_advantages(torch.tensor([nan, nan]), ids(2)).tolist() == [0.0, 0.0]
    assert group_advantages(torch.tensor([5.0, nan]), ids(2)).tolist() == [0.0, 0.0]
    close = group_advantages(torch.tensor([1.0, 1.00001], dtype=torch.float64), ids(2))
    torch.testing.assert_close(close, torch.tensor([-0.0467, 0.0467], dtype=torch.float64), atol=5e-5, rtol=0)
    with pytest.raises(ValueError):
        group_advantages(torch.tensor([1.0, 0.0]), ids(2), scale="mean")


def test_pictures_of_tokens_that_look_like_formulas(tmp_path):
    """"$$" is a token of its own in most vocabularies; read as a formula it would end the run with its picture."""
    common.plot_credit(tmp_path / "credit.png", [["$$", "$\\frac$", "a"]], [[1.0, 2.0, 0.5]], ["$_$"])
    common.plot_denoising(tmp_path / "denoising.png", ["$$", "$}$"], torch.tensor([0, 1]), torch.rand(2, 2))
    assert (tmp_path / "credit.png").stat().st_size > 0 < (tmp_path / "denoising.png").stat().st_size


def test_loss_refuses_shapes_that_would_broadcast():
    two = torch.zeros(2, 2)
    for arguments in ((two, two, None, torch.tensor([1.0, -3.0]), two + 1), (two, two[:1], None, two, two + 1), (two, two, None, two, torch.ones(2, 1))):
        with pytest.raises(ValueError, match="four times"):
            clipped_kl_loss(*arguments)
    with pytest.raises(ValueError, match="ref_logps"):
        clipped_kl_loss(two, two, None, two, two + 1, beta=0.1)


def test_group_advantages_against_a_slow_version_and_permutation():
    import statistics
    torch.manual_seed(0)
    for _ in range(30):
        n = int(torch.randint(2, 20, ()))
        rewards, groups = torch.randn(n, dtype=torch.float64), torch.randint(0, 4, (n,))
        got = group_advantages(rewards, groups)
        for i in range(n):
            mates = [rewards[j].item() for j in range(n) if groups[j] == groups[i]]
            want = 0.0 if len(mates) < 2 else (rewards[i].item() - statistics.mean(mates)) / (statistics.stdev(mates) + 1e-4)
            assert abs(got[i].item() - want) < 1e-9
        order = torch.randperm(n)
        torch.testing.assert_close(group_advantages(rewards[order], groups[order]), got[order])


# ---- loss ----------------------------------------------------------------------------------------------

def brute_loss(logps, old, ref, A, mask, clip_low, clip_high, dual_clip, beta, kl, aggregate, max_len):
    """The formulas read aloud: scalar loops, nothing shared with common.py but Python floats on autograd scalars."""
    total, responses = 0.0, 0
    for i in range(len(logps)):
        row, tokens = 0.0, 0
        for t in range(len(logps[i])):
            if not mask[i][t]:
                continue
            tokens += 1
            r, a = torch.exp(torch.clamp(logps[i][t] - old[i][t], -20, 20)), A[i][t]
            c = min(max(r.item(), 1 - clip_low), 1 + clip_high)
            unclipped = r * a
            objective = unclipped if unclipped.item() <= c * a.item() else torch.tensor(c * a.item(), dtype=torch.float64)
            if dual_clip is not None and a < 0 and objective.item() < dual_clip * a.item():
                objective = torch.tensor(dual_clip * a.item(), dtype=torch.float64)
            x = torch.clamp(ref[i][t] - logps[i][t], -20, 20)
            row = row - objective + beta * {"k1": -x, "k2": x ** 2 / 2, "k3": torch.exp(x) - x - 1}[kl]
        if tokens:
            responses += 1
            total = total + (row / tokens if aggregate == "sequence" else row)
    return total / {"sequence": responses, "token": float(mask.sum()), "constant": len(logps) * (max_len or 1)}[aggregate]


@pytest.mark.parametrize("case", cases("clipped_kl_loss"))
def test_loss_golden(case):
    t = lambda name: torch.tensor(case[name], dtype=torch.float64)
    loss, _ = clipped_kl_loss(t("logps"), t("old_logps"), t("ref_logps"), t("advantages"), t("mask"), **case["options"])
    assert math.isclose(loss.item(), case["want"], rel_tol=1e-6)


@pytest.mark.parametrize("aggregate, kl, dual_clip, beta", list(itertools.product(
    ["sequence", "token", "constant"], ["k1", "k2", "k3"], [None, 1.5], [0.0, 0.1])))
def test_loss_value_and_gradient_against_brute_force(aggregate, kl, dual_clip, beta):
    torch.manual_seed(1)
    double = dict(dtype=torch.float64)
    logps, old, ref = -torch.rand(3, 5, **double) * 2, -torch.rand(3, 5, **double) * 2, -torch.rand(3, 5, **double) * 2
    A, mask = torch.randn(3, 5, **double), (torch.rand(3, 5) < 0.7).double()
    options = dict(clip_low=0.2, clip_high=0.28, dual_clip=dual_clip, beta=beta, kl=kl, aggregate=aggregate, max_len=6)
    ours, theirs = logps.clone().requires_grad_(), logps.clone().requires_grad_()
    loss, _ = clipped_kl_loss(ours, old, ref, A, mask, **options)
    want = brute_loss(theirs, old, ref, A, mask, **options)
    loss.backward()
    want.backward()
    assert math.isclose(loss.item(), want.item(), rel_tol=1e-9)
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-12, rtol=1e-9)
    assert torch.autograd.gradcheck(lambda x: clipped_kl_loss(x, old, ref, A, mask, **options)[0], (ours,))


def one_token(ratio, advantage, **options):
    """(objective, d objective / d ratio) of a single token."""
    r = torch.tensor([[ratio]], dtype=torch.float64, requires_grad=True)
    loss, _ = clipped_kl_loss(r.log(), torch.zeros(1, 1, dtype=torch.float64), None, torch.tensor([[advantage]]), torch.ones(1, 1), **options)
    (-loss).backward()
    return round(-loss.item(), 6), round(r.grad.item(), 6)


def test_clip_values_and_slopes():
    assert one_token(0.5, 1.0) == (0.5, 1.0)
    assert one_token(1.25, 1.0) == (1.2, 0.0)
    assert one_token(0.5, -1.0) == (-0.8, 0.0)
    assert one_token(1.5, -1.0) == (-1.5, -1.0)
    assert one_token(4.0, -1.0, dual_clip=3.0) == (-3.0, 0.0)
    assert one_token(1.25, 1.0, clip_high=0.28)[1] == 1.0
    assert one_token(1.29, 1.0, clip_high=0.28)[1] == 0.0


def test_loss_stays_finite():
    for difference in (1000.0, -1000.0):
        logps = torch.tensor([[-1.0 + difference]], requires_grad=True)
        loss, _ = clipped_kl_loss(logps, torch.tensor([[-1.0]]), torch.tensor([[-1.0 - difference]]), torch.tensor([[-1.0]]), torch.ones(1, 1), beta=0.1)
        loss.backward()
        assert torch.isfinite(loss) and torch.isfinite(logps.grad).all()


@pytest.mark.parametrize("kl, want", [("k1", [0, 0, 0]), ("k2", [.1213, -.1096, -.0116]), ("k3", [.1233, -.1282, .0049])])
def test_expected_gradient_of_the_kl_estimates(kl, want):
    """sum_y p(y) d/dtheta KL_estimate(y): which divergence does each estimate push down when it is used as a loss?"""
    theta = torch.tensor([.5, -.3, .2], dtype=torch.float64, requires_grad=True)
    logp = theta.log_softmax(0)
    exact = (logp.exp() * (logp + math.log(3))).sum()
    assert round(exact.item(), 5) == 0.04904
    gradient = torch.zeros(3, dtype=torch.float64)
    for y in range(3):
        loss, _ = clipped_kl_loss(logp[y].view(1, 1), logp[y].detach().view(1, 1), torch.full((1, 1), -math.log(3), dtype=torch.float64),
                                  torch.zeros(1, 1), torch.ones(1, 1), beta=1.0, kl=kl)
        gradient += logp[y].exp().detach() * torch.autograd.grad(loss, theta, retain_graph=True)[0]
    torch.testing.assert_close(gradient, torch.tensor(want, dtype=torch.float64), atol=6e-5, rtol=0)


def test_k3_values():
    for logp, ref, want in ((-1.0, -2.0, .3679), (-2.0, -1.0, .7183)):
        loss, _ = clipped_kl_loss(*(torch.tensor([[x]]) for x in (logp, logp, ref)), torch.zeros(1, 1), torch.ones(1, 1), beta=1.0)
        assert abs(loss.item() - want) < 1e-4


@pytest.mark.parametrize("aggregate, want", [("sequence", 1.5), ("token", 1.75), ("constant", .875)])
def test_aggregation_and_micro_batches(aggregate, want):
    """At ratio 1 the loss of a token is -A, so A = -L gives per-token losses L = [[1,0,0],[2,2,2]]."""
    mask, A = torch.tensor([[1.0, 0, 0], [1, 1, 1]]), -torch.tensor([[1.0, 0, 0], [2, 2, 2]])
    whole = torch.zeros(2, 3, requires_grad=True)
    loss, _ = clipped_kl_loss(whole, torch.zeros(2, 3), None, A, mask, aggregate=aggregate, max_len=4)
    assert abs(loss.item() - want) < 1e-6
    loss.backward()
    split = torch.zeros(2, 3, requires_grad=True)
    denominator = loss_denominator(mask, aggregate, 4)
    parts = [clipped_kl_loss(split[i:i + 1], torch.zeros(1, 3), None, A[i:i + 1], mask[i:i + 1], aggregate=aggregate, max_len=4,
                             denominator=denominator)[0] for i in range(2)]
    sum(parts).backward()
    assert abs(sum(parts).item() - want) < 1e-6
    torch.testing.assert_close(split.grad, whole.grad, atol=1e-6, rtol=0)


@pytest.mark.parametrize("aggregate", ["sequence", "token", "constant"])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_micro_batches_of_any_size(aggregate, size):
    torch.manual_seed(2)
    N, T = 7, 6
    old, ref, A, mask = -torch.rand(N, T), -torch.rand(N, T), torch.randn(N, T), (torch.rand(N, T) < .6).float()
    mask[3] = 0  # a response without tokens
    base = old + 0.3 * torch.randn(N, T)
    whole, split = base.clone().requires_grad_(), base.clone().requires_grad_()
    options = dict(beta=.04, aggregate=aggregate, max_len=T)
    loss, stats = clipped_kl_loss(whole, old, ref, A, mask, **options)
    loss.backward()
    meter, total = common.Meter(), 0.0
    for rows in torch.arange(N).split(size):
        part, s = clipped_kl_loss(split[rows], old[rows], ref[rows], A[rows], mask[rows], denominator=loss_denominator(mask, aggregate, T), **options)
        part.backward()
        meter.add(s)
        total += part.item()
    assert abs(total - loss.item()) < 1e-6
    torch.testing.assert_close(split.grad, whole.grad, atol=1e-6, rtol=0)
    for key, value in stats.items():  # metrics cover all micro-batches, not the last one
        torch.testing.assert_close(meter.sums[key], value)


@pytest.mark.parametrize("aggregate", ["sequence", "token", "constant"])
def test_empty_masks_and_garbage_on_padding(aggregate):
    bad = torch.tensor([[float("nan"), float("inf"), -float("inf")]])
    logps = torch.cat([torch.full((1, 3), -1.0), bad]).requires_grad_()
    mask = torch.tensor([[1.0, 1, 1], [0, 0, 0]])
    loss, stats = clipped_kl_loss(logps, logps.detach(), logps.detach(), torch.ones(2, 3), mask, beta=.1, aggregate=aggregate, max_len=3)
    loss.backward()
    assert torch.isfinite(loss) and all(torch.isfinite(v) for v in stats.values())
    assert torch.equal(logps.grad[1], torch.zeros(3))  # and not NaN
    empty = torch.zeros(2, 3, requires_grad=True)
    loss, _ = clipped_kl_loss(empty, torch.zeros(2, 3), None, torch.ones(2, 3), torch.zeros(2, 3), aggregate=aggregate, max_len=3)
    loss.backward()
    assert loss.item() == 0.0 and torch.equal(empty.grad, torch.zeros(2, 3))


def test_first_step_gradient_is_that_of_minus_A_logp():
    torch.manual_seed(0)
    logps = (-torch.rand(4, 5)).requires_grad_()
    A = group_advantages(torch.tensor([1.0, 0, 0, 1]), torch.zeros(4).long())[:, None].expand(4, 5)
    loss, stats = clipped_kl_loss(logps, logps.detach(), logps.detach(), A, torch.ones(4, 5), beta=.04, aggregate="sequence")
    loss.backward()
    assert abs(loss.item()) < 1e-6 and stats["ratio_error"] == 0 and stats["kl"] == 0
    plain = (-torch.rand(4, 5)).requires_grad_()
    (-(A * plain)).mean().backward()
    torch.testing.assert_close(logps.grad, plain.grad)
    assert logps.grad.norm() > 0


def test_functions_leave_their_arguments_alone():
    torch.manual_seed(0)
    tensors = [-torch.rand(3, 4), -torch.rand(3, 4), -torch.rand(3, 4), torch.randn(3, 4), torch.ones(3, 4)]
    before = copy.deepcopy(tensors)
    clipped_kl_loss(*tensors, beta=.1, dual_clip=3.0)
    rewards, groups = torch.tensor([1.0, 0, float("nan")]), torch.tensor([0, 0, 0])
    group_advantages(rewards, groups)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before)) and torch.isnan(rewards[2]) and rewards[0] == 1
    tokenizer, problems = common.toy_tokenizer(), common.story_problems(2, 0)
    saved = copy.deepcopy(problems)
    args = type("Args", (), dict(instruction="", thinking=False, max_prompt_length=99))
    common.encode_prompts(tokenizer, problems, args)
    assert problems == saved


# ---- evaluation -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("case", cases("pass_at_k"))
def test_pass_at_k_golden(case):
    assert abs(pass_at_k(case["n"], case["c"], case["k"]) - case["want"]) < 1e-6


def test_pass_at_k_by_enumeration_and_errors():
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
                assert math.isclose(pass_at_k(n, c, k), sum(map(any, draws)) / len(draws))
    for bad in ((4, 1, 5), (4, 5, 2), (4, 1, 0)):
        with pytest.raises(ValueError):
            pass_at_k(*bad)


def test_draw_batch_visits_everything_once_per_pass():
    problems = list(range(10))
    drawn = [p for step in range(1, 6) for p in common.draw_batch(problems, step, 4, seed=3)]
    assert sorted(drawn[:10]) == problems and sorted(drawn[10:20]) == problems
    assert drawn[:10] != drawn[10:20]
    assert common.draw_batch(problems, 3, 4, seed=3) == drawn[8:12]  # from (seed, step) alone: nothing to save
    assert len(common.draw_batch(problems, 2, 25, seed=0)) == 25     # larger than the data: several passes


# ---- the scorer's kernel -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_prob_kernel(temperature):
    """LogProb against log_softmax in float64: values, entropy, gradient, p near 1, -inf, bfloat16."""
    torch.manual_seed(0)
    z, y = torch.randn(5, 11, dtype=torch.float64), torch.tensor([0, 3, 10, 3, 7])
    plain = (z / temperature).log_softmax(-1)                                               # (5,11)
    for entropy in (False, True):
        logps, h = common.LogProb.apply(z.clone(), y, temperature, entropy)
        assert torch.allclose(logps, plain[torch.arange(5), y], atol=1e-12)
        assert (h is None) == (not entropy) and (h is None or torch.allclose(h, -(plain.exp() * plain).sum(-1), atol=1e-12))
    leaf, g = z.clone().requires_grad_(), torch.randn(5, dtype=torch.float64)
    expected, = torch.autograd.grad(((leaf / temperature).log_softmax(-1)[torch.arange(5), y] * g).sum(), leaf)
    for entropy in (False, True):
        gradient, = torch.autograd.grad((common.LogProb.apply(leaf * 1.0, y, temperature, entropy)[0] * g).sum(), leaf)
        assert torch.allclose(gradient, expected, atol=1e-12)

    sure = torch.zeros(1, 1000)
    sure[0, 4] = 18 * temperature                                                           # p_y = 0.99998
    exact = (sure.double() / temperature).log_softmax(-1)[0, 4].item()
    got = common.LogProb.apply(sure.clone(), torch.tensor([4]), temperature, False)[0].item()
    assert exact == pytest.approx(-1.5e-5, rel=0.1) and got == pytest.approx(exact, abs=3e-7)  # steps of float32 at 1

    hidden = z.float().masked_fill(torch.arange(11) == 5, -torch.inf).requires_grad_()      # a mask token's logit
    common.LogProb.apply(hidden * 1.0, y, temperature, False)[0].sum().backward()
    assert hidden.grad.isfinite().all() and (hidden.grad[:, 5] == 0).all()
    half = z.bfloat16().requires_grad_()
    logps, _ = common.LogProb.apply(half, y, temperature, False)
    logps.sum().backward()
    assert logps.dtype == torch.float32 and half.grad.dtype == torch.bfloat16
    assert torch.equal(half.detach(), z.bfloat16())                                         # only float32 is overwritten


def test_log_prob_kernel_refuses_a_second_backward_pass():
    z = torch.randn(2, 5, requires_grad=True)
    total = common.LogProb.apply(z * 1.0, torch.tensor([1, 2]), 1.0, False)[0].sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()

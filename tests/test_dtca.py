"""dtca.py against golden numbers, brute force, finite differences and its invariants."""
import csv
import dataclasses
import doctest
import itertools
import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch

import common
import dtca
from conftest import golden

cases = lambda name: [case for case in golden("dtca") if case["fn"] == name]


def test_doctests():
    result = doctest.testmod(dtca)
    assert result.failed == 0 and result.attempted >= 7


# ---- golden numbers

@pytest.mark.parametrize("case", cases("pos_weights"))
def test_golden_pos_weights(case):
    assert dtca.pos_weights(case["means"]) == pytest.approx(case["want"])


@pytest.mark.parametrize("case", cases("select_steps"))
def test_golden_select_steps(case):
    assert dtca.select_steps(case["scores"]) == case["want"]


@pytest.mark.parametrize("case", cases("entropy_change"))
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-7), (torch.float32, 1e-4)])
def test_golden_entropy_change(case, dtype, tolerance):
    got = dtca.entropy_change(torch.tensor(case["logits"], dtype=dtype), torch.tensor(case["actions"]),
                              torch.tensor(case["advantages"], dtype=dtype), case["estimator"])
    torch.testing.assert_close(got, torch.tensor(case["want"], dtype=dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", cases("calibrate"))
def test_golden_calibrate(case):
    weights = torch.tensor(case["weights"], dtype=torch.float64) if "weights" in case else None
    alpha, lam = dtca.calibrate(torch.tensor(case["alpha"], dtype=torch.float64),
                                torch.tensor(case["change"], dtype=torch.float64), weights=weights)
    assert float(lam) == pytest.approx(case["coefficient"], abs=1e-7)
    torch.testing.assert_close(alpha, torch.tensor(case["want"], dtype=torch.float64), rtol=1e-6, atol=1e-7)


# ---- step selection against brute force

def test_select_steps_is_the_smallest_set_that_reaches_the_mass():
    rng = torch.Generator().manual_seed(0)
    for trial in range(60):
        n = int(torch.randint(1, 9, (1,), generator=rng))
        scores = torch.randint(0, 5, (n,), generator=rng).tolist()                 # many ties, many zeros
        got = dtca.select_steps(scores, mass=0.7, low=0, high=99)
        reaching = [set(c) for size in range(n + 1) for c in itertools.combinations(range(n), size)
                    if sum(scores[i] for i in c) >= 0.7 * sum(scores) * (1 - 1e-9)]
        assert len(got) == min(map(len, reaching)) and set(got) in reaching
        for i, j in itertools.product(got, set(range(n)) - set(got)):              # the best ones; of equals the earlier
            assert (scores[i], -i) > (scores[j], -j)


def test_select_steps_clamps_and_orders():
    for n, low, high in itertools.product(range(1, 7), (0, 1, 2, 4), (4, 5, 32)):
        assert dtca.select_steps([0.0] * n, low=low, high=high) == list(range(min(low, n)))
        got = dtca.select_steps([1.0] * n, mass=1.0, low=low, high=high)
        assert got == list(range(min(n, high)))
    assert dtca.select_steps([]) == []
    assert dtca.select_steps([0.4, 0.8, 0.6, 0.2]) == [1, 2]                        # 1.4 of 2, though rounding says a bit less


# ---- entropy change

def entropy(z):
    return torch.special.entr(z.softmax(-1)).sum(-1)


@pytest.mark.parametrize("scale", [0.3, 2.0, 8.0])
def test_exact_entropy_change_is_the_derivative_of_the_entropy(scale):
    """Finite differences of H(z + eta A (onehot(y) - p))."""
    torch.manual_seed(0)
    z = scale * torch.randn(200, 7, dtype=torch.float64)
    y, A, eta = torch.randint(7, (200,)), torch.randn(200, dtype=torch.float64), 1e-5
    push = A[:, None] * (torch.nn.functional.one_hot(y, 7) - z.softmax(-1))
    slope = (entropy(z + eta * push) - entropy(z - eta * push)) / (2 * eta)
    torch.testing.assert_close(dtca.entropy_change(z, y, A), slope, rtol=1e-5, atol=1e-8)


def test_opefo_has_the_right_sign_for_two_tokens_but_not_in_general():
    torch.manual_seed(0)
    y, A = torch.randint(2, (500,)), torch.randn(500, dtype=torch.float64)
    z = 3 * torch.randn(500, 2, dtype=torch.float64)
    assert (dtca.entropy_change(z, y, A).sign() == dtca.entropy_change(z, y, A, "opefo").sign()).all()
    z = 3 * torch.randn(500, 12, dtype=torch.float64)
    same = dtca.entropy_change(z, y, A).sign() == dtca.entropy_change(z, y, A, "opefo").sign()
    assert 0.5 < same.double().mean() < 1.0


def test_entropy_change_with_a_forbidden_token_and_a_nearly_certain_one():
    z = torch.tensor([[2.0, 1.0, -math.inf], [14.0, 0.0, 1.0]], dtype=torch.float64)
    y, A = torch.tensor([0, 0]), torch.ones(2, dtype=torch.float64)
    for estimator in ("exact", "opefo"):
        wanted = dtca.entropy_change(z, y, A, estimator)
        assert wanted.isfinite().all()
        torch.testing.assert_close(wanted[0], dtca.entropy_change(z[0, :2], y[0], A[0], estimator))
        # p_y = 1 - 3e-6: float32 keeps its digits
        torch.testing.assert_close(dtca.entropy_change(z.float(), y, A.float(), estimator).double(), wanted, rtol=1e-4, atol=0)
    with pytest.raises(ValueError, match="opefo"):
        dtca.entropy_change(z, y, A, "other")


# ---- calibration's invariants

def credits(trial, one_sign=False):
    rng = torch.Generator().manual_seed(trial)
    n = int(torch.randint(1, 40, (1,), generator=rng))
    alpha = 0.05 + torch.rand(n, generator=rng, dtype=torch.float64)
    change = torch.randn(n, generator=rng, dtype=torch.float64) * 10 ** (4 * torch.randn(n, generator=rng, dtype=torch.float64))
    change[torch.rand(n, generator=rng) < 0.2] = 0.0
    return alpha, change.abs() * (-1) ** trial if one_sign else change, 1 / torch.randint(1, 9, (n,), generator=rng).double()


@pytest.mark.parametrize("trial", range(40))
def test_calibration_keeps_the_total_and_balances_the_sides(trial):
    alpha, change, weights = credits(trial)
    before = alpha.clone(), change.clone(), weights.clone()
    credit, lam = dtca.calibrate(alpha, change, weights=weights)
    torch.testing.assert_close((weights * credit).sum(), (weights * alpha).sum())
    assert (credit > 0).all() and abs(lam) <= 0.95
    assert torch.equal(credit[change == 0], alpha[change == 0])
    if abs(lam) < 0.95:  # the change of a token is proportional to its credit
        flow = weights * change * credit / alpha
        assert abs(flow.sum()) <= 1e-9 * max(flow.abs().sum(), 1e-300)
    for argument, copy in zip((alpha, change, weights), before):
        assert torch.equal(argument, copy)


@pytest.mark.parametrize("trial", range(10))
def test_calibration_has_nothing_to_balance(trial):
    alpha, change, weights = credits(trial, one_sign=True)
    torch.testing.assert_close(dtca.calibrate(alpha, change, weights=weights)[0], alpha)
    credit, lam = dtca.calibrate(alpha, 0 * change, weights=weights)                # A = 0
    assert torch.equal(credit, alpha) and lam == 0


def test_calibration_refuses_a_clip_that_would_silence_a_side():
    with pytest.raises(ValueError, match="clip"):
        dtca.calibrate(torch.ones(2), torch.ones(2), clip=1.0)
    assert dtca.calibrate(torch.ones(2), torch.tensor([1e9, -1.0]))[0].min() > 0


# ---- class weights and the credit inside a step

def test_pos_weights_edges():
    assert dtca.pos_weights({}) == {} and dtca.pos_weights({"X": 0.0, "NUM": 5.0}, 1, 1) == {"X": 1.0, "NUM": 1.0}
    with pytest.raises(ValueError, match="low"):
        dtca.pos_weights({"X": 1.0}, low=0.0)


def test_step_credit_against_a_loop():
    torch.manual_seed(0)
    weight, target = 0.8 + 0.4 * torch.rand(6, 12), torch.rand(6, 12) < 0.5
    target[0] = False
    alpha = dtca.step_credit(weight, target)
    assert (alpha[~target] == 0).all()
    for b, i in target.nonzero().tolist():
        together = [float(w) for w, t in zip(weight[b], target[b]) if t]
        assert float(alpha[b, i]) == pytest.approx(float(weight[b, i]) / (sum(together) / len(together)), rel=1e-5)
    assert torch.equal(dtca.step_credit(torch.ones(6, 12), target), target.float())      # exactly 1, not nearly


# ---- contributions of a hand-made model

class HandMade:
    """p at position j depends on what is visible there and beside it: all of it pulls at the logit of token (j mod 3)."""
    mask_id = 4

    def hidden(self, ids, attention_mask):
        seen = torch.where(ids == self.mask_id, 0, ids + 1).double() * attention_mask  # (B,L)
        pull = 0.7 * seen + torch.roll(seen, 1, 1) - 0.5 * torch.roll(seen, -1, 1)    # (B,L)
        target = torch.arange(ids.shape[1]) % 3
        logits = torch.zeros(*ids.shape, 5, dtype=torch.float64)
        logits[:, torch.arange(ids.shape[1]), target] = pull
        return logits

    def head(self, hidden):
        return hidden.index_fill(-1, torch.tensor([self.mask_id]), -math.inf)


def test_contributions_by_brute_force():
    torch.manual_seed(0)
    lm, ids = HandMade(), torch.randint(0, 4, (6, 9))
    attention = torch.ones(6, 9, dtype=torch.long)
    attention[0, :2] = 0
    masked = (torch.rand(6, 9) < 0.7) & attention.bool()
    commits = masked & (torch.rand(6, 9) < 0.4)
    gain, confidence, H = dtca.contributions(lm, ids, attention, masked, commits)
    assert len(gain) == int(commits.sum()) > 6 and (gain == 0).any() and (gain > 0.1).any()
    for k, (n, i) in enumerate(commits.nonzero().tolist()):
        x = [lm.mask_id if masked[n, j] else int(ids[n, j]) for j in range(9)]
        with_i = x[:i] + [int(ids[n, i])] + x[i + 1:]
        p, q = (lm.head(lm.hidden(torch.tensor([s]), attention[n:n + 1]))[0].softmax(-1) for s in (x, with_i))
        wanted = sum(float(q[j].max() - p[j].max()) for j in range(9) if masked[n, j] and j != i)
        assert float(gain[k]) == pytest.approx(max(0.0, wanted), abs=1e-6)
        assert float(confidence[k]) == pytest.approx(float(p[i, ids[n, i]]), abs=1e-6)
        assert float(H[k]) == pytest.approx(-sum(float(v) * math.log(v) for v in p[i] if v > 0), abs=1e-6)
    with pytest.raises(ValueError, match="masked"):
        dtca.contributions(lm, ids, attention, masked, ~masked)


def test_contributions_without_candidates():
    ids = torch.zeros(2, 3, dtype=torch.long)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert all(len(x) == 0 for x in dtca.contributions(HandMade(), ids, ids + 1, ~nothing, nothing))


# ---- parts of speech

def test_alignment_on_hand_made_cases():
    words = [(0, 5, "NOUN"), (5, 6, "PUNCT"), (7, 11, "VERB"), (11, 13, "SPACE")]   # "apple, buys\n\n"
    assert dtca.align_tags([(0, 3), (3, 6), (6, 11), (11, 13)], words) == ["NOUN", "NOUN", "VERB", "SPACE"]
    assert dtca.align_tags([(4, 6), (6, 7), (10, 12), (10, 13)], words) == ["NOUN", None, "VERB", "SPACE"]  # ties: the earlier
    assert dtca.align_tags([(0, 2)], []) == [None] and dtca.align_tags([], words) == []


@pytest.fixture(scope="module")
def subwords():
    """A real byte-level BPE tokenizer, so small that most words are cut into pieces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>", "<mask>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["the apples and the pens, then she buys another"] * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", mask_token="<mask>")


def tags_of(tokenizer, text, tag):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id, 7]
    mask = torch.tensor([[1.0] * (len(ids) - 1) + [0.0]])
    return ids, dtca.tag_tokens(tokenizer, torch.tensor([ids]), mask, tag)[0]


def test_every_piece_of_a_word_takes_its_class(subwords):
    """By hand: whole words are tagged NOUN, VERB, ... by a tagger that the test writes."""
    text = "the apples, x² 🍎 \n\nshe buys"
    words = [(0, 3, "DET"), (4, 10, "NOUN"), (10, 11, "PUNCT"), (12, 14, "SYM"), (15, 16, "INTJ"), (17, 19, "SPACE"),
             (19, 22, "PRON"), (23, 27, "VERB")]
    ids, tags = tags_of(subwords, text, lambda texts: [words for _ in texts])
    assert tags[-2:] == ["X", "X"] and len(ids) == len(tags)                         # the end token, and what is behind it
    pieces, characters = {}, 0
    for k, name in enumerate(tags[:-2]):                                             # the tokens of each class spell its word
        pieces.setdefault(name, []).append(ids[k])
    spelled = {name: subwords.decode(part).strip(" ") for name, part in pieces.items()}
    assert spelled == {"DET": "the", "NOUN": "apples", "PUNCT": ",", "SYM": "x²", "INTJ": "🍎", "PRON": "she", "VERB": "buys",
                       "SPACE": "\n\n"}
    assert len(pieces["INTJ"]) >= 4                                                  # the bytes of one character stay together


def english_model():
    import spacy
    found = [name for name in spacy.util.get_installed_models() if name.startswith("en_")]
    return found[0] if found else pytest.skip("no English spaCy model is installed: python -m spacy download en_core_web_sm")


def test_spacy_tags_sub_words_of_real_sentences(subwords):
    pytest.importorskip("spacy", reason="spaCy is optional: pip install spacy")
    key, tag = dtca.load_tagger(english_model())
    text = "Natalia sold 48 clips in April.\nShe sold half as many in May, so 48/2 = <<48/2=24>>24 clips.\n#### 72"
    ids, tags = tags_of(subwords, text, tag)
    assert tags[-2:] == ["X", "X"]
    plain = [(word, name) for start, end, name in tag([text])[0] for word in [text[start:end]]]
    assert ("clips", "NOUN") in plain and ("sold", "VERB") in plain and ("April", "PROPN") in plain
    spelled = {}
    for k, name in enumerate(tags[:-2]):
        spelled[name] = spelled.get(name, []) + [ids[k]]
    for name in {name for _, name in plain} - {"SPACE"}:                             # spaCy's own X ("<") among them
        letters = "".join(word for word, other in plain if other == name)
        assert subwords.decode(spelled[name]).replace(" ", "") == letters.replace(" ", "")
    assert key.startswith("en_") and key[-1].isdigit()


def test_a_spacy_model_without_or_with_unknown_classes(monkeypatch):
    import sys
    from types import SimpleNamespace as Fake

    class Token(str):
        idx, pos_ = 0, ""

    nlp = lambda text: [Token(text)]
    monkeypatch.setitem(sys.modules, "spacy", Fake(load=lambda name, exclude: nlp))
    with pytest.raises(common.InputError, match="no parts of speech"):
        dtca.load_tagger("blank")
    Token.pos_ = "NOUN"
    nlp = type("Nlp", (), {"meta": {"version": "1"}, "__call__": lambda self, text: [Token(text)],
                           "pipe": lambda self, texts: [[Token(text)] for text in texts]})()
    key, tag = dtca.load_tagger("fake")
    Token.pos_ = ""
    assert key == "fake 1" and tag(["abc"]) == [[(0, 3, "X")]]


def test_taggers_that_are_not_there(monkeypatch):
    with pytest.raises(common.InputError, match="install spacy|spacy download"):
        dtca.load_tagger("no_such_model")
    import sys
    monkeypatch.setitem(sys.modules, "spacy", None)                                  # as if it were not installed
    with pytest.raises(common.InputError, match="pip install spacy"):
        dtca.load_tagger("en_core_web_sm")


def test_the_word_list_covers_the_toys_vocabulary():
    tokenizer = common.toy_tokenizer()
    for piece, i in tokenizer.get_vocab().items():
        if i not in tokenizer.all_special_ids:
            assert dtca.tag_tokens(tokenizer, torch.tensor([[i]]), torch.ones(1, 1), dtca.load_tagger("words")[1]) != [["X"]], piece
    _, tags = tags_of(tokenizer, "Tom starts with 5 apples. then 5 + 12 = 17. Answer: 17", dtca.load_tagger("words")[1])
    assert tags == ("PROPN VERB ADP NUM NOUN PUNCT ADV NUM SYM NUM SYM NUM PUNCT NOUN PUNCT NUM X X").split()


# ---- the states that are trained

def hand_made_rollout(N=7, P=4, T=16, steps=8, seed=0):
    torch.manual_seed(seed)
    y, commit_step = torch.randint(0, 4, (N, T)), torch.randint(0, steps, (N, T))
    mask = (torch.arange(T) < 1 + 2 * torch.arange(N)[:, None]).float()                   # the first response: one token
    prompt_mask = (torch.arange(P) >= torch.arange(N)[:, None] % P).long()
    return common.Rollout(torch.randint(0, 4, (N, P)), prompt_mask, y, mask, torch.zeros(N).long(), mask[:, -1] > 0, [""] * N,
                          common.Trace(commit_step, torch.rand(N, T), None))


def test_choose_states_against_a_loop():
    rollout = hand_made_rollout()
    commit_step, confidence, _ = rollout.trace
    weight = 0.8 + 0.4 * torch.rand(commit_step.shape)
    states, got = dtca.choose_states(rollout, weight, 4, 0.7, 1, 32), {}
    for b, n in enumerate(states.row.tolist()):
        times = {int(commit_step[n, i]) for i in states.target[b].nonzero()[:, 0]}
        assert len(times) == 1
        got.setdefault(n, []).append((times.pop(), b))
    for n in range(len(commit_step)):
        valid, scores = range(int(rollout.completion_mask[n].sum())), {}
        for i in valid:
            t = int(commit_step[n, i])
            scores[t] = scores.get(t, 0.0) + float(weight[n, i]) * (1 - float(confidence[n, i]))
        ranked, chosen = sorted(scores, key=scores.get, reverse=True), []
        while sum(scores[t] for t in chosen) < 0.7 * sum(scores.values()):
            chosen.append(ranked[len(chosen)])
        assert sorted(t for t, _ in got[n]) == sorted(chosen)
        for t, b in got[n]:
            together = [i for i in valid if commit_step[n, i] == t]
            assert states.target[b].nonzero()[:, 0].tolist() == together
            assert states.divisor[b].tolist() == [len(chosen) if i in together else 0 for i in range(16)]
            visible = [int(rollout.completion_ids[n, i]) if commit_step[n, i] < t else 4 for i in range(16)]
            assert states.ids[b].tolist() == rollout.prompt_ids[n].tolist() + visible    # padding, too, as the sampler saw it
            assert states.attention[b].tolist() == rollout.prompt_mask[n].tolist() + [1] * 16


@pytest.mark.parametrize("micro_batch", [1, 3, 99])
def test_the_loss_is_a_mean_over_targets_then_steps_then_responses(micro_batch):
    """Value and gradient of the loss as train calls it, against nested loops over the definition."""
    rollout = hand_made_rollout(seed=1)
    states = dtca.choose_states(rollout, torch.ones(7, 16), 4, 0.7, 2, 32)
    B, N = len(states.row), 7
    new, old, ref, A = (torch.randn(B, 16, dtype=torch.float64) for _ in range(4))
    new.requires_grad_()
    options = dict(clip_low=0.2, clip_high=0.2, beta=0.3, aggregate="sequence", denominator=N)
    loss = sum(common.clipped_kl_loss(new[m], old[m], ref[m], A[m], states.divisor[m], **options)[0]
               for m in torch.arange(B).split(micro_batch))
    per_response = []
    for n in range(N):
        per_step = []
        for b in (states.row == n).nonzero()[:, 0]:
            tokens = []
            for i in states.target[b].nonzero()[:, 0]:
                r, x = (new[b, i] - old[b, i]).exp(), ref[b, i] - new[b, i]
                tokens.append(-torch.minimum(r * A[b, i], r.clamp(0.8, 1.2) * A[b, i]) + 0.3 * (x.exp() - x - 1))
            per_step.append(sum(tokens) / len(tokens))
        per_response.append(sum(per_step) / len(per_step))
    wanted = sum(per_response) / N
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(torch.autograd.grad(loss, new)[0], torch.autograd.grad(wanted, new)[0])


WARMUP = 12  # a handful of steps: its texts are noise, so the runs below bring their own reward


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A --checkpoints folder with the diffusion toy, and a small file of problems."""
    folder = tmp_path_factory.mktemp("diffusion")
    with pytest.MonkeyPatch.context() as patch:
        demonstrations = common.toy_demonstrations
        patch.setattr(common, "toy_demonstrations", lambda tokenizer, count, *rest: demonstrations(tokenizer, 64, *rest))
        common.toy_diffusion(folder / f"toy-diffusion-2steps-{WARMUP}", WARMUP, story_steps=2)
    (folder / "stories.jsonl").write_text("\n".join(map(json.dumps, common.story_problems(14, 0))))
    return folder


@pytest.fixture(scope="module")
def toy_lm(checkpoints):
    """(lm, tokenizer, args) of that toy. Do not train it in place."""
    args = common.parse_args(dtca.Args, dtca.TOY, ["--checkpoints", str(checkpoints), "--warmup-steps", str(WARMUP)])
    return *common.load_diffusion_policy(args), args


def sample(toy_lm, count=4, group=3):
    lm, tokenizer, args = toy_lm
    torch.manual_seed(3)
    problems = common.encode_prompts(tokenizer, common.story_problems(count, 0), args)
    return common.generate(lm, tokenizer, [p["prompt_ids"] for p in problems], group, args)


def test_scores_of_states_one_token_at_a_time(toy_lm):
    lm, tokenizer, args = toy_lm
    args = dataclasses.replace(args, micro_batch=5, chunk_size=3)
    rollout = sample(toy_lm)
    states = dtca.choose_states(rollout, torch.ones_like(rollout.completion_mask), lm.mask_id, 0.9, 2, 32)
    A = torch.randn(states.target.shape)
    logps, change = dtca.score_states(lm, states, args, A)
    assert dtca.score_states(lm, states, args)[1] is None
    assert (logps[~states.target] == 0).all() and (change[~states.target] == 0).all()
    for b, i in states.target.nonzero().tolist()[::7]:
        n, P = int(states.row[b]), rollout.prompt_ids.shape[1]
        t, prompt = rollout.trace.commit_step[n, i], rollout.prompt_ids[n][rollout.prompt_mask[n] > 0]   # no padding
        state = torch.where(rollout.trace.commit_step[n] >= t, lm.mask_id, rollout.completion_ids[n])
        with torch.no_grad():
            logits = lm.logits(torch.cat([prompt, state])[None])[0, len(prompt) + i].double()
        y = rollout.completion_ids[n, i]
        assert float(logps[b, i]) == pytest.approx(float(logits.log_softmax(-1)[y]), abs=1e-4)
        assert float(rollout.trace.confidence[n, i]) == pytest.approx(float(logits.softmax(-1)[y]), abs=1e-4)
        assert float(change[b, i]) == pytest.approx(float(dtca.entropy_change(logits, y, A[b, i].double())), abs=1e-4)


def test_step_1_has_ratio_exactly_1(toy_lm):
    lm, _, args = toy_lm
    rollout = sample(toy_lm)
    states = dtca.choose_states(rollout, torch.ones_like(rollout.completion_mask), lm.mask_id, 0.7, 2, 32)
    old, _ = dtca.score_states(lm, states, args)
    new, _ = dtca.state_logps(lm, states, torch.arange(len(old)), args.chunk_size)
    assert torch.equal(new.detach(), old) and new.requires_grad


# ---- the script

def noise_reward(text, problem):
    return float(sum(map(ord, text)) % 2)                                                 # right half of the time


@pytest.fixture
def train(checkpoints, tmp_path, monkeypatch):
    """train("--name", "a", ...) runs dtca.train in this process, in an empty folder, and returns (the run's folder, args)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dtca, "reward_correct", noise_reward)

    def run(*flags):
        small = ["--checkpoints", checkpoints, "--warmup-steps", WARMUP, "--data", checkpoints / "stories.jsonl", "--prompts-per-step", 3,
                 "--group-size", 4, "--steps", 2, "--eval-problems", 2, "--eval-samples", 1, "--table-rollouts", 4,
                 "--mini-batches", 1, *flags]
        args = common.parse_args(dtca.Args, dtca.TOY, list(map(str, small)))
        dtca.train(args)
        return tmp_path / "runs" / args.name, args
    return run


def plain_step_selected_training(args):
    """Policy gradient on the hardest steps of each response: no tags, no weights, no calibration -> the trained model."""
    (lm, tokenizer), (reference, _) = common.load_diffusion_policy(args), common.load_diffusion_policy(args)
    problems = common.encode_prompts(tokenizer, common.load_problems(args)[0], args)
    optimizer = torch.optim.AdamW(lm.model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    for step in range(1, args.steps + 1):
        torch.manual_seed(args.seed * 1_000_003 + step)
        batch = common.draw_batch(problems, step, args.prompts_per_step, args.seed)
        rollout = common.generate(lm, tokenizer, [p["prompt_ids"] for p in batch], args.group_size, args)
        rewards = torch.tensor([noise_reward(t, batch[i // args.group_size]) for i, t in enumerate(rollout.texts)])
        advantages, (commit_step, confidence, _) = common.group_advantages(rewards, rollout.group_ids), rollout.trace
        assert advantages.any()
        states = []                                                    # (response, masked, trained, what a token is divided by)
        for n in range(len(rewards)):
            valid, doubt = rollout.completion_mask[n] > 0, 1 - confidence[n]
            scores = {t: float(doubt[valid & (commit_step[n] == t)].sum()) for t in sorted(set(commit_step[n][valid].tolist()))}
            ranked, chosen = sorted(scores, key=lambda t: -scores[t]), []
            while len(chosen) < min(2, len(ranked)) or sum(scores[t] for t in chosen) < 0.7 * sum(scores.values()):
                chosen.append(ranked[len(chosen)])
            for t in sorted(chosen):
                trained = valid & (commit_step[n] == t)
                states.append((n, commit_step[n] >= t, trained, int(trained.sum()) * len(chosen)))
        n, masked, trained, divisor = (torch.tensor(x) if isinstance(x[0], int) else torch.stack(x) for x in zip(*states))
        y, P = rollout.completion_ids[n], rollout.prompt_ids.shape[1]
        ids = torch.cat([rollout.prompt_ids[n], torch.where(masked, lm.mask_id, y)], dim=1)
        seen = torch.cat([rollout.prompt_mask[n], torch.ones_like(y)], dim=1)

        def log_prob(model):
            logits = model.head(model.hidden(ids, seen)[:, P:][trained])
            logps, _ = common.LogProb.apply(logits, y[trained], 1.0, False)  # tested by itself; another log_softmax differs in the last bit
            return torch.zeros(y.shape).masked_scatter(trained, logps)

        with torch.no_grad():
            old, ref = log_prob(lm), log_prob(reference)
        for _ in range(args.inner_iterations):
            new, A = log_prob(lm), advantages[n][:, None]
            ratio, x = (new - old).exp(), ref - new
            token_loss = -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A) + args.beta * (x.exp() - x - 1)
            loss = (torch.where(trained, token_loss, 0.0) / divisor[:, None]).sum() / len(rewards)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(lm.model.parameters(), args.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    return lm.model


def test_neutral_setting_is_the_plain_step_selected_loss_bit_for_bit(train):
    folder, args = train("--name", "neutral", "--pos-low", 1, "--pos-high", 1, "--no-calibration", "--inner-iterations", 2)
    from safetensors.torch import load_file
    trained, plain = load_file(folder / "checkpoint" / "model.safetensors"), plain_step_selected_training(args).state_dict()
    assert trained.keys() <= plain.keys() and all(torch.equal(trained[k], plain[k]) for k in trained)
    folder, _ = train("--name", "credit", "--no-calibration", "--inner-iterations", 2, "--table", folder / "table.json")
    credit = load_file(folder / "checkpoint" / "model.safetensors")
    assert not all(torch.equal(trained[k], credit[k]) for k in trained)                  # the comparison can fail


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_leaves_its_table_and_pictures(train, capsys):
    folder, args = train("--name", "a")
    for name in ("table.json", "classes.csv", "classes.png", "credit.png", "denoising.png", "curve.png", "metrics.csv", "samples.txt"):
        assert (folder / name).stat().st_size > 0, name
    classes, table = read_csv(folder / "classes.csv"), json.loads((folder / "table.json").read_text())
    assert [row["class"] for row in classes] == list(table["classes"]) and "NUM" in table["classes"]
    assert {row["weight"] for row in classes} >= {"0.8", "1.2"}
    printed = capsys.readouterr().out
    assert "contribution" in printed and "PUNCT" in printed
    for row in read_csv(folder / "metrics.csv")[1:]:
        assert float(row["chosen_steps"]) >= 1 and float(row["grad_norm"]) > 0 and 0 <= float(row["lam"]) <= 0.95
        assert float(row["kl"]) >= 0 and float(row["largest_credit"]) >= 1
    # Used again, the same table is printed and nothing is measured; of another model or tagger it is refused.
    again, _ = train("--name", "b", "--table", folder / "table.json", "--steps", 1)
    assert json.loads((again / "table.json").read_text()) == table
    with pytest.raises(common.InputError, match="is for model 'toy.*, not '"):
        train("--name", "c", "--table", folder / "table.json", "--model", str(folder / "checkpoint"))
    assert not (folder.parent / "c").exists()


def test_ablations_and_estimators_change_the_update(train):
    from safetensors.torch import load_file
    table = train("--name", "full", "--steps", 1)[0] / "table.json"
    runs = {name: train("--name", name, "--steps", 1, "--table", table, *flags)[0] for name, flags in {
        "same": [], "no-credit": ["--no-credit"], "no-calibration": ["--no-calibration"], "opefo": ["--estimator", "opefo"],
        "all-steps": ["--step-mass", 1]}.items()}
    weights = {name: load_file(folder / "checkpoint" / "model.safetensors")["lm_head.weight"] for name, folder in runs.items()}
    full = load_file(table.parent / "checkpoint" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(full, weights.pop("same")) and not any(torch.equal(full, other) for other in weights.values())
    rows = {name: read_csv(folder / "metrics.csv")[1] for name, folder in runs.items()}
    assert float(rows["no-calibration"]["lam"]) == 0 < float(rows["no-credit"]["lam"])
    assert float(rows["all-steps"]["chosen_steps"]) > float(rows["same"]["chosen_steps"])


def test_resume_is_bit_equal(train):
    from safetensors.torch import load_file
    folders = [train("--name", "straight", "--save-every", 1)[0]]
    train("--name", "halves", "--steps", 1, "--save-every", 1)
    folders.append(train("--name", "halves", "--save-every", 1, "--resume")[0])
    a, b = (load_file(folder / "checkpoint" / "model.safetensors") for folder in folders)
    assert all(torch.equal(a[k], b[k]) for k in a)
    strip = lambda row: {k: v for k, v in row.items() if k != "seconds" and not k.startswith("eval")}
    rows = [[strip(row) for row in read_csv(folder / "metrics.csv")[1:]] for folder in folders]
    assert rows[0] == rows[1] and len(rows[0]) == 2


@pytest.mark.parametrize("flags, message", [
    (["--pos-low", 0], "pos-low"), (["--pos-low", 1.3], "pos-low"), (["--estimator", "other"], "--estimator must be one of exact, opefo"),
    (["--step-mass", 0], "step-mass"), (["--min-steps", 5, "--max-steps", 4], "min-steps"), (["--table", "missing.json"], "missing.json"),
    (["--tagger", "no_such_model"], "spacy"), (["--block-length", 7], "block length")])
def test_bad_input(train, flags, message, tmp_path):
    with pytest.raises(common.InputError, match=message):
        train("--name", "bad", *flags)
    assert not (tmp_path / "runs").exists()


def test_the_script_from_the_command_line(checkpoints, tmp_path):
    def run(*flags):
        command = [sys.executable, dtca.__file__, "--checkpoints", checkpoints, "--warmup-steps", WARMUP, *flags]
        return subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, timeout=300,
                              env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    done = run("--pos-low", 2)
    assert done.returncode == 2 and done.stderr.strip().splitlines()[-1].startswith("error: ") and "Traceback" not in done.stderr
    done = run("--data", checkpoints / "stories.jsonl", "--name", "a", "--steps", 1, "--prompts-per-step", 2, "--eval-problems", 2,
               "--eval-samples", 1, "--table-rollouts", 2)
    assert done.returncode == 0, done.stderr
    sanity = re.search(r"\|ratio - 1\| = (\S+) .*= (\S+) \(0\), loss = (\S+) ", done.stdout + done.stderr)
    assert [float(x) for x in sanity.groups()] == [0, 0, 0]


def test_spacy_tags_in_a_run(train):
    pytest.importorskip("spacy", reason="spaCy is optional: pip install spacy")
    folder, _ = train("--name", "spacy", "--steps", 1, "--tagger", english_model())
    table = json.loads((folder / "table.json").read_text())
    assert table["key"]["tagger"].startswith("en_") and {"NUM", "PUNCT"} <= set(table["classes"])


# ---- the offline table

def test_class_table_against_numpy():
    import numpy as np
    rng = np.random.default_rng(0)
    records = [(str(rng.choice(["NUM", "NOUN", "X"])), float(c), int(rng.integers(3)), float(p), float(H))
               for c, p, H in rng.random((200, 3))] + [("SYM", 9.0, 1, 1.0, 0.0)]
    table = dtca.class_table(records)
    assert list(table)[0] == "SYM" and table["SYM"]["se"] is None and sum(row["count"] for row in table.values()) == 201
    means = [row["contribution"] for row in table.values()]
    assert means == sorted(means, reverse=True)
    for name in ("NUM", "NOUN", "X"):
        c, stage, p, H = (np.array(column) for column in zip(*(r[1:] for r in records if r[0] == name)))
        row = table[name]
        assert row["contribution"] == pytest.approx(c.mean()) and row["se"] == pytest.approx(c.std(ddof=1) / np.sqrt(len(c)))
        assert [row[s] for s in ("early", "middle", "late")] == pytest.approx([(stage == k).mean() for k in range(3)])
        assert (row["confidence"], row["entropy"]) == pytest.approx((p.mean(), H.mean()))


def test_measured_classes_of_the_toy(toy_lm):
    lm, tokenizer, args = toy_lm
    prompts = [p["prompt_ids"] for p in common.encode_prompts(tokenizer, common.story_problems(5, 0), args)]
    records = dtca.measure_classes(lm, tokenizer, dtca.load_tagger("words")[1], prompts, dataclasses.replace(args, micro_batch=7))
    torch.manual_seed(args.seed)                                                          # the same responses once more
    rollout = common.generate(lm, tokenizer, prompts, 1, args)
    assert len(records) == int(rollout.completion_mask.sum())
    seen = sorted(round(confidence, 4) for *_, confidence, _ in records)
    assert seen == pytest.approx(sorted(rollout.trace.confidence[rollout.completion_mask > 0].tolist()), abs=2e-4)
    assert all(c >= 0 and 0 <= H < 6 for _, c, _, _, H in records)
    stages = sorted(stage for _, _, stage, _, _ in records)
    assert stages == sorted((rollout.trace.commit_step[rollout.completion_mask > 0] // 4).tolist())     # thirds of 12 steps


def test_measured_classes_with_odd_blocks(toy_lm):
    """Half of 25 tokens is no multiple of five blocks: the table rounds up within a block, whatever --diffusion-steps is."""
    lm, tokenizer, args = toy_lm
    prompts = [p["prompt_ids"] for p in common.encode_prompts(tokenizer, common.story_problems(2, 0), args)]
    odd = dataclasses.replace(args, max_new_tokens=25, block_length=5, diffusion_steps=25)
    assert dtca.measure_classes(lm, tokenizer, dtca.load_tagger("words")[1], prompts, odd)


def test_a_saved_table_is_refused_for_another_model_or_tagger(tmp_path):
    key = {"version": 1, "model": "toy", "tagger": "words 1"}
    table = dtca.class_table([("NUM", 1.0, 0, 0.5, 0.7), ("DET", 0.0, 2, 1.0, 0.0)])
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"key": key, "classes": table}))
    assert dtca.load_table(path, key) == table
    for other in ({"model": "other"}, {"tagger": "words 2"}, {"version": 2}):
        with pytest.raises(common.InputError, match=f"is for {list(other)[0]}"):
            dtca.load_table(path, {**key, **other})
    for broken in ("", "[]", "{}", '{"key": {}, "classes": {"NUM": {}}}', '{"key": {}, "classes": {}}', '{"key": {}, "classes": {"NUM": {"contribution": 1.0}}}', '{"key": {}, "classes": 3}'):
        path.write_text(broken)
        with pytest.raises(common.InputError, match="not a table"):
            dtca.load_table(path, key)
    with pytest.raises(common.InputError, match="not a table"):
        dtca.load_table(tmp_path / "missing.json", key)

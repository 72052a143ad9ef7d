"""Token credit in TRL's trainer: plain when neutral, ours with DelTA, the same on two processes; and the two losses compared."""
import os
import subprocess
import sys
import types

import pytest
import torch

import common
import datc
import delta
import gctca
from conftest import ROOT, WARMUP

pytest.importorskip("trl", reason="needs trl (pip install -r tests/requirements.txt)")
pytest.importorskip("datasets", reason="needs datasets")
sys.path.insert(0, str(ROOT / "notebooks"))
import trl_token_credit as out  # noqa: E402


SMALL = dict(max_steps=10, per_device_train_batch_size=16, num_generations=4, disable_tqdm=True)


def flags(checkpoints):
    return ["--checkpoints", str(checkpoints), "--warmup-steps", str(WARMUP), "--reward-steps", "5"]


@pytest.fixture(scope="module")
def trainer(toy_checkpoints, tmp_path_factory):
    return out.toy_trainer(out.delta_credit, flags(toy_checkpoints), output_dir=str(tmp_path_factory.mktemp("trl")), **SMALL)


def draw(trainer, cls):
    """A rollout batch (16 rows, four of each problem) as `cls` makes it, from the same noise each time."""
    torch.manual_seed(1)
    return cls._generate_and_score_completions(trainer, [trainer.train_dataset[i // 4] for i in range(16)])


@pytest.fixture(scope="module")
def rollout(trainer):
    """One rollout batch as plain TRL makes it: advantages (N,)."""
    batch = draw(trainer, out.GRPOTrainer)
    assert batch["advantages"].dim() == 1 and batch["advantages"].any()
    return batch


def with_credit(trainer, monkeypatch, credit):
    """The same batch as the subclass hands it to the loss: advantages (N,T)."""
    monkeypatch.setattr(trainer, "credit", credit)
    return draw(trainer, out.TokenCreditTrainer)


def our_scores(trainer, rollout):
    """This project's own logps (N,T) and hidden (N,T,H) of the rollout, with gradient."""
    rows = [rollout[key] for key in ("prompt_ids", "prompt_mask", "completion_ids")]
    return common.token_logps(trainer.model, *rows, rollout["completion_mask"].float(), want=("hidden",))


def loss_and_gradient(trainer, batch):
    """TRL's loss on a batch and the gradient of every weight (eval mode: no gradient accumulation in the denominators)."""
    trainer.model.eval().zero_grad()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def neutral_delta(trainer, batch, old, A, mask):
    return delta.credit_weights(delta.token_proxies(old.hidden, old.logps), A, mask, low=1.0, high=1.0)


@pytest.mark.parametrize("credit", [out.no_credit, neutral_delta])
def test_neutral_weights_change_nothing(trainer, rollout, monkeypatch, credit):
    batch = with_credit(trainer, monkeypatch, credit)
    assert torch.equal(batch["completion_ids"], rollout["completion_ids"])
    assert batch["advantages"].shape == batch["completion_mask"].shape
    plain, plain_gradient = loss_and_gradient(trainer, rollout)
    loss, gradient = loss_and_gradient(trainer, batch)
    assert torch.equal(loss, plain)
    assert all(torch.equal(gradient[name], plain_gradient[name]) for name in gradient)
    assert any(g.abs().max() > 0 for g in plain_gradient.values())


def test_delta_equals_this_projects_loss(trainer, rollout, monkeypatch):
    A, mask = rollout["advantages"], rollout["completion_mask"].float()
    batch = with_credit(trainer, monkeypatch, out.delta_credit)
    got, got_gradient = loss_and_gradient(trainer, batch)

    trainer.model.zero_grad()
    scores = our_scores(trainer, rollout)
    w = delta.credit_weights(delta.token_proxies(scores.hidden, scores.logps.detach()), A, mask)
    loss, _ = common.clipped_kl_loss(scores.logps, scores.logps, None, A[:, None] * w, mask, clip_high=0.28)
    loss.backward()
    assert (batch["advantages"] - A[:, None] * w).abs().max() < 1e-5 and w[mask.bool()].std() > 0.01
    assert abs(got - loss) < 1e-5
    for name, p in trainer.model.named_parameters():
        assert (p.grad - got_gradient[name]).abs().max() < 1e-5, name


@pytest.mark.parametrize("rows_at_once", [5, 16])
def test_old_scores_do_not_depend_on_the_rows_at_once(trainer, rollout, monkeypatch, rows_at_once):
    monkeypatch.setattr(trainer.args, "per_device_train_batch_size", rows_at_once)
    old, expected, mask = trainer.old_scores(rollout), our_scores(trainer, rollout), rollout["completion_mask"].bool()
    assert (old.logps - expected.logps)[mask].abs().max() < 1e-5
    assert (old.hidden - expected.hidden)[mask].abs().max() < 1e-4
    assert not old.hidden.requires_grad


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("delta_", [None, 4.0])
@pytest.mark.parametrize("loss_type, aggregate", [("grpo", "sequence"), ("bnpo", "token"), ("dapo", "token"), ("dr_grpo", "constant")])
def test_the_two_losses_are_equal(trainer, monkeypatch, loss_type, aggregate, beta, delta_):
    """Value and gradient on the same random tensors. TRL knows the KL estimate k3 only. TRL's `delta` caps every ratio, ours
    (dual clip) acts where A < 0 only: the same thing, since for A > 0 the ordinary clip is already below it. One difference stays:
    TRL multiplies the KL by the ratio if use_bias_correction_kl is on (then it is unbiased off-policy, too); the papers do not.
    """
    torch.manual_seed(3)
    N, T = 5, 7
    mask = (torch.arange(T) < torch.tensor([7, 3, 1, 5, 6])[:, None]).float()                # (N,T)
    logps = (-3 * torch.rand(N, T)).requires_grad_()                                        # (N,T)
    old, ref = logps.detach() + torch.randn(N, T), logps.detach() + 0.3 * torch.randn(N, T)
    A = torch.randn(N, T)
    ids = torch.ones(N, T, dtype=torch.long)
    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", lambda *a, **k: (logps, torch.zeros(N, T), None))
    for name, value in dict(loss_type=loss_type, beta=beta, epsilon_low=0.2, epsilon_high=0.28).items():
        monkeypatch.setattr(trainer, name, value)
    monkeypatch.setattr(trainer.args, "delta", delta_)
    monkeypatch.setattr(trainer.args, "use_bias_correction_kl", False)
    trainer.model.eval()
    theirs = trainer._compute_loss(trainer.model, dict(
        prompt_ids=ids, prompt_mask=ids, completion_ids=ids, completion_mask=mask, advantages=A, old_per_token_logps=old,
        ref_per_token_logps=ref, num_items_in_batch=mask.sum()))
    expected, = torch.autograd.grad(theirs, logps)
    ours, _ = common.clipped_kl_loss(logps, old, ref, A, mask, clip_low=0.2, clip_high=0.28, dual_clip=delta_, beta=beta,
                                     aggregate=aggregate, max_len=trainer.max_completion_length)
    gradient, = torch.autograd.grad(ours, logps)
    assert abs(ours - theirs) < 1e-6 and abs(theirs) > 1e-3
    assert (gradient - expected).abs().max() < 1e-6


def test_gctca_equals_this_projects_weights(trainer, rollout, monkeypatch):
    """w is made of ranks of k, and near-equal k may swap ranks between two passes that round differently. So: the same values of w
    in each response, and in the order of k, up to rounding."""
    A, mask, tokenizer = rollout["advantages"], rollout["completion_mask"].float(), trainer.processing_class
    batch = with_credit(trainer, monkeypatch, out.gctca_credit)
    questions = [trainer.train_dataset[i // 4]["question"] for i in range(16)]
    negative = common.pad_left([common.chat_ids(tokenizer, q, common.WRONG_ANSWER) for q in questions], tokenizer.pad_token_id)
    with torch.no_grad():
        k = gctca.guidance_divergence(our_scores(trainer, rollout).logps,
                                      common.token_logps(trainer.model, *negative, rollout["completion_ids"], mask).logps)  # (N,T)
    ours, compared = gctca.credit_weights(k, mask), 0
    for i in A.nonzero().flatten():
        valid = mask[i].bool()
        w, expected, k_i = (batch["advantages"][i] / A[i])[valid], ours[i][valid], k[i][valid]
        assert (w.sort().values - expected.sort().values).abs().max() < 1e-5 and w.std() > 0.1
        assert k_i[w.argsort()].diff().min() > -1e-4
        compared += 1
    assert compared >= 4


def test_datc_equals_this_projects_token_advantages(toy_checkpoints, tmp_path):
    """From the sampled ids on: reward model's score -> group advantage -> work -> A w, at a temperature that is not 1."""
    trainer = out.toy_trainer(out.DatcCredit, flags(toy_checkpoints), output_dir=str(tmp_path), temperature=0.7, **SMALL)
    credit, inputs = trainer.credit, [trainer.train_dataset[i // 4] for i in range(16)]
    batch = trainer._generate_and_score_completions(inputs)
    mask, group_ids = batch["completion_mask"].float(), torch.arange(16) // 4
    rollout = types.SimpleNamespace(completion_ids=batch["completion_ids"], completion_mask=mask, group_ids=group_ids)
    rewards, gradients, scored = datc.judge(credit.reward_model, credit.reward_tokenizer, trainer.processing_class, rollout,
                                            inputs[::4], credit.args, credit.end_ids, True)
    A = common.group_advantages(rewards, group_ids)                                         # (16,)
    with torch.no_grad():
        old = common.token_logps(trainer.model, *(batch[key] for key in ("prompt_ids", "prompt_mask", "completion_ids")), mask,
                                 temperature=0.7, want=("hidden",))
    ours = trainer.old_scores(batch)
    assert ((ours.logps - old.logps) * mask).abs().max() < 1e-5
    assert ((ours.hidden - old.hidden) * mask[..., None]).abs().max() < 1e-5
    W = datc.work_from_hidden(old.hidden, trainer.model.get_output_embeddings(), gradients, credit.embeddings, batch["completion_ids"],
                              mask, temperature=0.7, chunk_size=256, decodable=None, top_k=credit.args.top_k)
    w = datc.credit_weights(W, A, mask, credit.args.lam, credit.args.gate, scored=scored)
    assert (batch["advantages"] - A[:, None] * w).abs().max() < 1e-4 and w[mask.bool()].std() > 0.1 and A.any()


def test_ten_steps_in_one_process(trainer):
    trainer.train()
    assert trainer.state.global_step == 10
    assert all(row["grad_norm"] > 0 for row in trainer.state.log_history if row.get("frac_reward_zero_std", 1) < 1)


def test_without_trl_the_error_says_what_to_install(tmp_path):
    (tmp_path / "trl.py").write_text("raise ImportError('none here')")  # found before the installed one
    done = subprocess.run([sys.executable, str(ROOT / "notebooks" / "trl_token_credit.py")], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and "pip install trl datasets" in done.stderr.splitlines()[-1]


TWO = """
import runpy, sys, torch
folder, x, checkpoint_flags = sys.argv[2], torch.load(sys.argv[2] + "/x.pt", weights_only=True), sys.argv[3:]
sys.path.insert(0, sys.argv[1])
import trl_token_credit as out
trainer = out.toy_trainer(out.DatcCredit, checkpoint_flags, per_device_train_batch_size=8, disable_tqdm=True)
a = trainer.accelerator
assert a.num_processes == 2

half = slice(a.process_index * 4, a.process_index * 4 + 4)
T = (7, 9)[a.process_index]                       # processes pad to their own longest response
old = out.common.Scores(x["logps"][half, :T], None, x["hidden"][half, :T])
w = out.delta_credit(trainer, None, old, x["A"][half], x["mask"][half, :T])
torch.save(w, f"{folder}/{a.process_index}.pt")

trainer.train()                                   # ten steps of DATC, then ten of DelTA as a user starts them
assert trainer.state.global_step == 10
sys.argv = [out.__file__, "--credit", "delta", "--steps", "10", "--batch", "8", *checkpoint_flags]
runpy.run_path(out.__file__, run_name="__main__")
"""


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory, toy_checkpoints):
    """TWO, run once on two CPU processes (gloo): a rollout batch x, the folder with both halves' weights, and what was printed."""
    folder = tmp_path_factory.mktemp("two")
    torch.manual_seed(0)
    mask = (torch.arange(9) < torch.tensor([7, 4, 2, 6, 9, 5, 1, 8])[:, None]).float()       # (8,9)
    x = {"logps": -2 * torch.rand(8, 9) * mask, "hidden": torch.randn(8, 9, 6) * mask[..., None], "A": torch.randn(8), "mask": mask}
    torch.save(x, folder / "x.pt")
    (folder / "two.py").write_text(TWO)
    # Two processes must not make the same reward model at once, so it is made here.
    datc.load_reward_model(common.parse_args(datc.Args, datc.TOY, flags(toy_checkpoints)))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "two.py",
                           str(ROOT / "notebooks"), str(folder), *flags(toy_checkpoints)], cwd=folder, capture_output=True, text=True,
                          timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return x, folder, done.stdout


def test_weights_do_not_depend_on_the_number_of_processes(two_processes):
    x, folder, _ = two_processes
    expected = delta.credit_weights(delta.token_proxies(x["hidden"], x["logps"]), x["A"], x["mask"])  # (8,9) one process
    for process, T in ((0, 7), (1, 9)):
        w = torch.load(folder / f"{process}.pt", weights_only=True)                         # (4,T)
        assert (w - expected[4 * process:4 * process + 4, :T]).abs().max() < 1e-6
    local = delta.credit_weights(delta.token_proxies(x["hidden"][:4], x["logps"][:4]), x["A"][:4], x["mask"][:4])
    assert (local - expected[:4]).abs().max() > 1e-3  # without the reduction it would differ


def test_ten_steps_on_two_processes(two_processes):
    printed = two_processes[2]
    assert "process 0 of 2: 10 steps" in printed and "process 1 of 2: 10 steps" in printed

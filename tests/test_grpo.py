"""grpo.py as a user runs it: end to end on the toy, resumed, interrupted, fed with bad input; and its loop's promises."""
import copy
import csv
import json
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

import common
import grpo
from conftest import ROOT, WARMUP


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_help_shows_every_argument_and_the_preset(run_script):
    text = run_script("grpo.py", "--help", small=False).stdout
    for name in grpo.Args.__dataclass_fields__:
        assert f"--{name}" in text
    assert "the toy's preset" in text and "--learning_rate" in text


def test_two_steps_leave_everything(run_script, tmp_path):
    done = run_script("grpo.py", "--steps", 2, "--name", "a", "--group-size", 8)
    run = tmp_path / "runs" / "a"
    for name in ("args.json", "metrics.csv", "curve.png", "credit.png", "samples.txt", "checkpoint/model.safetensors"):
        assert (run / name).stat().st_size > 0, name
    assert not list(run.glob("*.tmp")) and not list(run.glob("*.old"))
    sanity = re.search(r"\|ratio - 1\| = (\S+) .*= (\S+) \(0\), loss = (\S+) .*norm = (\S+) ", done.stdout + done.stderr)
    error, kl, loss, norm = map(float, sanity.groups())
    assert error <= 1e-6 and abs(kl) <= 1e-6 and norm > 0
    rows = read_csv(run / "metrics.csv")
    assert [r["step"] for r in rows] == ["0", "1", "2"] and float(rows[2]["eval_mean"]) >= 0
    assert json.loads((run / "args.json").read_text())["learning_rate"] == grpo.TOY["learning_rate"]
    run_script("grpo.py", "--eval-only", "--model", run / "checkpoint")  # loads with from_pretrained, knows the toy's preset


def test_resume_is_bit_equal(run_script, tmp_path):
    options = ["--inner-iterations", 2, "--mini-batches", 2, "--save-every", 2, "--eval-every", 0]
    run_script("grpo.py", "--steps", 4, "--name", "straight", *options)
    run_script("grpo.py", "--steps", 2, "--name", "halves", *options)
    run_script("grpo.py", "--steps", 4, "--name", "halves", "--resume", *options)
    from safetensors.torch import load_file
    a, b = (load_file(tmp_path / "runs" / n / "checkpoint" / "model.safetensors") for n in ("straight", "halves"))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    start = load_file(next((tmp_path / "runs").parent.glob("runs/straight/checkpoint/model.safetensors")))
    assert start.keys() == a.keys()
    x, y = (torch.load(tmp_path / "runs" / n / "checkpoint" / "optimizer.pt", weights_only=True) for n in ("straight", "halves"))
    for i in x["state"]:
        for key in x["state"][i]:
            assert torch.equal(x["state"][i][key], y["state"][i][key])
    rows = [[{k: v for k, v in r.items() if k != "seconds"} for r in read_csv(tmp_path / "runs" / n / "metrics.csv") if r["step"] in "1234"]
            for n in ("straight", "halves")]
    for p, q in zip(*rows):  # the halves' run was also evaluated at its first end
        assert {k: v for k, v in p.items() if not k.startswith("eval")} == {k: v for k, v in q.items() if not k.startswith("eval")}
    assert [r["step"] for r in rows[1]] == ["1", "2", "3", "4"]


def test_rows_after_the_checkpoint_are_run_again(run_script, tmp_path):
    """A run killed between two checkpoints goes on from the last one, without doubled rows."""
    run_script("grpo.py", "--steps", 3, "--name", "k", "--save-every", 1, "--eval-every", 0)
    folder = tmp_path / "runs" / "k"
    state = folder / "checkpoint" / "state.json"
    state.write_text('{"step": 2}')  # as if the kill had come after step 3's row and before its checkpoint
    (folder / "checkpoint").rename(folder / "checkpoint.old")  # and in the middle of the two renames
    run_script("grpo.py", "--steps", 3, "--name", "k", "--save-every", 1, "--eval-every", 0, "--resume")
    assert [r["step"] for r in read_csv(folder / "metrics.csv")] == ["0", "1", "2", "3"]


def test_ctrl_c_saves(tmp_path, toy_checkpoints):
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "grpo.py"), "--checkpoints", str(toy_checkpoints), "--warmup-steps", str(WARMUP), "--name", "c", "--steps",
         "500", "--prompts-per-step", "4", "--eval-problems", "4", "--eval-samples", "2"], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    csv_file = tmp_path / "runs" / "c" / "metrics.csv"
    deadline = time.time() + 120
    while time.time() < deadline and not (csv_file.exists() and len(read_csv(csv_file)) > 3):
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "--resume --name c" in output
    step = json.loads((tmp_path / "runs/c/checkpoint/state.json").read_text())["step"]
    assert step == int(read_csv(csv_file)[-1]["step"]) >= 3


@pytest.mark.parametrize("flags, word", [
    (["--group-size", "1"], "at least 2"), (["--temperature", "0"], "temperature"), (["--temperature", "nan"], "temperature"),
    (["--steps", "0"], "steps"), (["--model", "/no/such/folder"], "no such folder"), (["--model", "no-such-owner/no-such-model"], "--model"),
    (["--data", "missing.jsonl"], "no such file"), (["--data", "bad.jsonl"], "line 2"), (["--data", "fields.jsonl"], "line 1"),
    (["--data", "empty.jsonl"], "no problem"), (["--data", "binary.jsonl"], "UTF-8"), (["--data", "one.jsonl"], "--eval-problems"),
    (["--max-prompt-length", "3"], "raise it"), (["--task", "poetry"], "story"), (["--resume"], "--name"), (["--resume", "--name", "none"], "no checkpoint"),
    (["--kl", "k4"], "k1, k2, k3"), (["--aggregate", "sum"], "sequence, token, constant"), (["--clip-low", "1.5"], "--clip-low"),
    (["--dual-clip", "0.5"], "--dual-clip"), (["--mini-batches", "99"], "--mini-batches"), (["--device", "cuda"], "CUDA"), (["--device", "tpu"], "--device"),
    (["--warmup-steps", "5"], "at least 12"), (["--story-steps", "9"], "story-steps"), (["--learning-rate", "0"], "learning-rate"), (["--dtype", "int8"], "dtype"),
])
def test_bad_input_is_one_line_and_code_2(flags, word, tmp_path, monkeypatch, toy_checkpoints, capsys):
    if flags[-1] == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    good = '{"question": "1+1?", "answer": "#### 2"}\n'
    for name, text in {"bad": good + "{oops\n", "fields": '{"q": 1}\n', "empty": "\n\n", "one": good}.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    small = ["--checkpoints", str(toy_checkpoints), "--warmup-steps", str(WARMUP), "--prompts-per-step", "2", "--group-size", "2"]
    monkeypatch.setattr(sys, "argv", ["grpo.py", *small, *flags])
    with pytest.raises(SystemExit) as stop:
        common.main(grpo.train, grpo.Args, grpo.TOY, grpo.__doc__)
    error = capsys.readouterr().err.strip()
    assert stop.value.code == 2
    assert error.splitlines()[-1].startswith("error: ") and word in error.splitlines()[-1]


def test_bad_input_in_a_real_process(run_script):
    done = run_script("grpo.py", "--group-size", 1, code=2)
    assert done.stderr.startswith("error: --group-size") and len(done.stderr.strip().splitlines()) == 1


def test_existing_names_are_not_overwritten(run_script, tmp_path):
    run_script("grpo.py", "--steps", 1, "--name", "a")
    assert "--resume" in run_script("grpo.py", "--steps", 1, "--name", "a", code=2).stderr
    assert "group_size" in run_script("grpo.py", "--steps", 2, "--name", "a", "--resume", "--group-size", 8, code=2).stderr


def test_gsm8k_format_and_dropped_prompts(run_script, tmp_path):
    """Own problems in GSM8K's format; a prompt over the limit is dropped and counted, never cut."""
    story = [{"question": p["question"], "answer": p["answer"]} for p in common.story_problems(12, 5)]
    story.append({"question": story[0]["question"] * 10, "answer": "1"})
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(p) + "\n" for p in story))
    done = run_script("grpo.py", "--data", "own.jsonl", "--steps", 1, "--max-prompt-length", 60)
    assert "1 of 9 prompts are longer than --max-prompt-length 60 and were dropped" in done.stdout


# ---- the loop's promises, inside one process ---------------------------------------------------------------

def trained(toy, tmp_path, monkeypatch, **changes):
    """Run grpo.train on the toy -> (weights, rows)."""
    monkeypatch.chdir(tmp_path)
    args = copy.copy(toy[2])
    settings = dict(steps=1, prompts_per_step=4, group_size=4, eval_problems=2, eval_samples=1, eval_every=0, name=f"r{time.time_ns()}")
    for key, value in {**settings, **changes}.items():
        setattr(args, key, value)
    grpo.train(args)
    from safetensors.torch import load_file
    folder = tmp_path / "runs" / args.name
    return load_file(folder / "checkpoint" / "model.safetensors"), read_csv(folder / "metrics.csv")


@pytest.mark.parametrize("aggregate", ["sequence", "token", "constant"])
def test_micro_batch_size_changes_nothing(toy, tmp_path, monkeypatch, aggregate):
    a, rows_a = trained(toy, tmp_path, monkeypatch, micro_batch=16, aggregate=aggregate)
    b, rows_b = trained(toy, tmp_path, monkeypatch, micro_batch=3, aggregate=aggregate)
    assert abs(float(rows_a[1]["loss"]) - float(rows_b[1]["loss"])) < 1e-6
    assert abs(float(rows_a[1]["grad_norm"]) - float(rows_b[1]["grad_norm"])) < 1e-5
    for key in rows_a[1]:
        if key not in ("seconds", "loss", "ratio_error", "kl") and rows_a[1][key]:
            assert float(rows_a[1][key]) == pytest.approx(float(rows_b[1][key]), rel=1e-3, abs=1e-5), key


def test_beta_zero_loads_no_reference(toy, tmp_path, monkeypatch):
    loads = []
    real = common.load_policy
    monkeypatch.setattr(grpo, "load_policy", lambda *a: loads.append(a) or real(*a))
    trained(toy, tmp_path, monkeypatch, beta=0.0)
    assert len(loads) == 1
    trained(toy, tmp_path, monkeypatch, beta=0.04)
    assert len(loads) == 3


def test_reference_is_bit_equal_after_training(toy, tmp_path, monkeypatch):
    frozen = []
    monkeypatch.setattr(grpo, "freeze", lambda model: frozen.append((common.freeze(model), copy.deepcopy(model.state_dict()))) or frozen[0][0])
    weights, _ = trained(toy, tmp_path, monkeypatch, steps=2, learning_rate=1e-2)
    reference, before = frozen[0]
    assert all(torch.equal(v, before[k]) for k, v in reference.state_dict().items())
    assert any(not torch.equal(v, before[k]) for k, v in weights.items())  # while the policy did move
    assert all(p.grad is None for p in reference.parameters())


def test_non_finite_updates_are_skipped_and_three_end_the_run(toy, tmp_path, monkeypatch):
    real, calls = grpo.clipped_kl_loss, []

    def poisoned(*args, **options):
        loss, stats = real(*args, **options)
        calls.append(1)
        return (loss * float("nan") if len(calls) in bad else loss), stats

    monkeypatch.setattr(grpo, "clipped_kl_loss", poisoned)
    bad = {1, 2}
    weights, rows = trained(toy, tmp_path, monkeypatch, steps=3, learning_rate=1e-3)
    assert [r["skipped"] for r in rows[1:]] == ["1", "1", "0"]
    assert all(torch.isfinite(w).all() for w in weights.values())
    calls.clear()
    bad = {2, 3, 4}
    with pytest.raises(common.InputError, match="three updates in a row"):
        trained(toy, tmp_path, monkeypatch, steps=9, save_every=1, name="nan")
    assert all(torch.isfinite(p).all() for p in common.load_policy(toy[2], tmp_path / "runs/nan/checkpoint")[0].parameters())


def test_unscorable_responses_are_left_out(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "reward_correct", lambda text, problem: None)
    before = {k: v.clone() for k, v in toy[0].state_dict().items()}
    weights, rows = trained(toy, tmp_path, monkeypatch, beta=0.0)
    assert rows[1]["unscorable"] == "16" and rows[1]["zero_variance_groups"] == "1"
    assert all(torch.equal(v, before[k]) for k, v in weights.items())  # no signal, no update


def test_interrupted_save_keeps_the_old_checkpoint(tmp_path):
    common.save_folder(tmp_path / "c", lambda path: (path / "x").write_text("old"))

    def broken(path):
        (path / "x").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        common.save_folder(tmp_path / "c", broken)
    assert (tmp_path / "c" / "x").read_text() == "old"
    common.save_folder(tmp_path / "c", lambda path: (path / "x").write_text("new"))
    assert (tmp_path / "c" / "x").read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["c"]

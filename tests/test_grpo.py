"""grpo.py as a user runs it: end to end on the toy, resumed, interrupted, fed with bad input; and its loop's promises."""
import copy
import csv
import json
import os
import re
import shutil
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
    (["--foo", "3"], "--foo"), (["word"], "word"), (["--learning-rate", "nan"], "finite"), (["--beta", "nan"], "finite"), (["--clip-high", "inf"], "finite"),
    (["--max-grad-norm", "-1"], "--max-grad-norm"), (["--seed", "1" + "0" * 14], "--seed"), (["--eval-every", "-1"], "--eval-every"),
    (["--name", "../out"], "--name"), (["--name", "n" * 300], "--name"), (["--eval-data", "one.jsonl"], "needs --data"), (["--data", "missing"], "no such file"),
    (["--data", "three.jsonl", "--eval-data", "missing.jsonl"], "--eval-data missing.jsonl"), (["--data", "surrogate.jsonl"], "line 2"),
    (["--data", "three.jsonl", "--eval-problems", "1"], "unknown to the model's tokenizer"),
    (["--max-new-tokens", "512"], "512 positions"), (["--model", "damaged"], "--model damaged"), (["--checkpoints", "one.jsonl/x"], "one.jsonl"),
])
def test_bad_input_is_one_line_and_code_2(flags, word, tmp_path, monkeypatch, toy_checkpoints, capsys):
    if flags[-1] == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    good = '{"question": "1+1?", "answer": "#### 2"}\n'
    for name, text in {"bad": good + "{oops\n", "fields": '{"q": 1}\n', "empty": "\n\n", "one": good}.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "three.jsonl").write_text("\ufeff" + 3 * '{"question": "Why is that so?", "answer": "#### 2"}\n')  # with a byte order mark
    (tmp_path / "surrogate.jsonl").write_text(good + '{"question": "\\ud800", "answer": "#### 2"}\n')
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    shutil.copytree(toy_checkpoints / f"toy-policy-2steps-{WARMUP}", tmp_path / "damaged")
    weights = tmp_path / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    small = ["--checkpoints", str(toy_checkpoints), "--warmup-steps", str(WARMUP), "--prompts-per-step", "2", "--group-size", "2"]
    monkeypatch.setattr(sys, "argv", ["grpo.py", *small, *flags])
    with pytest.raises(SystemExit) as stop:
        common.main(grpo.train, grpo.Args, grpo.TOY, grpo.__doc__)
    error = capsys.readouterr().err.strip()
    assert stop.value.code == 2
    assert error.splitlines()[-1].startswith("error: ") and word in error.splitlines()[-1]


@pytest.mark.parametrize("file, content", [
    ("checkpoint/optimizer.pt", b"PK"), ("checkpoint/optimizer.pt", None), ("checkpoint/model.safetensors", b"half"), ("checkpoint/state.json", b""),
    ("args.json", None), ("args.json", b'{"steps"'), ("metrics.csv", None), ("metrics.csv", b"no,column\n1,2\n"),
])
def test_resuming_a_damaged_run_is_one_line(file, content, damaged_run, tmp_path, monkeypatch, capsys):
    flags, folder = damaged_run
    shutil.copytree(folder, tmp_path / "runs" / "d")
    (tmp_path / "runs" / "d" / file).unlink()
    if content is not None:
        (tmp_path / "runs" / "d" / file).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["grpo.py", *flags, "--steps", "2", "--resume", "--name", "d"])
    with pytest.raises(SystemExit) as stop:
        common.main(grpo.train, grpo.Args, grpo.TOY, grpo.__doc__)
    assert stop.value.code == 2 and capsys.readouterr().err.splitlines()[-1].startswith("error: ")


@pytest.fixture(scope="module")
def damaged_run(toy_checkpoints, tmp_path_factory):
    """(flags, folder) of a small run with a checkpoint, to be damaged in a copy."""
    place = tmp_path_factory.mktemp("damaged")
    flags = ["--checkpoints", str(toy_checkpoints), "--warmup-steps", str(WARMUP), "--prompts-per-step", "2", "--group-size", "2",
             "--eval-problems", "2", "--eval-samples", "1", "--eval-every", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        grpo.train(common.parse_args(grpo.Args, grpo.TOY, [*flags, "--steps", "1", "--name", "d"]))
    return flags, place / "runs" / "d"


def test_resume_needs_the_name_alone(damaged_run, tmp_path, monkeypatch):
    """What Ctrl-C prints: the run's own settings stand in for the command line, and other ones are refused."""
    shutil.copytree(damaged_run[1], tmp_path / "runs" / "d")
    monkeypatch.chdir(tmp_path)
    parse = lambda *flags: common.parse_args(grpo.Args, grpo.TOY, ["--resume", "--name", "d", *flags])
    grpo.train(parse("--steps", "2"))
    assert [r["step"] for r in read_csv(tmp_path / "runs" / "d" / "metrics.csv")] == ["0", "1", "2"]
    with pytest.raises(common.InputError, match="group_size"):
        grpo.train(parse("--steps", "3", "--group-size", "8"))


def test_resume_refuses_another_scripts_run(damaged_run, tmp_path, monkeypatch):
    flags, folder = damaged_run
    shutil.copytree(folder, tmp_path / "runs" / "d")
    monkeypatch.chdir(tmp_path)
    import delta
    with pytest.raises(common.InputError, match="a run of grpo.py"):
        delta.train(common.parse_args(delta.Args, delta.TOY, [*flags, "--steps", "2", "--resume", "--name", "d"]))


def test_a_failed_start_does_not_take_the_name(damaged_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    parse = lambda *more: common.parse_args(grpo.Args, grpo.TOY, [*damaged_run[0], "--steps", "1", "--name", "n", *more])
    with pytest.raises(common.InputError, match="empty"):
        grpo.train(parse("--model", "./empty"))
    assert (tmp_path / "runs" / "n").is_dir()
    grpo.train(parse())
    assert [r["step"] for r in read_csv(tmp_path / "runs" / "n" / "metrics.csv")] == ["0", "1"]


def test_models_that_are_no_causal_language_model(toy, tmp_path):
    """A missing head would be random and a diffusion model would be read left to right, both without any error."""
    import transformers
    args = copy.copy(toy[2])
    config = copy.deepcopy(toy[0].config)
    config.num_labels = 1
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "head")
    toy[1].save_pretrained(tmp_path / "head")
    with pytest.raises(common.InputError, match="lm_head"):
        common.load_policy(args, tmp_path / "head")
    toy[0].save_pretrained(tmp_path / "diffusion")
    toy[1].save_pretrained(tmp_path / "diffusion")
    file = tmp_path / "diffusion" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "mask_token_id": 5}))
    with pytest.raises(common.InputError, match="daca.py"):
        common.load_policy(args, tmp_path / "diffusion")


@pytest.mark.parametrize("step, finished", [(1, False), (2, True)])
def test_a_signal_in_the_last_step_does_not_cost_the_result(step, finished, toy, tmp_path, monkeypatch):
    real, calls = grpo.step_metrics, []

    def killed(*a):
        calls.append(1)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*a)

    monkeypatch.setattr(grpo, "step_metrics", killed)
    if finished:
        trained(toy, tmp_path, monkeypatch, steps=2, name="s")
    else:
        with pytest.raises(SystemExit) as stop:
            trained(toy, tmp_path, monkeypatch, steps=2, name="s")
        assert stop.value.code == 130
    assert (tmp_path / "runs/s/curve.png").exists() == finished
    assert json.loads((tmp_path / "runs/s/checkpoint/state.json").read_text())["step"] == step


def test_as_many_updates_as_mini_batches(toy, tmp_path, monkeypatch):
    """16 responses in 6 mini-batches: torch.chunk would make them 3, 3, 3, 3, 3, 1; in 7: only 6."""
    sizes = []
    real = grpo.loss_denominator
    monkeypatch.setattr(grpo, "loss_denominator", lambda mask, *a: sizes.append(len(mask)) or real(mask, *a))
    trained(toy, tmp_path, monkeypatch, mini_batches=7)
    assert sizes == [3, 3, 2, 2, 2, 2, 2]


def test_answers_without_a_number(toy, tmp_path, monkeypatch, capsys):
    """Said at the start; where nothing can be scored, accuracy is NaN and not 0."""
    story = [{"question": p["question"], "answer": "none"} for p in common.story_problems(6, 5)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(p) + "\n" for p in story))
    _, rows = trained(toy, tmp_path, monkeypatch, data=str(tmp_path / "own.jsonl"), eval_samples=2)
    assert "6 of 6 answers hold no number" in capsys.readouterr().out
    assert rows[0]["eval_greedy"] == rows[0]["eval_mean"] == rows[0]["eval_pass@2"] == "nan" and rows[1]["unscorable"] == "16"


def test_stories_that_do_not_fit_are_announced(capsys):
    for flags, said in (([], False), (["--story-steps", "4"], True), (["--story-steps", "4", "--max-new-tokens", "38"], False)):
        common.parse_args(grpo.Args, grpo.TOY, flags)
        assert ("cuts it off" in capsys.readouterr().out) == said
    answer = common.story_problems(1, 0, steps=4)[0]["answer"]
    assert len(common.toy_tokenizer()(answer, add_special_tokens=False)["input_ids"]) == 9 + 7 * 4


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

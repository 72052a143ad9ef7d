"""The memory plan against the bytes of real small models, and the whole GPU check at small size on the CPU."""
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import common
import gpu_check
from conftest import ROOT

SIZES = dict(micro_batch=3, prompt=10, completion=22, chunk_size=16, sample_batch=4, strata=2, beta=0.04, dtype="float32", lora_rank=0, gradient_checkpointing=False)
NUMBERS = dict(vocab_size=300, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
QWEN3 = ("Qwen3", False, dict(**NUMBERS, head_dim=16, tie_word_embeddings=True))
LLAMA = ("Llama", False, dict(**NUMBERS, tie_word_embeddings=False))
LLADA = ("Llama", True, dict(**NUMBERS, tie_word_embeddings=False))
LORA = dict(lora_rank=4, dtype="bfloat16")


def settings(**values):
    return SimpleNamespace(**{**SIZES, **values})


def real(shape, s):
    """(model, optimizer) as the scripts make them, with memory: no skeleton, no fake tensors."""
    import transformers
    kind, _, numbers = shape
    model = getattr(transformers, kind + "ForCausalLM")(getattr(transformers, kind + "Config")(**numbers)).to(getattr(torch, s.dtype)).eval()
    return common.make_trainable(model, SimpleNamespace(learning_rate=1e-4, seed=0, **vars(s)))


@pytest.mark.parametrize("shape, values", [(QWEN3, {}), (LLAMA, {}), (QWEN3, LORA), (LLADA, LORA), (LLADA, dict(dtype="bfloat16"))])
def test_weights_gradients_and_optimiser_are_exact(shape, values):
    s = settings(**values)
    model, optimizer = real(shape, s)
    gpu_check.log_probs(model, shape, s, "cpu").sum().backward()
    optimizer.step()
    weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    gradients = [p.grad.untyped_storage().nbytes() for p in model.parameters() if p.grad is not None]
    states = [x.untyped_storage().nbytes() for state in optimizer.state.values() for x in state.values()]
    planned = gpu_check.plan(shape, s)
    assert (planned["weights"], planned["gradients"], planned["optimiser"]) == (sum(weights.values()), sum(gradients), sum(states))
    assert planned["reference model"] == (0 if s.lora_rank else planned["weights"])


@pytest.mark.parametrize("shape", [QWEN3, LLAMA, LLADA])
@pytest.mark.parametrize("values", [{}, dict(gradient_checkpointing=True), dict(LORA, gradient_checkpointing=True)])
@pytest.mark.parametrize("autocast", [False, True])
def test_activations_are_what_saved_tensor_hooks_count(shape, values, autocast):
    s = settings(**values)
    model, _ = real(shape, s)
    own, saved = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(tensor):  # kept alive by the graph, so no address is used twice
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor
    with gpu_check.bfloat16_arithmetic(autocast), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        logps = gpu_check.log_probs(model, shape, s, "cpu")
    planned = gpu_check.plan(shape, s, autocast)["activations"]
    assert logps.requires_grad and sum(saved.values()) > 10_000
    assert abs(planned / sum(saved.values()) - 1) < 0.15


def test_gradient_checkpointing_and_longer_batches_move_the_plan():
    small, checkpointed, longer = (gpu_check.plan(QWEN3, settings(**v)) for v in ({}, dict(gradient_checkpointing=True), dict(micro_batch=6)))
    assert checkpointed["activations"] < 0.4 * small["activations"] and checkpointed["training, peak"] < small["training, peak"]
    assert longer["activations"] > 1.5 * small["activations"] and longer["optimiser"] == small["optimiser"]
    assert gpu_check.plan(QWEN3, settings(beta=0.0))["reference model"] == 0
    assert gpu_check.plan(LLADA, settings(strata=4))["activations"] > 1.5 * gpu_check.plan(LLADA, settings())["activations"]


def test_live_counts_what_is_alive():
    with gpu_check.Live() as live:
        a = torch.ones(1000)                    # 4,000 bytes
        b = a.view(10, 100)[2:]                 # a view: none
        assert (live.now, live.peak) == (4000, 4000)
        c = (a + a) + a                         # 8,000 more for a moment, 4,000 of them stay
        assert (live.now, live.peak) == (8000, 12000)
        del a, c
        assert live.now == 4000                 # b holds a's memory
        del b
        assert (live.now, live.peak) == (0, 12000)


def test_a_published_size():
    """Qwen3-0.6B: 596 million weights with tied embeddings; LLaDA-8B: 8.02 billion. Published in their model cards."""
    count = lambda name: sum(p.numel() for p in gpu_check.skeleton(gpu_check.SHAPES[name], settings()).parameters())
    assert round(count("Qwen3-0.6B") / 1e6) == 596 and round(count("LLaDA-8B") / 1e9, 2) == 8.02 and round(count("SmolLM2-135M") / 1e5) == 1345
    assert gpu_check.SHAPES["toy"][2]["vocab_size"] == len(common.toy_tokenizer())


def script(*flags, code=0):
    done = subprocess.run([sys.executable, str(ROOT / "tests" / "gpu_check.py"), *map(str, flags)], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_the_plan_on_the_command_line():
    text = script("--plan", "--model", "toy", "--gradient-checkpointing", "--lora-rank", 2).stdout
    assert [line.split("  ")[0] for line in text.splitlines()] == [
        "weights", "reference model", "gradients", "optimiser", "activations", "logits, casts, workspace", "training, peak", "sampling, peak"]


def test_the_whole_check_at_small_size(tmp_path):
    if not torch.cuda.is_available():
        assert "--device cpu --small" in script(code=2).stderr
    script("--device", "cpu", "--small", "--out", tmp_path / "table.md")
    table = (tmp_path / "table.md").read_text()
    assert table.startswith("# gpu_check on CPU") and "MISSED" not in table and table.count(" ok |") >= 12
    for word in ("float32 on the CPU", "ratio - 1", "peak memory", "chunked", "delta", "gctca", "gctca --guidance group", "datc", "daca", "dtca", "tokens per second"):
        assert word in table

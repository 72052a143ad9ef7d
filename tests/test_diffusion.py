"""The masked diffusion half of common.py: loading, sampling with its trace, likelihoods. References are the plain slow versions."""
import copy
import json
import math
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common
from common import (InputError, MaskedDiffusionLM, coupled_logps, draw_strata, load_diffusion, masked_logps, num_transfer,
                    one_step_logps, row_uniforms, sample_diffusion, stratified_logps, uni_logps)
from conftest import ROOT

FIXTURE = ROOT / "tests" / "golden" / "tiny_llada"
SEEDS = [11, 12, 13]


@pytest.fixture(scope="module")
def llada():
    return load_diffusion(FIXTURE)


@pytest.fixture(scope="module")
def expected():
    data = np.load(FIXTURE / "expected.npz")
    return torch.tensor(data["input_ids"]), torch.tensor(data["logits"])  # (3,17), (3,17,64)


@pytest.fixture(scope="module")
def batch():
    """Left-padded prompts of 5, 3 and 1 tokens, completions of 6: (prompt_ids, prompt_mask, completion_ids)."""
    g = torch.Generator().manual_seed(5)
    prompt_mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])
    prompt_ids = torch.randint(0, 60, (3, 5), generator=g) * prompt_mask + 60 * (1 - prompt_mask)
    completion_ids = torch.randint(0, 60, (3, 6), generator=g)
    completion_ids[1, 3] = 60  # an end token, and what was sampled behind it
    return prompt_ids, prompt_mask, completion_ids


def checkpoint(folder, source=FIXTURE, **config):
    """A copy of a checkpoint folder with changes to its config (None deletes a key)."""
    shutil.copytree(source, folder)
    values = {**json.loads((folder / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return folder


def tiny(kind, layers=2, **more):
    """A random native model with mask id 49 and end id 48."""
    import transformers as t
    torch.manual_seed(0)
    base = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, **more)
    if kind in ("Llama", "Qwen3"):
        base.update(num_key_value_heads=2, head_dim=8, eos_token_id=48, pad_token_id=0, bos_token_id=None)
        model = getattr(t, kind + "ForCausalLM")(getattr(t, kind + "Config")(initializer_range=0.3, **base))
    elif kind == "ModernBert":  # a local attention of 4 tokens to each side: less than the padding below
        model = t.ModernBertForMaskedLM(t.ModernBertConfig(local_attention=8, pad_token_id=0, cls_token_id=1, bos_token_id=1,
                                                           sep_token_id=2, eos_token_id=2, **base))
    else:
        model = getattr(t, kind + "ForMaskedLM")(getattr(t, kind + "Config")(initializer_range=0.3, max_position_embeddings=99, **base))
    return MaskedDiffusionLM(model.eval(), 49, [48])


class Fake(torch.nn.Module):
    """A model that is a function of the ids: logits(ids (N,L)) -> (N,L,V)."""
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.function(input_ids))


# ---- loading ----------------------------------------------------------------------------------------------

def test_llada_gives_its_own_codes_logits(llada, expected):
    ids, want = expected
    others = torch.arange(64) != 62
    got = llada.logits(ids)
    assert (got - want)[..., others].abs().max() < 1e-5
    assert (got[..., 62] == -math.inf).all() and got.dtype == torch.float32
    raw = llada.model(input_ids=ids, attention_mask=torch.zeros(3, 1, 1, 17), use_cache=False).logits
    assert (raw - want).abs().max() < 1e-5
    assert (llada.mask_id, llada.eos_ids) == (62, [60])
    assert type(llada.model).__name__ == "LlamaForCausalLM" and all(p.requires_grad for p in llada.model.parameters())


def test_llada_tied_in_one_file_and_in_bfloat16(tmp_path, expected):
    from safetensors.torch import load_file, save_file
    tensors = {k: v for f in FIXTURE.glob("*.safetensors") for k, v in load_file(f).items()}
    folder = checkpoint(tmp_path / "tied", weight_tying=True)
    for file in folder.glob("model*"):
        file.unlink()
    del tensors["model.transformer.ff_out.weight"]
    save_file(tensors, folder / "model.safetensors")
    lm = load_diffusion(folder)
    assert lm.model.lm_head.weight is lm.model.model.embed_tokens.weight
    full = load_diffusion(FIXTURE).model
    full.lm_head.weight = full.model.embed_tokens.weight
    assert torch.equal(lm.logits(expected[0]), MaskedDiffusionLM(full, 62, [60]).logits(expected[0]))
    half = load_diffusion(FIXTURE, dtype=torch.bfloat16)
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}
    assert half.logits(expected[0]).dtype == torch.float32
    assert (half.logits(expected[0]) - expected[1])[..., :60].abs().max() < 0.05


def test_llada_wrong_checkpoints(tmp_path):
    with pytest.raises(InputError, match="block_type"):
        load_diffusion(checkpoint(tmp_path / "odd", block_type="sequential"))
    folder = checkpoint(tmp_path / "short")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v.startswith("model-00001")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="lacks"):
        load_diffusion(folder)
    for name in (tmp_path / "nothing", "no/such/hub-id"):
        with pytest.raises(InputError, match="no masked diffusion checkpoint"):
            load_diffusion(name)


def test_loading_takes_the_memory_of_the_weights(tmp_path):
    """60 MB of float32 weights in two shards; the peak above the loaded libraries is measured in a process of its own."""
    from safetensors.torch import save_file
    folder = tmp_path / "big"
    folder.mkdir()
    d, layers, vocabulary = 256, 12, 1000
    sizes = {**dict.fromkeys(("q_proj", "k_proj", "v_proj", "attn_out"), (d, d)), "ff_proj": (5 * d, d), "up_proj": (5 * d, d),
             "ff_out": (d, 5 * d), "attn_norm": (d,), "ff_norm": (d,)}
    tensors = {f"model.transformer.blocks.{i}.{name}.weight": torch.rand(size) for i in range(layers) for name, size in sizes.items()}
    tensors |= {"model.transformer.wte.weight": torch.rand(vocabulary, d), "model.transformer.ln_f.weight": torch.rand(d),
                "model.transformer.ff_out.weight": torch.rand(vocabulary, d)}
    shards = {name: f"model-{1 + i % 2}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(shards.values()):
        save_file({k: v for k, v in tensors.items() if shards[k] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    config = json.loads((FIXTURE / "config.json").read_text())
    config.update(d_model=d, n_layers=layers, n_kv_heads=4, mlp_hidden_size=5 * d, embedding_size=vocabulary)
    (folder / "config.json").write_text(json.dumps(config))
    code = ("import sys, torch, common; sys.path.insert(0, 'tests')\n"
            "status = lambda key: [int(l.split()[1]) for l in open('/proc/self/status') if l.startswith(key)][0] / 1024\n"
            f"common.load_diffusion({str(FIXTURE)!r})\n"  # imports and thread pools
            "open('/proc/self/clear_refs', 'w').write('5')\n"  # resets the high-water mark
            f"before = status('VmRSS'); lm = common.load_diffusion({str(folder)!r}); print('PEAK', status('VmHWM') - before)\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    weights = sum(t.numel() for t in tensors.values()) * 4 / 2**20
    assert weights > 55 and float(done.stdout.split("PEAK")[1]) < 1.2 * weights


def test_a2d_qwen3_is_a_qwen3_and_runs_no_remote_code(tmp_path):
    lm, tokenizer = tiny("Qwen3"), common.toy_tokenizer()
    lm.model.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "modeling_a2d.py").write_text("raise SystemExit('remote code ran')")
    folder = checkpoint(tmp_path / "a2d", tmp_path / "plain", model_type="a2d-qwen3", architectures=["A2DQwen3LMHeadModel"],
                        auto_map={"AutoConfig": "modeling_a2d.C", "AutoModelForMaskedLM": "modeling_a2d.M"})
    got = load_diffusion(folder)
    ids = torch.randint(0, 48, (2, 7))
    assert torch.equal(got.model.lm_head.weight, lm.model.lm_head.weight) and type(got.model).__name__ == "Qwen3ForCausalLM"
    assert got.mask_id == tokenizer.mask_token_id and got.eos_ids == [48]  # the tokenizer's; the config's comes first
    assert load_diffusion(folder, mask_id=49).logits(ids).equal(lm.logits(ids))
    with pytest.raises(InputError, match="no masked diffusion"):  # the same weights, but nothing says that they are bidirectional
        load_diffusion(tmp_path / "plain")


def test_ids_come_from_config_then_generation_config_then_tokenizer(tmp_path):
    from transformers import PreTrainedTokenizerFast
    lm = tiny("Bert")
    lm.model.save_pretrained(tmp_path / "bert")
    with pytest.raises(InputError, match="--mask-token-id"):
        load_diffusion(tmp_path / "bert")
    with pytest.raises(InputError, match="--eos-token-id"):
        load_diffusion(tmp_path / "bert", mask_id=49)
    assert load_diffusion(tmp_path / "bert", mask_id=49, eos_ids=[48, 47]).eos_ids == [48, 47]
    words = common.toy_tokenizer()._tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, mask_token="<mask>", sep_token="<eos>", pad_token="<pad>")
    tokenizer.save_pretrained(tmp_path / "bert")
    got = load_diffusion(tmp_path / "bert")
    assert (got.mask_id, got.eos_ids, type(got.model).__name__) == (2, [1], "BertForMaskedLM")  # no eos: sep
    (tmp_path / "bert" / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert load_diffusion(tmp_path / "bert").eos_ids == [7, 8]
    assert load_diffusion(checkpoint(tmp_path / "two", tmp_path / "bert", eos_token_id=9)).eos_ids == [9]


@pytest.mark.parametrize("change", [dict(mask_token_id=64), dict(mask_token_id=60), dict(pad_token_id=62), dict(eos_token_id=[60, 62])])
def test_the_mask_id_must_be_a_row_of_its_own(tmp_path, change):
    with pytest.raises(InputError, match="the mask"):
        load_diffusion(checkpoint(tmp_path / "x", **change))


def test_a_saved_model_loads_again(tmp_path, llada, expected):
    llada.model.save_pretrained(tmp_path / "saved")
    again = load_diffusion(tmp_path / "saved")
    assert torch.equal(again.logits(expected[0]), llada.logits(expected[0])) and (again.mask_id, again.eos_ids) == (62, [60])


# ---- the bidirectional model ------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Bert", "ModernBert", "Roberta"])
def test_attention_is_bidirectional_and_padding_changes_nothing(kind):
    lm = tiny(kind)
    ids = torch.randint(3, 48, (2, 12), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[:, -1] = 3 + (changed[:, -1] == 3).long()
    padding = torch.full((2, 30), lm.model.config.pad_token_id)
    mask = torch.cat([torch.zeros_like(padding), torch.ones_like(ids)], 1)
    results = {}
    for attention in ("sdpa", "eager"):
        lm.model.set_attn_implementation(attention)
        results[attention] = alone = lm.logits(ids)[..., :49]
        assert (lm.logits(changed)[:, 0, :49] - alone[:, 0]).abs().max() > 1e-5  # the first position sees the last token
        padded = lm.logits(torch.cat([padding, ids], 1), mask)[..., :49]
        assert padded.isfinite().all()
        assert (padded[:, 30:] - alone).abs().max() < 1e-5
    assert (results["sdpa"] - results["eager"]).abs().max() < 1e-5


def test_left_padded_batch_equals_single_rows(llada, batch):
    prompt_ids, prompt_mask, completion_ids = batch
    for f in (one_step_logps, coupled_logps, stratified_logps):
        together = f(llada, *batch, seeds=SEEDS)
        for i in range(3):
            n = int(prompt_mask[i].sum())
            alone = f(llada, prompt_ids[i:i + 1, -n:], prompt_mask[i:i + 1, -n:], completion_ids[i:i + 1], seeds=SEEDS[i:i + 1])
            assert (together[i] - alone[0]).abs().max() < 1e-5  # neither padding nor the micro-batch split touches masks


def test_gradient_checkpointing_and_one_training_step(llada, batch):
    gradients = []
    for on in (False, True):
        lm = MaskedDiffusionLM(copy.deepcopy(llada.model).train(), 62, [60])
        if on:
            lm.model.gradient_checkpointing_enable()
        loss = -stratified_logps(lm, *batch, seeds=SEEDS).mean()
        loss.backward()
        gradients.append([p.grad for p in lm.model.parameters()])
    assert max((a - b).abs().max() for a, b in zip(*gradients)) < 1e-5
    assert all(g is not None and g.isfinite().all() for g in gradients[1])
    torch.optim.SGD(lm.model.parameters(), lr=0.1).step()
    assert -stratified_logps(lm, *batch, seeds=SEEDS).mean() < loss


# ---- the sampler ------------------------------------------------------------------------------------------

def test_num_transfer():
    assert num_transfer(7, 3) == [3, 2, 2]
    for masked in range(12):
        for steps in range(1, 9):
            counts = num_transfer(masked, steps)
            assert sum(counts) == masked and len(counts) == steps and counts == sorted(counts, reverse=True)
            assert max(counts) - min(counts) <= 1


def slow_sampler(lm, prompt, gen_length, block_length, steps, temperature, generator, threshold=None):
    """One sequence, position by position, full logits -> tokens, commit steps, confidences, and p (S,T,V) before each step."""
    y, step_of, sure_of, all_p, step = [lm.mask_id] * gen_length, [None] * gen_length, [None] * gen_length, [], 0
    per_block = min(steps // (gen_length // block_length), block_length)
    for block in range(0, gen_length, block_length):
        counts = num_transfer(block_length, per_block)
        while lm.mask_id in y[block:block + block_length]:
            logits = lm.logits(torch.tensor([[*prompt, *y]]))[0, len(prompt):]
            all_p.append(logits.softmax(-1))
            todo = [i for i in range(block, block + block_length) if y[i] == lm.mask_id]
            E = torch.empty(len(todo), logits.shape[-1]).exponential_(generator=generator) if temperature else torch.ones(len(todo), 1)
            found = {i: int((logits[i] - temperature * e.log()).argmax()) for i, e in zip(todo, E)}
            sure = {i: float(all_p[-1][i, found[i]]) for i in todo}
            ranked = sorted(todo, key=lambda i: -sure[i])
            chosen = ranked[:1] + [i for i in ranked[1:] if sure[i] >= threshold] if threshold else ranked[:counts[step % per_block]]
            for i in chosen:
                y[i], step_of[i], sure_of[i] = found[i], step, sure[i]
            step += 1
    return y, step_of, sure_of, torch.stack(all_p)


@pytest.mark.parametrize("options", [
    dict(gen_length=8, block_length=4, steps=6, temperature=1.0), dict(gen_length=8, block_length=8, steps=3, temperature=0.0),
    dict(gen_length=6, block_length=2, steps=6, temperature=0.5), dict(gen_length=8, block_length=4, steps=8, temperature=1.0, threshold=0.03),
    dict(gen_length=1, block_length=1, steps=1, temperature=1.0), dict(gen_length=4, block_length=2, steps=20, temperature=1.0)])
def test_sampler_and_trace_against_one_sequence_at_a_time(llada, batch, options):
    with torch.no_grad():
        completion_ids, trace = sample_diffusion(llada, *batch[:2], seed=7, **options)
        for i in range(3):
            prompt = batch[0][i][batch[1][i].bool()].tolist()
            generator = torch.Generator().manual_seed(7 * 2**20 + i)
            y, step_of, sure_of, p = slow_sampler(llada, prompt, generator=generator, **options)
            S = len(p)
            assert completion_ids[i].tolist() == y and trace.commit_step[i].tolist() == step_of
            assert torch.allclose(trace.confidence[i], torch.tensor(sure_of), atol=1e-6)
            for s in range(len(trace.C)):
                for t, token in enumerate(y):
                    if s >= step_of[t]:
                        want = sure_of[t]
                    else:
                        want = float(p[s, t, token]) if (p[s, t] > p[s, t, token]).sum() < common.TRACE_TOP else 0.0
                    assert abs(float(trace.C[s, i, t]) - want) < 1e-6
            assert options.get("threshold") or S == len(trace.C)
    assert trace.C.shape[0] <= max(options["steps"], options["gen_length"])


def test_threshold_writes_more_at_once(llada, batch):
    options = dict(gen_length=8, block_length=8, steps=8, temperature=0.0, seed=0)
    low = sample_diffusion(llada, *batch[:2], threshold=0.0, **options)[1]  # everything reaches it
    high = sample_diffusion(llada, *batch[:2], threshold=1.0, **options)[1]  # nothing does: the best one per step
    assert len(low.C) == 1 and len(high.C) == 8


def test_a_row_does_not_depend_on_its_batch_or_on_the_global_generator(llada, batch):
    options = dict(gen_length=8, block_length=4, steps=4, temperature=1.0, seed=3)
    state = torch.get_rng_state()
    together, trace = sample_diffusion(llada, *batch[:2], **options)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    alone, _ = sample_diffusion(llada, batch[0][2:], batch[1][2:], first_row=2, **options)
    assert torch.equal(together[2:], alone)
    assert torch.equal(sample_diffusion(llada, *batch[:2], trace=False, **options)[0], together)
    other = sample_diffusion(llada, *batch[:2], **{**options, "seed": 4})[0]
    assert not torch.equal(other, together)


def test_sampler_errors(llada, batch):
    fine = dict(gen_length=8, block_length=4, steps=4, temperature=1.0, seed=0)
    for change in (dict(block_length=3), dict(steps=3), dict(steps=1), dict(steps=0), dict(gen_length=0), dict(temperature=-1.0)):
        with pytest.raises(InputError):
            sample_diffusion(llada, *batch[:2], **{**fine, **change})
    with pytest.raises(InputError, match="prefix cache"):
        sample_diffusion(tiny("Bert"), batch[0] % 40, batch[1], prefix_cache=True, **fine)


def test_a_model_that_prefers_the_mask_leaves_none():
    lm = MaskedDiffusionLM(Fake(lambda ids: torch.zeros(*ids.shape, 10).index_fill(2, torch.tensor([9]), 100.0)), 9, [8])
    for temperature in (0.0, 1.0):
        completion_ids, _ = sample_diffusion(lm, torch.zeros(4, 2, dtype=torch.long), torch.ones(4, 2, dtype=torch.long), gen_length=8,
                                             block_length=4, steps=4, temperature=temperature, seed=0)
        assert not (completion_ids == 9).any()
    assert torch.allclose(lm.logits(torch.tensor([[1]])).softmax(-1)[..., :9], torch.tensor(1 / 9))  # scorer too


def test_samples_follow_the_models_distribution():
    p = torch.tensor([0.5, 0.3, 0.2, 1e-9])
    lm = MaskedDiffusionLM(Fake(lambda ids: p.log().expand(*ids.shape, 4)), 3, [2])
    prompt = torch.zeros(4000, 1, dtype=torch.long)
    for temperature in (1.0, 0.5):
        ids, _ = sample_diffusion(lm, prompt, prompt + 1, gen_length=1, block_length=1, steps=1, temperature=temperature, seed=0)
        want = p[:3] ** (1 / temperature)
        assert (ids.flatten().bincount(minlength=3) / 4000 - want / want.sum()).abs().max() < 0.03  # 4 standard errors


def test_prefix_cache(batch):
    options = dict(gen_length=8, block_length=4, temperature=1.0, seed=0)
    prompts = (batch[0].clamp(max=47), batch[1])
    # In a model of one layer the prefix's keys and values depend on nothing but its own tokens: there the cache is exact.
    one = tiny("Llama", layers=1)
    exact, trace = sample_diffusion(one, *prompts, steps=8, **options)
    cached, cached_trace = sample_diffusion(one, *prompts, steps=8, prefix_cache=True, **options)
    assert torch.equal(exact, cached) and torch.allclose(trace.C, cached_trace.C, atol=1e-5)
    # With one step per block it is never used; with more it is an approximation.
    two = tiny("Llama", layers=2)
    exact, trace = sample_diffusion(two, *prompts, steps=2, **options)
    cached, cached_trace = sample_diffusion(two, *prompts, steps=2, prefix_cache=True, **options)
    assert torch.equal(exact, cached) and torch.equal(trace.C, cached_trace.C)
    approximate = [sample_diffusion(two, *prompts, steps=8, prefix_cache=cache, **options)[1].C for cache in (False, True)]
    assert not torch.allclose(*approximate)


# ---- likelihoods ------------------------------------------------------------------------------------------

def plain_logps(lm, prompt_ids, prompt_mask, completion_ids, masked):
    """Full logits, log-softmax, gather: (N,T), 0 where not masked."""
    ids = torch.cat([prompt_ids, completion_ids.masked_fill(masked, lm.mask_id)], 1)
    logits = lm.logits(ids, torch.cat([prompt_mask, torch.ones_like(completion_ids)], 1))[:, prompt_ids.shape[1]:]
    return logits.log_softmax(-1).gather(2, completion_ids[..., None])[..., 0] * masked


@pytest.mark.parametrize("kind", ["Llama", "Bert"])
def test_masked_logps_and_gradients_equal_the_plain_version(kind, batch):
    lm, inputs = tiny(kind), (batch[0].clamp(max=47), batch[1], batch[2].clamp(max=48))
    masked = torch.rand(2, 3, 6, generator=torch.Generator().manual_seed(0)) < 0.6
    weights = torch.rand(2, 3, 6, generator=torch.Generator().manual_seed(1))
    want = torch.stack([plain_logps(lm, *inputs, m) for m in masked])
    expected = torch.autograd.grad((want * weights).sum(), [p for p in lm.model.parameters()], allow_unused=True)
    for chunk_size in (1, 3, 7, 256):
        got = masked_logps(lm, *inputs, masked, chunk_size=chunk_size)
        assert (got - want).abs().max() < 1e-5 and (got[~masked] == 0).all()
        gradients = torch.autograd.grad((got * weights).sum(), [p for p in lm.model.parameters()], allow_unused=True)
        for a, b in zip(gradients, expected):
            assert (a is None) == (b is None) and (a is None or (a - b).abs().max() < 1e-5 * (1 + b.abs().max()))


def test_nothing_masked_keeps_a_live_graph(llada, batch):
    loss = masked_logps(llada, *batch, torch.zeros(1, 3, 6, dtype=torch.bool)).sum()
    loss.backward()
    assert loss.item() == 0 and llada.model.lm_head.weight.grad is None or not llada.model.lm_head.weight.grad.any()
    llada.model.zero_grad()


def test_one_step(llada, batch):
    clean = one_step_logps(llada, *batch, seeds=SEEDS, prompt_rate=0.0)
    assert (clean - plain_logps(llada, *batch, torch.ones(3, 6, dtype=torch.bool))).abs().max() < 1e-5
    assert not torch.allclose(one_step_logps(llada, *batch, seeds=SEEDS, prompt_rate=0.9), clean)
    hidden = []
    spy = SimpleNamespace(mask_id=62, head=llada.head, hidden=lambda ids, mask: hidden.append(ids) or llada.hidden(ids, mask))
    long = torch.ones(50, 40, dtype=torch.long)
    one_step_logps(spy, long, torch.cat([long[:, :20] * 0, long[:, 20:]], 1), long[:, :2], seeds=range(50))
    shown = hidden[0][:, :40] == 62
    assert not shown[:, :20].any()  # padding is never masked
    assert abs(shown[:, 20:].float().mean() - 0.15) < 0.035  # 3 standard errors
    assert (hidden[0][:, 40:] == 62).all()


def test_coupled(llada, batch):
    got = coupled_logps(llada, *batch, seeds=SEEDS)
    uniform = row_uniforms(SEEDS, 7, "cpu")
    for i in range(3):
        row = [x[i:i + 1] for x in batch]
        t, U = 0.2 + 0.6 * float(uniform[i, 0]), uniform[i:i + 1, 1:]
        assert 0.2 <= t <= 0.8
        full, one, two = (plain_logps(llada, *row, m)[0] for m in (U < 2, U < t, U >= t))
        want = [(full[j] + (one[j] / t if U[0, j] < t else two[j] / (1 - t))) / 2 for j in range(6)]
        assert (got[i] - torch.stack(want)).abs().max() < 1e-5
    same = MaskedDiffusionLM(Fake(lambda ids: torch.zeros(*ids.shape, 5)), 4, [3])  # each score is -log 4, whatever is masked
    many = torch.zeros(4000, 3, dtype=torch.long)
    average = coupled_logps(same, many[:, :1], many[:, :1] + 1, many, seeds=range(4000)).mean() / -math.log(4)
    assert abs(average - 1.5) < 0.02


def test_uni(llada, batch):
    ratio = torch.tensor([0.0, 0.5, 1.0])
    logps, scored = uni_logps(llada, *batch, seeds=SEEDS, ratio=ratio)
    assert scored[0].sum() == 0 and scored[2].sum() == 6 and 0 < scored[1].sum() < 6
    assert (logps[scored == 0] == 0).all()
    assert (logps - plain_logps(llada, *batch, scored.bool())).abs().max() < 1e-5


def test_strata_are_balanced_disjoint_and_per_row():
    mask = (torch.arange(13) < torch.tensor([[13], [6], [1], [0]])).float()
    before = mask.clone()
    for strata in (1, 2, 4, 13, 20):
        labels = draw_strata(mask, strata, [1, 2, 3, 4])
        assert labels.shape == mask.shape and labels.min() >= 0 and labels.max() < strata
        for row, valid in zip(labels, mask.bool()):
            for part in (row[valid], row):  # balanced over the valid tokens, and over all
                counts = part.bincount(minlength=strata)
                assert counts.max() - counts.min() <= 1
        assert torch.equal(labels[1:2], draw_strata(mask[1:2], strata, [2]))
    assert torch.equal(mask, before)
    first = torch.stack([draw_strata(torch.ones(1, 4), 2, [s])[0] for s in range(400)]).float()
    assert (first.mean(0) - 0.5).abs().max() < 0.1  # every position may fall into every stratum
    assert len({tuple(row.tolist()) for row in first}) == 6  # all 4-choose-2 balanced labellings occur


def test_stratified(llada, batch):
    clean = one_step_logps(llada, *batch, seeds=SEEDS, prompt_rate=0.0)
    assert torch.equal(stratified_logps(llada, *batch, seeds=SEEDS, strata=1), clean)
    one_by_one = torch.stack([plain_logps(llada, *batch, (torch.arange(6) == j).expand(3, 6))[:, j] for j in range(6)], 1)
    assert (stratified_logps(llada, *batch, seeds=SEEDS, strata=6) - one_by_one).abs().max() < 1e-5
    labels = draw_strata(common.completion_mask(batch[2], [60]), 2, SEEDS)
    want = plain_logps(llada, *batch, labels == 0) + plain_logps(llada, *batch, labels == 1)
    assert (stratified_logps(llada, *batch, seeds=SEEDS, strata=2) - want).abs().max() < 1e-5


def test_two_bit_copy():
    """y is 00 or 11 with equal probability: log p(y) = -0.693. Pseudo-likelihoods miss it from both sides."""
    def logits(ids):  # mask id 2; a bit whose twin is visible copies it, else both values are equally likely
        out = torch.zeros(*ids.shape, 3)
        twin = ids[:, 1:].flip(1)
        known = twin < 2
        out[:, 1:, :2] = torch.where(known[..., None], torch.where(torch.arange(2) == twin[..., None], 0.0, -100.0), 0.0)
        return out
    lm = MaskedDiffusionLM(Fake(logits), 2, [9])
    inputs = (torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1, dtype=torch.long), torch.tensor([[0, 0], [1, 1]]))
    for strata, want in ((1, -1.3863), (2, 0.0)):
        assert stratified_logps(lm, *inputs, seeds=[0, 1], strata=strata).sum(1).tolist() == pytest.approx([want] * 2, abs=1e-4)


@pytest.mark.parametrize("likelihood", [
    one_step_logps, coupled_logps, stratified_logps, lambda *a, seeds: uni_logps(*a, seeds=seeds, ratio=torch.full((len(seeds),), 0.6))[0]])
def test_same_seeds_give_ratio_one_and_leave_the_generator_alone(llada, batch, likelihood):
    before, state = [x.clone() for x in batch], torch.get_rng_state()
    with torch.no_grad():
        old = likelihood(llada, *batch, seeds=SEEDS)
    torch.rand(5)
    now = likelihood(llada, *batch, seeds=SEEDS)
    assert ((now - old).exp() == 1).all() and now.requires_grad
    assert not torch.equal(likelihood(llada, *batch, seeds=[1, 2, 3]), now)
    torch.set_rng_state(state)
    likelihood(llada, *batch, seeds=SEEDS)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, batch))


# ---- the toy and rollouts ---------------------------------------------------------------------------------

def args(tmp_path, *flags):
    import daca
    return common.parse_args(daca.Args, daca.TOY, ["--checkpoints", str(tmp_path), "--warmup-steps", "12", *flags])


def test_toy_is_an_ordinary_folder_and_rollouts_hold_the_trace(tmp_path):
    a = args(tmp_path, "--sample-batch", "4", "--threshold", "0.02", "--eval-budgets", "8:2", "24:24")
    lm, tokenizer = common.load_diffusion_policy(a)
    config = json.loads(next(tmp_path.glob("*/config.json")).read_text())
    assert config["model_type"] == "qwen3" and config["mask_token_id"] == tokenizer.mask_token_id == lm.mask_id
    problems = common.encode_prompts(tokenizer, common.story_problems(3, 0), a)
    rollout = common.generate(lm, tokenizer, [p["prompt_ids"] for p in problems], 2, a)
    assert rollout.completion_ids.shape == (6, 24) and rollout.group_ids.tolist() == [0, 0, 1, 1, 2, 2] and len(rollout.texts) == 6
    S = len(rollout.trace.C)  # batches of 4 and 2 rows took different numbers of steps; the shorter one is frozen at its end
    assert rollout.trace.C.shape == (S, 6, 24) and rollout.trace.commit_step.max() == S - 1
    assert torch.equal(rollout.trace.C[-1], rollout.trace.confidence)
    small = common.at_budget(a, "8:2")
    assert common.sampler_lengths(small) == dict(gen_length=8, block_length=8, steps=2)
    assert common.generate(lm, tokenizer, [problems[0]["prompt_ids"]], 2, small, greedy=True).completion_ids.shape == (2, 8)


@pytest.mark.parametrize("flags", [("--max-new-tokens", "48"), ("--diffusion-steps", "0"), ("--block-length", "7"),
                                   ("--eval-budgets", "24:24", "16"), ("--eval-budgets", "48:24")])
def test_lengths_are_checked_before_anything_is_loaded(tmp_path, flags):
    with pytest.raises(InputError):
        args(tmp_path, *flags)

"""Token credit in TRL's GRPOTrainer, for those who train on several GPUs.

    python notebooks/trl_token_credit.py --credit delta --steps 10            the toy, one process; also gctca, datc, none
    ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node 2 notebooks/trl_token_credit.py     two CPU processes

TRL samples, scores and normalises a whole rollout batch in `_generate_and_score_completions`, and cuts it into micro-batches
only afterwards. Its loss takes advantages of shape (N,) or (N,T). So token credit is one overridden method: multiply by w
while the batch is still whole, A (N,) -> A w (N,T). In the loss it would be too late: a method's statistics (DelTA's
centroids) must not depend on how a batch is cut.

(The method's name starts with an underscore, so TRL may rename it. Tested with TRL 1.16 on one and two CPU processes. Scores come
from TRL's own pass through its wrapped model, as FSDP and DeepSpeed need it; with these it has not been run, and DATC also
reads lm_head's weight, which they may have cut up.)

What TRL's settings are called here: --inner-iterations is num_iterations, --clip-low/high are epsilon and epsilon_high, --dual-clip
is delta, --aggregate sequence / token / constant is loss_type grpo / dapo (bnpo: per micro-batch) / dr_grpo.
"""
import argparse
import sys
import types
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import datc
import delta
import gctca

try:
    import datasets
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    raise ImportError(f"this file plugs token credit into TRL's trainer and needs: pip install trl datasets ({error})") from error


# A credit function: (trainer, batch, old, A (N,), mask (N,T)) -> w (N,T). `batch` is TRL's dict of the rows of this process, and
# batch["inputs"] their N rows of the data set; `old` holds logps (N,T) and hidden (N,T,H) of the policy before the update.

def no_credit(trainer, batch, old, A, mask):
    """w = 1: plain GRPO, to compare with."""
    return torch.ones_like(mask)


def delta_credit(trainer, batch, old, A, mask):
    """DelTA. Its centroids and its normaliser belong to the whole rollout batch, that is to the rows of all processes.

    They are gathered, every process computes the same w, and keeps its own rows. (Sums of the two sides could be reduced
    instead; that would send less and repeat delta.py here.) old.hidden (N,T,H) is what makes it large: N T H floats.
    """
    gather = lambda x: trainer.accelerator.gather(trainer.accelerator.pad_across_processes(x, dim=1))  # same T everywhere
    proxies = gather(delta.token_proxies(old.hidden, old.logps))                            # (N_all,T_all,H)
    w = delta.credit_weights(proxies, trainer.accelerator.gather(A), gather(mask))          # (N_all,T_all)
    first = trainer.accelerator.process_index * len(A)
    return w[first:first + len(A), :mask.shape[1]]                                          # (N,T) own rows, padding cut


def gctca_credit(trainer, batch, old, A, mask):
    """GCTCA's prompt contrast: per response, so nothing has to be gathered. One more forward, under the negative prompt."""
    tokenizer = trainer.processing_class
    negative_ids, negative_mask = common.pad_left(                                          # (N,P') each
        [common.chat_ids(tokenizer, row["question"], common.WRONG_ANSWER) for row in batch["inputs"]], tokenizer.pad_token_id)
    negative = trainer.old_scores({**batch, "prompt_ids": negative_ids.to(mask.device),
                                   "prompt_mask": negative_mask.to(mask.device)})           # logps (N,T)
    return gctca.credit_weights(gctca.guidance_divergence(old.logps, negative.logps), mask)


class DatcCredit:
    """DATC: per response, too. The reward model's score is the reward, and its input gradient, kept here, the direction."""

    def __init__(self, args, model, tokenizer):
        self.args, self.tokenizer, self.end_ids = args, tokenizer, common.end_ids(model, tokenizer)
        self.reward_model, self.reward_tokenizer = datc.load_reward_model(args)
        layer = self.reward_model.get_input_embeddings()
        table = layer(torch.arange(layer.num_embeddings, device=args.device)).float()       # (M,d)
        self.embeddings, self.decodable = datc.vocabulary_embeddings(                       # (V,d), (V,) or None
            tokenizer, self.reward_tokenizer, table, model.get_output_embeddings().weight.shape[0], self.end_ids)

    def reward(self, completion_ids, question, **others):
        """TRL's reward function: lists of ids, column "question" -> N scores; NaN where there is none."""
        ids, mask = (x.to(self.args.device) for x in common.pad_right(completion_ids, self.tokenizer.pad_token_id))  # (N,T) each
        rollout = types.SimpleNamespace(completion_ids=ids, completion_mask=mask, group_ids=torch.arange(len(ids)))
        scores, self.gradients, self.scored = datc.judge(                                   # (N,), (N,T,d), (N,T)
            self.reward_model, self.reward_tokenizer, self.tokenizer, rollout, [{"question": q} for q in question], self.args,
            self.end_ids, self.decodable is None)
        return scores.tolist()

    def __call__(self, trainer, batch, old, A, mask):
        W = datc.work_from_hidden(                                                          # (N,T)
            old.hidden, trainer.accelerator.unwrap_model(trainer.model).get_output_embeddings(), self.gradients, self.embeddings,
            batch["completion_ids"], mask, temperature=trainer.temperature, chunk_size=self.args.chunk_size,
            decodable=self.decodable, top_k=self.args.top_k)
        return datc.credit_weights(W, A, mask, self.args.lam, self.args.gate, scored=self.scored)


class TokenCreditTrainer(GRPOTrainer):
    """GRPOTrainer with `credit` (see above) applied to each rollout batch."""

    def __init__(self, *args, credit=no_credit, **kwargs):
        super().__init__(*args, **kwargs)
        self.credit = credit

    @torch.no_grad()
    def old_scores(self, batch):
        """TRL's scoring pass over a batch: Scores(logps (N,T), hidden (N,T,H)). A hook keeps what lm_head is about to read."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)              # (N,P+T)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)      # (N,P+T)
        T, hidden = batch["completion_ids"].shape[1], []
        hook = common.backbone(self.accelerator.unwrap_model(self.model)).register_forward_hook(
            lambda module, inputs, output: hidden.append(output.last_hidden_state[:, -T - 1:-1].float()))  # position i predicts i + 1
        try:
            logps = self._get_per_token_logps_and_entropies(                                # (N,T)
                self.model, ids, attention, T, batch_size=self.args.per_device_train_batch_size)[0]
        finally:
            hook.remove()
        return common.Scores(logps, None, torch.cat(hidden))

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        A, mask = batch["advantages"], batch["completion_mask"].float()                     # (N,), (N,T)
        w = self.credit(self, {**batch, "inputs": inputs}, self.old_scores(batch), A, mask)  # (N,T)
        return {**batch, "advantages": A[:, None] * w}                                      # (N,T)


CREDITS = {"none": no_credit, "delta": delta_credit, "gctca": gctca_credit, "datc": DatcCredit}


def toy_trainer(credit, flags=(), **settings):
    """A trainer on the toy: the story task as TRL wants it (a data set with the column "prompt", a reward function).

    credit: a function, or DatcCredit. flags: of datc.py, for example --checkpoints FOLDER. settings: of GRPOConfig."""
    usual = dict(output_dir="runs/trl", max_steps=10, per_device_train_batch_size=64, num_generations=8, beta=0.0, seed=0,
                 max_completion_length=32, learning_rate=1e-4, use_cpu=not torch.cuda.is_available(), bf16=False, report_to=[],
                 logging_steps=1, save_strategy="no", loss_type="dapo", epsilon_high=0.28)
    config = GRPOConfig(**{**usual, **settings})
    args = common.parse_args(datc.Args, datc.TOY, list(flags))
    args.device = str(config.device)                                                        # each process has its own GPU
    model, tokenizer = common.load_policy(args)
    rows = [{"prompt": tokenizer.decode(p["prompt_ids"]), "question": p["question"], "answer": p["answer"]}
            for p in common.encode_prompts(tokenizer, common.story_problems(256, 0), args)]

    def reward(completions, answer, **others):
        return [common.reward_correct(text, {"answer": a}) for text, a in zip(completions, answer)]

    if credit is DatcCredit:
        credit = DatcCredit(args, model, tokenizer)
        reward = credit.reward
    return TokenCreditTrainer(credit=credit, model=model, args=config, reward_funcs=reward, processing_class=tokenizer,
                              train_dataset=datasets.Dataset.from_list(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--credit", choices=CREDITS, default="delta")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="responses per process and step; other flags are datc.py's")
    chosen, others = parser.parse_known_args()
    trainer = toy_trainer(CREDITS[chosen.credit], others, max_steps=chosen.steps, per_device_train_batch_size=chosen.batch)
    trainer.train()
    print(f"process {trainer.accelerator.process_index} of {trainer.accelerator.num_processes}: {trainer.state.global_step} steps, "
          f"reward {[round(row['reward'], 3) for row in trainer.state.log_history if 'reward' in row]}")
    trainer.accelerator.wait_for_everyone()  # a process that leaves early would break the others' connection
    trainer.accelerator.end_training()

"""Token credit in TRL's GRPOTrainer, for those who train on several GPUs (accelerate, DeepSpeed, FSDP).

    python notebooks/trl_token_credit.py --credit delta --steps 10            the toy, one process
    ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node 2 notebooks/trl_token_credit.py     two CPU processes

TRL samples, scores and normalises a whole rollout batch in `_generate_and_score_completions`, and cuts it into micro-batches
only afterwards. Its loss takes advantages of shape (N,) or (N,T). So token credit is one overridden method: multiply by w
while the batch is still whole, A (N,) -> A w (N,T). In the loss it would be too late: a method's statistics (DelTA's
centroids) must not depend on how a batch is cut.

(The method's name starts with an underscore, so TRL may rename it. Tested with TRL 1.16.)

What TRL's settings are called here: --inner-iterations is num_iterations, --clip-low/high are epsilon and epsilon_high, --dual-clip
is delta, --aggregate sequence / token / constant is loss_type grpo / dapo (bnpo: per micro-batch) / dr_grpo.
"""
import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
import delta
import gctca

try:
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    raise ImportError("this file plugs token credit into TRL's trainer and needs: pip install trl datasets") from error


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
    negative_ids, negative_mask = common.pad_left(                                          # (N,P') each
        [common.chat_ids(trainer.processing_class, trainer.question_of(ids, m), common.WRONG_ANSWER)
         for ids, m in zip(batch["prompt_ids"], batch["prompt_mask"])], trainer.processing_class.pad_token_id)
    negative = trainer.old_scores({**batch, "prompt_ids": negative_ids.to(mask.device),
                                   "prompt_mask": negative_mask.to(mask.device)}, mask)     # logps (N,T)
    return gctca.credit_weights(gctca.guidance_divergence(old.logps, negative.logps), mask)


class TokenCreditTrainer(GRPOTrainer):
    """GRPOTrainer with `credit(trainer, batch, old, A (N,), mask (N,T)) -> w (N,T)` applied to each rollout batch.

    For DATC write a `credit` that scores batch["completion_ids"] with datc.judge and calls datc.work_from_hidden and
    datc.credit_weights, as datc.py's step 4 does; the reward function then returns the reward model's score.
    """

    def __init__(self, *args, credit=no_credit, **kwargs):
        super().__init__(*args, **kwargs)
        self.credit = credit

    @torch.no_grad()
    def old_scores(self, batch, mask):
        """The policy before the update on a batch's rows: Scores(logps (N,T), hidden (N,T,H)), a few rows at a time."""
        model, n = self.accelerator.unwrap_model(self.model), self.args.per_device_train_batch_size
        parts = [common.token_logps(model, batch["prompt_ids"][rows], batch["prompt_mask"][rows], batch["completion_ids"][rows],
                                    mask[rows], temperature=self.temperature, want=("hidden",))
                 for rows in torch.arange(len(mask)).split(n)]
        return common.Scores(torch.cat([p.logps for p in parts]), None, torch.cat([p.hidden for p in parts]))

    def question_of(self, ids, mask):
        """The user's text of a prompt (P,), for methods that ask again in other words."""
        text = self.processing_class.decode(ids[mask.bool()])
        return text.removeprefix("<user>").removesuffix("<assistant>")  # the toy's chat template

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        A, mask = batch["advantages"], batch["completion_mask"].float()                     # (N,), (N,T)
        w = self.credit(self, batch, self.old_scores(batch, mask), A, mask)                 # (N,T)
        batch["advantages"] = A[:, None] * w                                                # (N,T)
        return batch


CREDITS = {"none": no_credit, "delta": delta_credit, "gctca": gctca_credit}


def toy_trainer(credit, checkpoints="checkpoints", warmup_steps=500, output_dir="runs/trl", cls=TokenCreditTrainer, **settings):
    """A trainer on the toy: the story task as TRL wants it (a data set with the column "prompt", a reward function)."""
    import datasets
    import grpo
    args = common.parse_args(grpo.Args, grpo.TOY, ["--checkpoints", str(checkpoints), "--warmup-steps", str(warmup_steps)])
    model, tokenizer = common.load_policy(args)
    problems = common.encode_prompts(tokenizer, common.story_problems(256, 0), args)
    rows = [{"prompt": tokenizer.decode(p["prompt_ids"]), "question": p["question"], "answer": p["answer"]} for p in problems]

    def reward(completions, answer, **others):
        return [common.reward_correct(text, {"answer": a}) for text, a in zip(completions, answer)]

    usual = dict(output_dir=str(output_dir), max_steps=10, per_device_train_batch_size=64, num_generations=8, beta=0.0, seed=0,
                 max_completion_length=32, learning_rate=1e-4, use_cpu=not torch.cuda.is_available(), bf16=False, report_to=[],
                 logging_steps=1, save_strategy="no", loss_type="dapo", epsilon_high=0.28)
    return cls(model=model, args=GRPOConfig(**{**usual, **settings}), reward_funcs=reward, processing_class=tokenizer,
               train_dataset=datasets.Dataset.from_list(rows), **({} if cls is GRPOTrainer else {"credit": credit}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--credit", choices=CREDITS, default="delta")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="responses per process and step")
    parser.add_argument("--checkpoints", default="checkpoints")
    parser.add_argument("--warmup-steps", type=int, default=500)
    chosen = parser.parse_args()
    trainer = toy_trainer(CREDITS[chosen.credit], chosen.checkpoints, chosen.warmup_steps, max_steps=chosen.steps,
                          per_device_train_batch_size=chosen.batch)
    trainer.train()
    print(f"process {trainer.accelerator.process_index} of {trainer.accelerator.num_processes}: {trainer.state.global_step} steps, "
          f"reward {[round(row['reward'], 3) for row in trainer.state.log_history if 'reward' in row]}")
    trainer.accelerator.wait_for_everyone()  # a process that leaves early would break the others' connection
    trainer.accelerator.end_training()

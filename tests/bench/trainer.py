"""The trainer's speed beside a bare PyTorch loop, on the same batch, in one run.

    python -m tests.bench.trainer --model models/smollm2-135m

Both train the same rows in the same micro-batches with AdamW in float32; the bare loop is a Hugging
Face model, a padded forward pass, the policy gradient and nothing else. Rounds alternate and the
fastest of each counts, so that other load on the machine disturbs the ratios little; the CPU
seconds of all threads are given as well.
"""

import os

# As the trainer's own process has it; read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from deploy.demo.model import ensure_model
from tokenization.sample import Sample
from trainer.batch import Batch, Rollout
from trainer.config import TrainerConfig
from trainer.device import prepare


def random_batch(rollouts: int, prompt: int, response: int, vocabulary: int) -> Batch:
    """Groups of eight rollouts with lengths that vary by a fifth."""
    random = np.random.default_rng(0)
    samples = []
    for k in range(rollouts):
        lengths = [int(n * random.uniform(0.8, 1.2)) for n in (prompt, response)]
        mask = np.repeat([False, True], lengths)
        samples.append(
            Sample(
                sample_id=f"run{k}/0",
                run=f"run{k}",
                calls=(f"call{k}",),
                token_ids=random.integers(0, vocabulary, sum(lengths)).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, np.float32(-10), np.float32("nan")),
                versions=np.where(mask, 0, -1).astype(np.int32),
                temperature=1.0,
            )
        )
    grades = tuple(Rollout(f"run{k}", f"group{k // 8}", float(k % 2)) for k in range(rollouts))
    return Batch(grades, tuple(samples))


class BareLoop:
    """Plain PyTorch: pad, forward, gather log-probabilities, backward, clip, step."""

    def __init__(self, model: Path, config: TrainerConfig, device: str) -> None:
        from transformers import AutoModelForCausalLM

        self._device = device
        self._network = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation=config.attention
        ).to(device)
        self._optimizer = torch.optim.AdamW(
            self._network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self._clip = config.clip_grad

    def logprobs(self, micro_batches: Sequence[Sequence]) -> None:
        with torch.no_grad():
            for rows in micro_batches:
                self._forward(rows)

    def update(self, micro_batches: Sequence[Sequence]) -> None:
        for rows in micro_batches:
            scores = self._forward(rows)
            loss = torch.zeros((), device=self._device)
            for k, row in enumerate(rows):
                mine = scores[k, row.prompt_length - 1 : len(row.token_ids) - 1]
                ratio = torch.exp(mine - mine.detach())
                loss = loss - (ratio * torch.from_numpy(row.advantages).to(self._device)).sum()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _forward(self, rows: Sequence) -> torch.Tensor:
        ids = torch.nn.utils.rnn.pad_sequence(
            [torch.from_numpy(row.token_ids) for row in rows], batch_first=True
        ).to(self._device)
        lengths = torch.tensor([len(row.token_ids) for row in rows])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).to(self._device)
        logits = self._network(ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        labels = ids[:, 1:, None]
        return logits.gather(2, labels)[:, :, 0] - torch.logsumexp(logits, dim=-1)


def micro_batches(rows: Sequence, max_tokens: int) -> list[list]:
    """Divide rows as verl does."""
    from verl.utils.seqlen_balancing import rearrange_micro_batches

    from trainer.engine import to_tensordict

    _, parts = rearrange_micro_batches(to_tensordict(rows), max_token_len=max_tokens)
    return [[rows[k] for k in part] for part in parts]


def arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--model", type=Path, help="default: the demo's model")
    options.add_argument("--rollouts", type=int, default=16)
    options.add_argument("--prompt", type=int, default=100)
    options.add_argument("--response", type=int, default=30)
    options.add_argument("--max-tokens", type=int, default=512)
    options.add_argument("--padding", action="store_true", help="trainer.packing = false")
    options.add_argument("--device", default="auto")
    options.add_argument("--seconds", type=float, default=240, help="stop adding rounds after this")
    found = options.parse_args()
    if found.model is None:
        found.model = ensure_model()
    return found


@dataclass
class Best:
    """Fastest run of an action, in wall-clock seconds and CPU seconds of all threads."""

    wall: float = float("inf")
    cpu: float = float("inf")

    def measure(self, action: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        action()
        self.wall = min(self.wall, time.perf_counter() - wall)
        self.cpu = min(self.cpu, time.process_time() - cpu)


def main() -> None:
    options = arguments()
    config = TrainerConfig(
        device=options.device,
        dtype="float32",
        packing=not options.padding,
        max_tokens_per_micro_batch=options.max_tokens,
    )
    device = prepare(config)
    from transformers import AutoConfig

    from trainer.engine import Engine
    from trainer.plan import select_rows, split
    from trainer.step import Step

    vocabulary = AutoConfig.from_pretrained(options.model).vocab_size
    batch = random_batch(options.rollouts, options.prompt, options.response, vocabulary)
    step = Step.prepare(config, batch)
    advantages = np.tile(np.array([-1, 1], dtype=np.float32), options.rollouts)
    rows = split(select_rows(batch, options.max_tokens).rows, advantages, 1, 0)[0]
    parts = micro_batches(rows, options.max_tokens)
    tokens = sum(len(row.token_ids) for row in rows)
    engine = Engine(config, options.model, device)
    bare = BareLoop(options.model, config, device.name)

    actions: dict[str, Callable[[], object]] = {
        "bare log-probs": lambda: bare.logprobs(parts),
        "log-probs": lambda: engine.logprobs(rows),
        "bare update": lambda: bare.update(parts),
        "update": lambda: (engine.forward_backward(rows), engine.optimizer_step()),
        "bare step": lambda: (bare.logprobs(parts), bare.update(parts)),
        "step": lambda: step.run(engine, 0, lambda _: None),
    }
    best = {name: Best() for name in actions}
    deadline = time.perf_counter() + options.seconds
    rounds = 0
    while rounds < 1 or (rounds < 5 and time.perf_counter() < deadline):
        for name, action in actions.items():
            best[name].measure(action)
        rounds += 1
    save, export = Best(), Best()
    with tempfile.TemporaryDirectory() as folder:
        save.measure(lambda: engine.save(Path(folder, "checkpoint")))
        export.measure(lambda: engine.export(Path(folder), "float32"))
    engine.close()

    print(
        f"\n{options.model}: {len(rows)} rows, {tokens} tokens, {len(parts)} micro-batches, "
        f"{device.name}, {device.threads} threads, fastest of {rounds} rounds\n"
    )
    print(f"{'':10}{'trainer':>16}{'bare PyTorch':>18}{'ratio':>8}{'CPU s':>9}{'bare CPU s':>12}")
    for name in ("log-probs", "update", "step"):
        ours, theirs = best[name], best[f"bare {name}"]
        print(
            f"{name:10}{tokens / ours.wall:8.0f} tokens/s{tokens / theirs.wall:10.0f} tokens/s"
            f"{theirs.wall / ours.wall:7.2f}x{ours.cpu:9.1f}{theirs.cpu:12.1f}"
        )
    print(f"checkpoint {save.wall:.2f} s, export {export.wall:.2f} s")
    print("a bare step is a log-prob pass and an update; the trainer's step needs no first pass")


if __name__ == "__main__":
    main()

"""Trains a GPT by policy gradients with verl's own Python, with AdamW and with Muon.

    python policy_gradient.py --verl CLONE --load out/finetuning/pretrained_adam
    python policy_gradient.py --table  # prints the table of the figures again

It runs in an environment with tests/requirements-rl.txt. The policy is the GPT of 0.9 M
parameters that finetuning.py pretrains with AdamW. For each of 4 prompts, 16 bytes of
held-out Python, it samples 8 responses of 12 bytes; the reward of one is its number of
different letters over 12. verl makes the optimizer, the advantages (GRPO), the clipped
loss and the step. Its rollouts need a GPU: here Megatron's model draws them itself.
Each optimizer has several rates, the best one three seeds. Runs in the work folder are
not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from training import HERE, NAMES, QUICKSTART, write

SEEDS = (1, 2, 3)
RATES = {
    "adam": (5e-4, 1e-3, 2e-3),
    "muon": (1e-3, 2e-3, 4e-3),
}
STEPS, PROMPTS, GROUP = 40, 4, 8
PROMPT, RESPONSE = 16, 12  # bytes
LAST = 5  # steps whose mean reward counts
LETTERS = (*range(65, 91), *range(97, 123))


# --- one run, in a process of its own -------------------------------------------------


def run(args: argparse.Namespace) -> list[float]:
    """The mean reward of each step's samples, in one process."""
    import train as quickstart
    from arguments import parse
    from checkpoints import load
    from corpus import read_corpus
    from model import build_model

    optimizer, lr, seed = args.one
    sys.argv = ["train.py", f"@{QUICKSTART / 'gpt.args'}", "--finetune"]
    sys.argv += ["--load", str(args.load), "--micro-batch-size", "32"]
    sys.argv += ["--optimizer", optimizer, "--lr", lr, "--seed", seed]
    flags = parse()
    quickstart.start_distributed(flags)
    model = build_model(flags)
    made = _by_verl(optimizer, float(lr), model)
    load(flags, model, made, None)
    text = torch.from_numpy(read_corpus(flags.text).held_out).long()
    chances = torch.Generator().manual_seed(flags.seed)
    return [_step(model, made, text, chances) for _ in range(STEPS)]


def _by_verl(optimizer: str, lr: float, model: Any) -> Any:
    """verl's optimizer of a model."""
    from omegaconf import OmegaConf

    import megatron_muon

    if optimizer == "muon":
        megatron_muon.install(megatron_muon.MuonConfig(matched_adamw_rms=0.2))
    # after the installation, since it takes Megatron's function at its import
    from verl.utils.megatron import optimizer as theirs

    settings = {"optimizer": optimizer, "lr": lr, "min_lr": lr, "clip_grad": 1.0}
    betas = {"adam_beta1": 0.9, "adam_beta2": 0.95}
    config = theirs.init_megatron_optim_config(
        OmegaConf.create(
            {**settings, "weight_decay": 0.1, "override_optimizer_config": betas}
        )
    )
    return theirs.get_megatron_optimizer([model], config)


def _step(
    model: Any, optimizer: Any, text: torch.Tensor, chances: torch.Generator
) -> float:
    """One rollout and one update by it; the rollout's mean reward."""
    from verl.trainer.ppo import core_algos
    from verl.utils.torch_functional import logprobs_from_logits
    from verl.workers.config import McoreActorConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    tokens = _rollout(model, text, chances)
    response = tokens[:, PROMPT:]
    mask = torch.ones(response.shape)
    is_new = torch.stack(
        [(response[:, :at] != response[:, at, None]).all(1) for at in range(RESPONSE)],
        dim=1,
    )
    is_letter = torch.isin(response, torch.tensor(LETTERS))
    rewards = (is_letter & is_new).float() / RESPONSE
    of_prompt = torch.arange(PROMPTS).repeat_interleave(GROUP).tolist()
    advantages, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, of_prompt)

    model.zero_grad_buffer()
    optimizer.zero_grad()
    logits = _logits(model, tokens)[:, PROMPT - 1 : -1]
    now = logprobs_from_logits(logits, response)
    config = McoreActorConfig(
        strategy="megatron", rollout_n=GROUP, use_dynamic_bsz=True
    )
    loss, _ = core_algos.compute_policy_loss_vanilla(
        now.detach(), now, advantages, mask, config=config
    )
    loss.backward()
    model.finish_grad_sync()
    MegatronEngine.optimizer_step(SimpleNamespace(optimizer=optimizer))
    return float(rewards.sum(dim=1).mean())


@torch.no_grad()
def _rollout(model: Any, text: torch.Tensor, chances: torch.Generator) -> torch.Tensor:
    """``(prompts · group, prompt + response)`` bytes, sampled at temperature 1."""
    starts = torch.randint(len(text) - PROMPT, (PROMPTS, 1), generator=chances)
    prompts = text[starts + torch.arange(PROMPT)]
    tokens = prompts.repeat_interleave(GROUP, dim=0)
    for _ in range(RESPONSE):
        shares = _logits(model, tokens)[:, -1].softmax(dim=-1)
        new = torch.multinomial(shares, 1, generator=chances)
        tokens = torch.cat([tokens, new], dim=1)
    return tokens


def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """``(batch, sequence, vocabulary)`` fp32."""
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    logits: torch.Tensor = model(tokens, positions, None)
    return logits.float()


# --- all runs -------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Each optimizer's rewards by rate, and at its best rate by seed."""
    report: dict[str, Any] = {"seeds": SEEDS, "steps": STEPS}
    for optimizer, rates in RATES.items():
        ends = {rate: _end(_rewards(args, optimizer, rate, SEEDS[0])) for rate in rates}
        rate = max(ends, key=lambda one: ends[one])
        report[optimizer] = {
            "lr": rate,
            "at_edge": rate in (rates[0], rates[-1]),
            "tried": {f"{one:g}": round(end, 4) for one, end in ends.items()},
            "runs": [
                [round(one, 4) for one in _rewards(args, optimizer, rate, seed)]
                for seed in SEEDS
            ],
        }
    return report


def _rewards(
    args: argparse.Namespace, optimizer: str, rate: float, seed: int
) -> list[float]:
    """A run's rewards; it runs if ``args.work`` does not have them."""
    path = args.work / f"{optimizer}_lr{rate:g}_seed{seed}.json"
    if not path.exists():
        command = [sys.executable, __file__, "--verl", args.verl, "--load", args.load]
        command += ["--one", optimizer, f"{rate:g}", str(seed), "--work", args.work]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".log").open("w") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
        print(f"{path.stem}: {_end(json.loads(path.read_text())):.3f}", flush=True)
    rewards: list[float] = json.loads(path.read_text())
    return rewards


def _end(rewards: list[float]) -> float:
    return statistics.fmean(rewards[-LAST:])


def table(report: dict[str, Any]) -> str:
    """In Markdown; a rate at the edge of its grid has a star."""
    lines = ["| optimizer | lr: reward of seed 1 | best lr | first step | last steps |"]
    lines.append("|---|---|--:|--:|--:|")
    for optimizer in RATES:
        found = report[optimizer]
        tried = (f"{rate}: {end:.3f}" for rate, end in found["tried"].items())
        ends = [_end(rewards) for rewards in found["runs"]]
        first = statistics.fmean(rewards[0] for rewards in found["runs"])
        cells = [NAMES[optimizer], ", ".join(tried)]
        cells.append(f"{found['lr']:g}{'*' * found['at_edge']}")
        cells.append(f"{first:.3f}")
        cells.append(
            f"{statistics.fmean(ends):.3f} ({min(ends):.3f} to {max(ends):.3f})"
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--verl", type=Path, help="a clone of verl")
    parser.add_argument("--load", type=Path, help="the pretrained checkpoint")
    parser.add_argument("--one", nargs=3, metavar=("OPTIMIZER", "LR", "SEED"))
    parser.add_argument("--work", type=Path, default=HERE / "out" / "policy_gradient")
    parser.add_argument("--figures", type=Path, default=HERE / "figures")
    args = parser.parse_args()
    if args.one:
        sys.path.insert(0, str(args.verl))
        optimizer, rate, seed = args.one
        path = args.work / f"{optimizer}_lr{rate}_seed{seed}.json"
        path.write_text(json.dumps(run(args)))
        return
    path = args.figures / "policy_gradient.json"
    if not args.table:
        write(path, measure(args))
    print(table(json.loads(path.read_text())))


if __name__ == "__main__":
    main()

"""What a run shows while it runs: a bar in a terminal, a line per evaluation,
TensorBoard.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from types import TracebackType


class Progress:
    """Shows and records losses on the one rank that has them; silent on the others."""

    def __init__(self, args: Namespace, shown: bool) -> None:
        self.shown, self.log_interval = shown, args.log_interval
        self.label = f"{args.optimizer:>5} lr {args.lr:g}"
        self.curve: dict[str, list[list[float]]] = {"train": [], "validation": []}
        from tqdm import tqdm  # the tutorial takes a step without a bar

        self._bar = tqdm(
            total=args.train_iters,
            desc=self.label,
            unit="step",
            dynamic_ncols=True,
            disable=not shown
            or not sys.stderr.isatty(),  # a log file gets the lines below only
        )
        self._writer = None
        if shown and args.tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(args.tensorboard_dir))

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()
        if self._writer is not None:
            self._writer.close()

    def trained(self, step: int, loss: float, scalars: dict[str, float]) -> None:
        """Records one training step (``step`` counts from 1)."""
        if not self.shown:
            return
        self.curve["train"].append([step, loss])
        self._bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        self._bar.update()
        if self._writer is not None:
            for name, value in {"lm loss": loss, **scalars}.items():
                self._writer.add_scalar(name, value, step)

    def watched(self, step: int, logit: float) -> None:
        """Records the largest attention logit of one step."""
        self.curve.setdefault("max_attention_logit", []).append([step, logit])

    def updated(self, step: int, rms: float) -> None:
        """Records the size of one step's updates, per unit of lr."""
        self.curve.setdefault("update_rms", []).append([step, rms])

    def evaluated_other(self, step: int, loss: float) -> None:
        """Records the loss on the text that is not trained on."""
        if self.shown:
            self.curve.setdefault("other", []).append([step, loss])

    def evaluated(self, step: int, loss: float) -> None:
        """Records one evaluation after ``step`` steps and prints a line."""
        if not self.shown:
            return
        self.curve["validation"].append([step, loss])
        recent = [value for _, value in self.curve["train"][-self.log_interval :]]
        train = f"   train {sum(recent) / len(recent):.4f}" if recent else ""
        line = f"{self.label}   step {step:4d}   validation {loss:.4f}{train}"
        self._bar.write(line, file=sys.stdout)
        sys.stdout.flush()
        if self._writer is not None:
            self._writer.add_scalar("lm loss validation", loss, step)

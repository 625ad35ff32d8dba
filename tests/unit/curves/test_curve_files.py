"""Loss curves out of Megatron's log and TensorBoard's files, and the leading ratio of two."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from megatron_muon.lab.curves.files import CurveError, read_curves
from megatron_muon.lab.curves.lead import Curve, Lead, curve, envelope, leads

# Lines as Megatron-LM 0.16.1's training_log and evaluate_and_print_results print them
LOG = """\
 [2026-11-03 10:00:01.000000] iteration        1/       4 | consumed samples:            8 | \
elapsed time per iteration (ms): 512.3 | learning rate: 1.000000E-03 | global batch size:     8 | \
lm loss: 1.083210E+01 | loss scale: 1.0 | grad norm: 2.100 | number of skipped iterations:   0 | \
number of nan iterations:   0 |
some other line
 [2026-11-03 10:00:01.000000] iteration        9/       4 | lm loss: 1.2.3 | loss scale: 1.0 |
 [2026-11-03 10:00:02.000000] iteration        2/       4 | consumed samples:           16 | \
elapsed time per iteration (ms): 500.0 | learning rate: 9.000000E-04 | global batch size:     8 | \
load_balancing_loss: 1.0E+00 | lm loss: 9.500000E+00 | loss scale: 1.0 | grad norm: 2.000 |
----------------------------------------------------------------------------------------------
 validation loss at iteration 2 | lm loss value: 9.612000E+00 | lm loss PPL: 1.490000E+04 |
----------------------------------------------------------------------------------------------
 validation loss at iteration 4 on validation set | lm loss value: 8.5E+00 | lm loss PPL: 4.9E+03 |
 validation loss at iteration 4 on test set | lm loss value: 8.9E+00 | lm loss PPL: 7.3E+03 |
"""


def written(tmp_path: Path, text: str, name: str = "run.log") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def points(path: Path, **tags: str) -> dict[str, list[tuple[float, float]]]:
    read = read_curves(path, tags)
    return {
        kind: list(zip(own.steps, own.losses, strict=True))
        for kind, own in read.items()
    }


def test_a_log_of_megatrons(tmp_path: Path) -> None:
    """A line whose loss is no number is none of it."""
    assert points(written(tmp_path, LOG)) == {
        "train": [(1, 10.8321), (2, 9.5)],
        "validation": [(2, 9.612), (4, 8.5)],
    }


def test_a_log_with_several_validation_sets(tmp_path: Path) -> None:
    log = LOG.replace("validation loss", "validation-0 loss")
    found = points(written(tmp_path, log), validation="lm loss validation-0")
    assert found["validation"] == [(2, 9.612), (4, 8.5)]


def test_a_losss_name_tells_its_kind_and_a_perplexity_is_none(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    folder = tmp_path / "one"
    with SummaryWriter(str(folder)) as writer:
        for name in ("train_loss", "loss/val", "out-of-distribution loss"):
            writer.add_scalar(name, 2.0, 3)
        for name in ("lr", "lm loss validation ppl", "load_balancing_loss"):
            writer.add_scalar(name, 1.0, 3)
    assert points(folder) == {
        kind: [(3, 2.0)] for kind in ("train", "validation", "other")
    }
    with SummaryWriter(str(folder)) as writer:
        writer.add_scalar("loss/train", 4.0, 5)
    with pytest.raises(CurveError, match="'loss/train' may be the train loss"):
        points(folder)
    assert points(folder, train="loss/train")["train"] == [(5, 4.0)]


def test_tensorboards_files_and_a_resumed_run(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for number, steps in enumerate((range(1, 6), range(4, 9))):
        with SummaryWriter(str(tmp_path / f"part{number}")) as writer:
            for step in steps:
                writer.add_scalar("lm loss", 10.0 - step - number / 4, step)
                writer.add_scalar("lm loss vs samples", 1.0, 8 * step)
                writer.add_scalar("lm loss validation", 11.0 - step, step)
    read = points(tmp_path)
    train = dict(read["train"])
    assert train[3] == 7.0 and train[4] == 5.75 and max(train) == 8
    assert len(read["validation"]) == 8
    (tmp_path / "events.out.tfevents.9").write_bytes(b"\xff" * 99)
    with pytest.raises(CurveError, match="no loss is in it"):
        points(tmp_path / "events.out.tfevents.9")


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "no loss is in it"),
        (LOG[: LOG.index("some")].replace("1.083210E+01", "1.2.3"), "no loss is in it"),
        (
            '{"iteration": 1, "lm loss": 2.0}\n',
            "Megatron's log has lines with 'lm loss'",
        ),
    ],
)
def test_what_holds_no_loss_is_one_error_that_names_the_file(
    tmp_path: Path, text: str, says: str
) -> None:
    path = written(tmp_path, text, "a.txt")
    with pytest.raises(CurveError, match=says) as caught:
        points(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_pipe_or_a_device_is_not_waited_for_and_a_tag_must_be_there(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "events.out.tfevents.1")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), tmp_path / "none"):
        with pytest.raises(CurveError, match="it cannot be read"):
            points(path)
    with pytest.raises(
        CurveError, match="it has no 'loss', but 'lm loss', 'lm loss validation'"
    ):
        points(written(tmp_path, LOG), train="loss")


def along(losses: Sequence[float]) -> Curve:
    """A curve of these losses at steps 1, 2, ..."""
    made = curve(enumerate(losses, 1))
    assert made is not None
    return made


LOSSES = st.lists(st.floats(-10, 10, allow_nan=False), min_size=1, max_size=30)


def power_law(scale: float, steps: int = 1000) -> Curve:
    """1 + (t / scale)^-0.5: with half the scale every loss is reached in half the
    steps.
    """
    return along([1 + (step / scale) ** -0.5 for step in range(1, steps + 1)])


def test_the_band_is_that_of_all_pairs_of_seeds() -> None:
    baseline = [power_law(2.0), power_law(4.0)]
    other = [power_law(1.0), power_law(0.5)]
    last = leads(baseline, other, 0.0)[-1]
    assert sorted(last.ratios) == pytest.approx([1.0, 3.0, 3.0, 7.0], rel=1e-9)
    assert last.ratio == pytest.approx(3.0, rel=1e-9) and last.pairs == 4


def test_pairs_that_never_reach_a_loss_count_as_the_lowest() -> None:
    baseline = [power_law(2.0)]
    never = [power_law(1.0), power_law(8.0), power_law(8.0)]
    last = leads(baseline, never, 0.0)[-1]
    assert len(last.reached) == 1 and last.pairs == 3 and last.ratio is None
    last = leads(baseline, [*never[:2], power_law(1.0)], 0.0)[-1]
    assert last.ratio == pytest.approx(1.0, rel=1e-9)
    assert Lead(4.0, 1.0, (1.0, 2.0), (3.0, 1.0), pairs=3).ratio == 1.0


LATE_RISE = [3 - step / 30 for step in range(60)] + [
    1 + step / 40 for step in range(40)
]
WINDOWS = st.sampled_from([0.0, 0.02, 0.3, 0.5])


@given(LOSSES, st.integers(0, 1), WINDOWS)
@example(LATE_RISE, 1, 0.02)
@example([3.0, 2.5, 2.0, 2.0, 2.0, 2.0], 1, 0.0)  # level from its third step on
# the last block's centre is step 150.5
@example(power_law(2.0, 200).losses.tolist(), 1, 0.5)
@example([3.0, 2.0], 0, 0.0)  # a validation loss before training
def test_a_run_has_no_lead_over_itself(
    losses: list[float], start: int, window: float
) -> None:
    run = curve(enumerate(losses, start))
    assume(run is not None and run.steps[-1] > 0)
    for level in leads([run], [run], window):
        assert level.ratios == (0.0,) and level.reached == (level.step,)


@given(LOSSES, WINDOWS)
@example(LATE_RISE, 0.02)
def test_a_run_at_half_the_speed_has_half_of_the_steps_as_its_lead(
    losses: list[float], window: float
) -> None:
    """Whatever the baseline's end: level, rising, or averaged over half of the run."""
    run = along(losses)
    slow = run._replace(steps=2 * run.steps)
    for level in leads([run], [slow], window):
        assert level.ratios == (-0.5,)


@given(LOSSES)
def test_an_envelope_is_the_nearest_curve_that_never_rises(losses: list[float]) -> None:
    """By the max-min formula of isotonic regression, which no pool enters."""
    fitted = envelope(along(losses)).losses.tolist()
    assert all(later <= earlier for earlier, later in pairwise(fitted))
    assert math.fsum(fitted) == pytest.approx(math.fsum(losses), abs=1e-9)

    def mean(first: int, last: int) -> float:
        return math.fsum(losses[first : last + 1]) / (last + 1 - first)

    count = len(losses)
    for at, loss in enumerate(fitted):
        nearest = min(
            max(mean(first, last) for last in range(at, count))
            for first in range(at + 1)
        )
        assert loss == pytest.approx(nearest, abs=1e-9)


def test_a_resumed_runs_later_losses_win_and_what_is_not_finite_is_counted() -> None:
    joined = curve([(1, 3.0), (2, 2.0), (3, float("nan")), (2, 2.5), (3, 1.0)])
    assert joined is not None and joined.dropped == 1
    assert (joined.steps.tolist(), joined.losses.tolist()) == (
        [1, 2, 3],
        [3.0, 2.5, 1.0],
    )
    assert curve([(1, float("inf"))]) is None

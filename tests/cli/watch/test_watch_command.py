"""The command: its text, its picture, and a job that it follows."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_muon.lab.watch.command import main
from support import ROOT

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
START = (
    b'{"kind":"start","format":1,"ranks":1,"muon_share":0.9,"newton_schulz_planned":1.0,'
    b'"rows":{"decoder.layers.0.mlp.linear_fc1":{"promised_rms":0.2,"full_rank":4.0},'
    b'"decoder.layers.1.mlp.linear_fc1":{"promised_rms":0.2,"full_rank":4.0}}}\n'
)


def step(number: int, update: float = 0.18) -> bytes:
    rows = ",".join(
        f'"decoder.layers.{layer}.mlp.linear_fc1":{{"update_rms":{update},"effective_rank":2}}'
        for layer in (0, 1)
    )
    return (
        f'{{"kind":"step","step":{number},"lr":0.01,"muon":{{{rows}}},'
        '"layers":{"decoder.layers.0":{"output_rms":1.5}},'
        '"newton_schulz_ms":{"mean":2.0,"max":3.0,"rank":0}}\n'
    ).encode()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "muon_watch.jsonl"
    path.write_bytes(START + step(10) + step(20))
    return path


def test_the_last_step_is_shown(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(file)]) == 0
    text = capsys.readouterr().out
    assert "steps 10 to 20, 2 records, 1 ranks, Muon has 90.0% of the parameters" in text
    assert "2 ms on the mean rank, 3 ms on rank 0" in text
    (row,) = [line for line in text.splitlines() if line.startswith("decoder.mlp.linear_fc1 (2)")]
    assert "0.9 0.9..0.9" in row and row.endswith("0.5 0.5..0.5")
    assert "decoder.layers.0" in text and "warning" not in text


def test_warnings_name_their_place_on_the_page(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_bytes(START + step(10, 0.02) + step(20, 0.02))
    assert main([str(file)]) == 0
    text = capsys.readouterr().out
    assert "warning: updates are off their promised size" in text
    assert "docs/troubleshooting.md, 'Updates are off their promised size'" in text


def test_damaged_lines_are_named_and_set_the_status(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_bytes(START + step(10) + b"\x1b[2J{\n" + step(20))
    assert main([str(file)]) == 1
    text = capsys.readouterr().out
    assert "damaged: line 3: no JSON" in text and "10 to 20" in text and "\x1b" not in text


def test_names_cannot_steer_the_terminal(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = b'{"kind":"step","step":30,"layers":{"a\\u001b[31m\\nb":{"output_rms":1.0}}}\n'
    file.write_bytes(START + row)
    main([str(file)])
    assert "\x1b" not in capsys.readouterr().out


def test_a_missing_or_empty_file_is_an_error(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(file.parent / "none")]) == 2
    assert "No such file" in capsys.readouterr().err
    file.write_bytes(START)
    assert main([str(file)]) == 2
    assert "no step yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--plot", "a.png", "--follow"], ["--seconds", "0"], ["--plot", ""]]
)
def test_wrong_arguments_end_with_2(file: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(file), *words])
    assert ended.value.code == 2


@pytest.mark.skipif(HAS_MATPLOTLIB, reason="matplotlib is there")
def test_without_matplotlib_the_picture_is_refused_before_reading(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(file), "--plot", "a.png"])
    assert "--plot needs matplotlib: pip install matplotlib" in capsys.readouterr().err


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is an extra")
def test_the_picture_has_every_number(file: Path, tmp_path: Path) -> None:
    from matplotlib.image import imread

    picture = tmp_path / "watch.png"
    assert main([str(file), "--plot", str(picture)]) == 0
    assert imread(str(picture)).shape[2] == 4
    with pytest.raises(SystemExit):
        main([str(file), "--plot", str(tmp_path / "watch.nothing")])


def _follow(file: Path, stderr: int | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "megatron_muon", "watch", str(file), "--follow"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [*command, "--seconds", "0.02"],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment,
    )


def test_a_running_job_is_followed(file: Path) -> None:
    """Half a line waits for its other half; a file that begins anew is read anew."""
    lines = []
    process = _follow(file)
    assert process.stdout is not None
    try:
        lines.append(process.stdout.readline())
        whole = step(30)
        for part in (whole[:25], whole[25:]):
            with file.open("ab") as out:
                out.write(part)
            time.sleep(0.1)
        lines.append(process.stdout.readline())
        file.write_bytes(START + step(5))
        lines.append(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()
    assert [line.split(";")[0] for line in lines] == ["step 20", "step 30", "step 5"]
    assert "update/promised 0.9" in lines[0]


def test_rows_of_earlier_splits_are_not_shown(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run goes on in the same file under another split."""
    after = (START + step(30)).replace(b"mlp.linear_fc1", b"mlp.linear_fc1[gate]")
    file.write_bytes(START + step(10) + step(20) + after)
    assert main([str(file)]) == 0
    text = capsys.readouterr().out
    assert "decoder.mlp.linear_fc1[gate] (2)" in text and "linear_fc1 (2)" not in text


def test_following_waits_for_the_file_and_names_damaged_lines(tmp_path: Path) -> None:
    file = tmp_path / "later.jsonl"
    process = _follow(file, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    try:
        assert process.stderr.readline() == f"waiting for {file}\n"
        file.write_bytes(b"{\n")
        first = process.stdout.readline()
        with file.open("ab") as out:
            out.write(START + step(10))
        second = process.stdout.readline()
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()
        process.stderr.close()
    assert first.startswith("damaged: line 1: no JSON")
    assert second.startswith("step 10")  # a line that was named is not named again

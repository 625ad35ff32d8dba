"""``megatron-muon routes`` of hybrid (Mamba) models and gated delta nets, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from megatron_muon.lab.commands import main
from megatron_muon.lab.dry_run.not_built import why_another_model
from support.installed import VERSION
from support.models.hybrid_model import GROUPS, HEAD, HIDDEN, STATE, VOCAB, planned_by_ranks
from support.models.model_flags import TINY
from support.ranks import run

INNER = 2 * HIDDEN
MAMBA = [
    *("--num-layers", "4", "--hidden-size", str(HIDDEN), "--num-attention-heads", "4"),
    *("--vocab-size", str(VOCAB), "--bf16", "--position-embedding-type", "none"),
    *("--use-distributed-optimizer", "--mamba-state-dim", str(STATE)),
    *("--mamba-head-dim", str(HEAD), "--mamba-num-groups", str(GROUPS)),
]
OLD = VERSION < (0, 17)  # the pattern is another flag, and MTP is not in it
PATTERN = "--hybrid-override-pattern" if OLD else "--hybrid-layer-pattern"
SPEC = ["--spec", "megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]
needs_pattern = pytest.mark.skipif(OLD, reason="the pattern has no stages before core 0.17")
needs_delta = pytest.mark.skipif(VERSION < (0, 16), reason="gated delta nets came with core 0.16")


def routes_json(argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["routes", "--json", *argv]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def parameters(routes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for stage in routes["stages"] for row in stage["parameters"]}


def error_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["routes", *argv])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    return said.err


# --- what is printed --------------------------------------------------------------------------


def test_a_hybrid_model_needs_no_einops(capsys: pytest.CaptureFixture[str]) -> None:
    """As in the quickstart's environment, in a process that has not imported it."""
    argv = [*MAMBA, PATTERN, "M*-M"]
    code = (
        "import sys; sys.modules['einops'] = None\n"
        "from megatron_muon.lab.commands import main\n"
        f"sys.exit(main(['routes', '--json', *{argv!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert parameters(json.loads(done.stdout)) == parameters(routes_json(argv, capsys))


def test_each_letter_of_a_pattern_is_its_layer(capsys: pytest.CaptureFixture[str]) -> None:
    """Matrices by the sizes of the Mamba-2 paper's block: z, x, B, C and dt out of one in_proj."""
    by_name = parameters(routes_json([*MAMBA, PATTERN, "M*-M", "--swiglu"], capsys))
    shapes = {name: row["shape"] for name, row in by_name.items() if name.startswith("decoder.")}
    rows = 2 * INNER + 2 * GROUPS * STATE + INNER // HEAD
    for layer in (0, 3):
        mixer = f"decoder.layers.{layer}.mixer"
        assert shapes[f"{mixer}.in_proj.weight"] == [rows, HIDDEN]
        assert shapes[f"{mixer}.out_proj.weight"] == [HIDDEN, INNER]
        assert shapes[f"{mixer}.A_log"] == shapes[f"{mixer}.D"] == [INNER // HEAD]
        assert shapes[f"{mixer}.norm.weight"] == [INNER]
        assert shapes[f"decoder.layers.{layer}.norm.weight"] == [HIDDEN]
        assert by_name[f"{mixer}.out_proj.weight"]["optimizer"] == "muon"
    assert shapes["decoder.layers.1.self_attention.linear_qkv.weight"] == [3 * HIDDEN, HIDDEN]
    assert not [name for name in shapes if ".1.mlp" in name or ".2.self_attention" in name]
    assert shapes["decoder.layers.2.mlp.linear_fc1.weight"] == [2 * 128, HIDDEN]  # gated
    assert shapes["decoder.final_norm.weight"] == [HIDDEN]
    in_proj = by_name["decoder.layers.0.mixer.in_proj.weight"]
    marked = VERSION >= (0, 20)  # by Megatron, use_muon=False
    assert in_proj["optimizer"] == ("adamw" if marked else "muon")


def test_experts_and_pipeline_stages(capsys: pytest.CaptureFixture[str]) -> None:
    if VERSION < (0, 15):
        pytest.skip("a hybrid model's layers of experts came later")
    argv = [*MAMBA, PATTERN, "ME*E", "--num-experts", "4", "--disable-bias-linear"]
    argv += ["--expert-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    routes = routes_json([*argv, "--world-size", "4"], capsys)
    names = [{row["name"] for row in stage["parameters"]} for stage in routes["stages"]]
    assert "decoder.layers.0.mixer.in_proj.weight" in names[0]
    assert "decoder.layers.2.self_attention.linear_qkv.weight" in names[1]
    for stage, layer in enumerate((1, 3)):
        experts = f"decoder.layers.{layer}.mlp.experts.local_experts"
        of_stage = {f"{experts}.{expert}.linear_fc1.weight" for expert in range(4)}
        assert of_stage <= names[stage]


@pytest.mark.skipif(not OLD, reason="flags up to core 0.16")
def test_ratios_make_the_pattern_that_megatron_makes_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from megatron.core.ssm.mamba_hybrid_layer_allocation import allocate_layers

    argv = [*MAMBA, "--num-layers", "8", "--hybrid-attention-ratio", "0.25"]
    names = parameters(routes_json([*argv, "--hybrid-mlp-ratio", "0.25"], capsys))
    signs = {"M": ".mixer.", "*": ".self_attention.", "-": ".mlp."}
    for layer, letter in enumerate(allocate_layers(8, 0.25, 0.25)):
        assert any(name.startswith(f"decoder.layers.{layer}{signs[letter]}") for name in names)


def test_a_specification_alone_is_a_model_of_mamba_layers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not OLD:
        assert "--hybrid-layer-pattern needed" in error_of([*MAMBA, *SPEC], capsys)
        return
    names = parameters(routes_json([*MAMBA, *SPEC], capsys))
    assert sum(name.endswith("mixer.in_proj.weight") for name in names) == 4


@needs_pattern
def test_segments_and_mtp_of_a_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    """Four segments on two stages: stage 0 has layers 0, 1 and 4, 5."""
    argv = [*MAMBA, PATTERN, "M*|-M|M-|*M/M*", "--pipeline-model-parallel-size", "2"]
    routes = routes_json([*argv, "--position-embedding-type", "rope"], capsys)
    layers = [
        {int(name.split(".")[2]) for name in names if name.startswith("decoder.layers")}
        for names in ([row["name"] for row in stage["parameters"]] for stage in routes["stages"])
    ]
    assert layers == [{0, 1, 4, 5}, {2, 3, 6, 7}]
    names = parameters(routes)
    assert "mtp.layers.0.mtp_model_layer.layers.0.mixer.out_proj.weight" in names
    assert "mtp.layers.0.mtp_model_layer.layers.1.self_attention.linear_qkv.weight" in names


@needs_delta
def test_a_gated_delta_net_is_in_the_place_of_attention(
    capsys: pytest.CaptureFixture[str],
) -> None:
    variant = ["--experimental-attention-variant", "gated_delta_net"]
    argv = [*TINY, "--num-layers", "4", "--linear-attention-freq", "2", *variant]
    argv += ["--linear-num-key-heads", "2", "--linear-num-value-heads", "4"]
    argv += ["--linear-key-head-dim", "8", "--linear-value-head-dim", "8"]
    by_name = parameters(routes_json([*argv, "--tensor-model-parallel-size", "2"], capsys))
    rows = 2 * 2 * 8 + 2 * 4 * 8 + 2 * 4  # q, k; v, gate; beta, alpha
    for layer in range(4):
        attention = f"decoder.layers.{layer}.self_attention"
        assert (f"{attention}.linear_qkv.weight" in by_name) == (layer % 2 == 1)
        if layer % 2 == 0:
            assert by_name[f"{attention}.in_proj.weight"]["shape"] == [rows // 2, HIDDEN]
            assert by_name[f"{attention}.A_log"]["tp"] == "rows"


def test_the_model_and_its_modules_are_named_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["routes", *MAMBA, PATTERN, "M*-M"]) == 0
    said = capsys.readouterr().err
    assert "the model is Megatron's hybrid model, as pretrain_mamba.py trains it" in said
    assert "built from Megatron's local modules, not Transformer Engine's" in said


# --- it is what ranks make --------------------------------------------------------------------


@pytest.mark.skipif(
    not (0, 14) <= VERSION <= (0, 16), reason="of the classes that megatron-core 0.14 to 0.16 has"
)
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2)])
def test_routes_of_a_hybrid_model_are_what_ranks_plan(
    tp: int, dp: int, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--tensor-model-parallel-size", str(tp), "--world-size", str(tp * dp)]
    routes = routes_json([*MAMBA, PATTERN, "M*-M", *sizes], capsys)
    rows = parameters(routes)
    for made in run(planned_by_ranks, tp * dp, "M*-M", tp):
        assert {name: row["shape"] for name, row in rows.items()} == made["shapes"]
        assert [
            (m["name"], m["rows"], m["cols"], m["home"])
            for row in rows.values()
            for m in row["matrices"]
        ] == sorted(made["matrices"], key=lambda m: list(rows).index(m[0].split("[")[0]))


# --- refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--vision-model-type clip", "--vision-model-type is not supported: it is of a vision lan"),
        ("--language-model-type=x", "--language-model-type is not supported: it is of a vision"),
        ("--img-h 336 --img-w 336", "--img-h is not supported: it is of a vision language model"),
        ("--freeze-LM", "--freeze-LM is not supported: it is of a vision language model"),
        ("--freeze-all-layers", "--freeze-all-layers is not supported: what it freezes has no opt"),
        ("--vision-pretraining", "--vision-pretraining is not supported: it is of a vision model"),
        ("--num-classes 10", "--num-classes is not supported: it is of a vision model"),
        ("--retro-project-dir x", "--retro-project-dir is not supported: it is of Retro"),
        ("--retro-add-retriever", "--retro-add-retriever is not supported: it is of Retro"),
        ("--decoder-seq-length 8", "--decoder-seq-length is not supported: it is of T5"),
        ("--vocab-extra-ids 100", "--vocab-extra-ids is not supported: it is of T5"),
        ("--encoder-num-layers 2", "--encoder-num-layers is not supported: give --num-layers"),
        ("--bert-no-binary-head", "--bert-no-binary-head is not supported: it is of BERT"),
        ("--ict-head-size 8", "--ict-head-size is not supported: it is of the bi-encoders"),
        ("--export-num-medusa-heads 2", "--export-num-medusa-heads is not supported: ModelOpt"),
        ("--spec my.layers stack", "--spec my.layers stack is not supported: the layers that are"),
        ("--heterogeneous-layers-config-path x", "--heterogeneous-layers-config-path is not"),
    ],
)
def test_another_model_is_refused_by_its_flag(
    flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in error_of([*TINY, *flags.split()], capsys)


@needs_delta
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--experimental-attention-variant dsa", "dsa is not supported, only gated_delta_net"),
        ("--experimental-attention-variant gated_delta_net", "needs --linear-attention-freq"),
        ("--linear-attention-freq 2", "needs --experimental-attention-variant"),
    ],
)
def test_variants_that_cannot_be_built(
    flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in error_of([*TINY, *flags.split()], capsys)


OLD_ERRORS = [
    (f"{PATTERN} M*", "pattern is the wrong length"),
    (f"{PATTERN} M*xM", "is not one of"),
    (f"{PATTERN} M*-M --mtp-num-layers 1", "hybrid models of this megatron-core have none"),
]
NEW_ERRORS = [
    (f"{PATTERN} M*xM", "x"),
    (f"{PATTERN} MD", "layers 'D', sparse attention, are not supported"),
    (f"{PATTERN} M|*|M --pipeline-model-parallel-size 2", "has 3 segments"),
    (f"{PATTERN} M* --hybrid-override-pattern M*", "is an older name of --hybrid-layer-pattern"),
    (f"{PATTERN} ME", "give --num-experts"),
    (f"{PATTERN} M*|-M --num-virtual-stages-per-pipeline-rank 2", "cannot be given with a hybr"),
]


@pytest.mark.parametrize(("flags", "said"), OLD_ERRORS if OLD else NEW_ERRORS)
def test_patterns_that_cannot_be(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in error_of([*MAMBA, *flags.split()], capsys)


def test_the_benchmark_takes_gpts_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "step", *f"{PATTERN} M*-M".split()])
    assert "every row's model is a GPT" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--num-layers", "--lr", "--export-te-mcore-model", "--til"])
def test_other_flags_are_of_no_other_model(flag: str) -> None:
    assert why_another_model(flag) is None


def test_nothing_of_a_stand_in_is_left_behind(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the packages are missing: Megatron says so itself, afterwards as before."""
    assert main(["routes", *MAMBA, PATTERN, "M*-M"]) == 0
    assert not [name for name in sys.modules if name.startswith(("mamba_ssm", "fla."))]
    assert all(module.__spec__ for name, module in sys.modules.items() if name == "triton")
    mixer = sys.modules["megatron.core.ssm.mamba_mixer"]
    assert getattr(mixer, "HAVE_MAMBA_SSM", False) is False

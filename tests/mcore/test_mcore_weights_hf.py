"""A Hugging Face checkpoint gives transformers' logits in every layout, and comes back unchanged."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from p3o_launch.errors import PreflightError
from p3o_launch.runtime.mcore.hf_config import check_hf_config
from p3o_launch.runtime.mcore.hf_files import TensorSource
from p3o_launch.schema import Model
from tests.mcore.ranks import RankEnv, run_ranks
from tests.mcore.tiny import FLOAT32, model_of, parallel, reference_class, tiny_model, write_hf_checkpoint

KINDS = [("qwen3", True), ("qwen3", False), ("qwen2", False), ("llama", True), ("qwen3_moe", False)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hf")
    for kind, tied in KINDS:
        write_hf_checkpoint(kind, root / f"{kind}-{tied}", tied=tied)
    return root


def _logits(env: RankEnv, model: Model, layout: dict[str, int], hf_dir: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Whole logits of ``tokens`` on the last stage's ranks, zeros elsewhere; the stages hand over by hand."""
    import torch.distributed as dist

    from p3o_launch.runtime.mcore.cpu_backend import device_backend
    from p3o_launch.runtime.mcore.groups import ParallelSizes, init_distributed
    from p3o_launch.runtime.mcore.model import build_model, unwrap
    from p3o_launch.runtime.mcore.weights_hf import export_hf, load_hf

    ep = layout.get("ep", 1) if model.num_experts else 1
    sizes = ParallelSizes(tp=layout.get("tp", 1), pp=layout.get("pp", 1), vpp=layout.get("vpp"), ep=ep, etp=1)
    vpp_layers = None if sizes.vpp is None else model.num_layers // (sizes.pp * sizes.vpp)
    groups = init_distributed(
        sizes, rank=env.rank, world_size=env.world_size, init_method=env.new_init_method(), timeout_s=60
    )
    layers = parallel(tp=sizes.tp, pp=sizes.pp, vpp_layers=vpp_layers, ep=ep, etp=1)
    chunks = build_model(model, layers, FLOAT32, groups)
    load_hf(chunks, hf_dir, groups)
    position = torch.arange(tokens.shape[1])[None].expand_as(tokens)
    hidden = torch.zeros(tokens.shape[1], tokens.shape[0], model.hidden_size)
    peers = dist.get_process_group_ranks(groups.pp)
    with device_backend("cpu"), torch.no_grad():
        for stage in range(sizes.pp * (sizes.vpp or 1)):
            holder = stage % sizes.pp
            if groups.pp_rank == holder:
                chunk = chunks[stage // sizes.pp].eval()
                unwrap(chunk).set_input_tensor(hidden)
                out = chunk(tokens, position, None)
                if stage < sizes.pp * (sizes.vpp or 1) - 1:
                    hidden = out
            dist.broadcast(hidden, src=peers[holder], group=groups.pp)
        logits = torch.zeros(())
        if groups.is_last_stage:
            parts = [torch.empty_like(out) for _ in range(groups.tp_size)]
            dist.all_gather(parts, out.contiguous(), group=groups.tp)
            logits = torch.cat(parts, -1)
    export_hf(chunks, env.directory / f"export-{env._rendezvous}", groups, source_dir=hf_dir)
    _assert_same_tensors(env.directory / f"export-{env._rendezvous}", hf_dir)
    groups.destroy()
    return logits


def _assert_same_tensors(exported: Path, original: Path) -> None:
    with TensorSource(exported) as ours, TensorSource(original) as theirs:
        assert ours.names() == theirs.names()
        for name in sorted(ours.names()):
            assert torch.equal(ours.read(name), theirs.read(name)), name


def _all_layouts(env: RankEnv, root: Path, layouts: list[dict[str, int]], tokens: torch.Tensor) -> list[torch.Tensor]:
    return [
        _logits(env, model_of(kind, tied), layout, root / f"{kind}-{tied}", tokens)
        for kind, tied in KINDS
        for layout in layouts
    ]


@pytest.mark.parametrize(
    "layouts",
    [[{}], [{"tp": 2}, {"pp": 2, "vpp": 2}, {"pp": 2}, {"ep": 2}]],
    ids=["one-process", "two-processes"],
)
def test_logits_equal_transformers_and_the_export_equals_the_import(
    checkpoints: Path, layouts: list[dict[str, int]]
) -> None:
    tokens = torch.randint(0, 32, (3, 20), generator=torch.Generator().manual_seed(1))
    world = max(layout.get("tp", 1) * layout.get("pp", 1) for layout in layouts)
    ranks = run_ranks(_all_layouts, world, checkpoints, layouts, tokens)
    for index, (kind, tied) in enumerate((kind, tied) for kind, tied in KINDS for _ in layouts):
        reference = reference_class(kind).from_pretrained(checkpoints / f"{kind}-{tied}", dtype=torch.float32)
        with torch.no_grad():
            wanted = reference(tokens).logits
        ours = ranks[world - 1][index]
        assert wanted.abs().max() > 1.0
        torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-5)


def _load(env: RankEnv, model: Model, hf_dir: Path) -> str:
    from p3o_launch.runtime.mcore.groups import ParallelSizes, init_distributed
    from p3o_launch.runtime.mcore.model import build_model
    from p3o_launch.runtime.mcore.weights_hf import load_hf

    groups = init_distributed(ParallelSizes(), rank=0, world_size=1, init_method=env.new_init_method(), timeout_s=60)
    try:
        load_hf(build_model(model, parallel(), FLOAT32, groups), hf_dir, groups)
    except PreflightError as error:
        return error.message
    finally:
        groups.destroy()
    return ""


def test_missing_unexpected_and_misshapen_tensors_are_named(checkpoints: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = checkpoints / "qwen3-True"
    tensors = load_file(source / "model.safetensors")
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    changed = {name: value for name, value in tensors.items() if name != "model.layers.1.mlp.up_proj.weight"}
    save_file(changed | {"model.layers.9.extra": torch.zeros(1)}, broken / "model.safetensors")
    message = run_ranks(_load, 1, model_of("qwen3"), broken)[0]
    assert "missing: model.layers.1.mlp.up_proj.weight" in message
    assert "unexpected: model.layers.9.extra" in message

    save_file(tensors | {"model.norm.weight": torch.ones(63)}, broken / "model.safetensors")
    assert "model.norm.weight" in run_ranks(_load, 1, model_of("qwen3"), broken)[0]


def test_a_config_that_differs_names_every_field(checkpoints: Path) -> None:
    source = checkpoints / "qwen3-True"
    check_hf_config(model_of("qwen3"), source)
    with pytest.raises(PreflightError) as error:
        check_hf_config(tiny_model(num_layers=6, rotary_base=5e6, qk_layernorm=False), source)
    for part in ("num_layers is 6, the checkpoint has 4", "rotary_base", "qk_layernorm"):
        assert part in error.value.message
    assert "hidden_size" not in error.value.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "type 'gpt2'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
    ],
)
def test_an_architecture_we_do_not_compute_is_refused(
    checkpoints: Path, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    config = json.loads((checkpoints / "qwen3-True" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(PreflightError, match=words):
        check_hf_config(model_of("qwen3"), tmp_path)


def test_a_directory_without_a_checkpoint_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"no config\.json"):
        check_hf_config(model_of("qwen3"), tmp_path)
    with pytest.raises(PreflightError, match="no weights"):
        TensorSource(tmp_path)

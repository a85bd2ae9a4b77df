"""`doctor`: says what it saw, says what it did not look at, and starts nothing."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from p3o_launch.check import check_text
from p3o_launch.launch import launch_warnings as warnings_module
from p3o_launch.launch.doctor import Check, preset_checks, ray_check, report_json, report_text
from p3o_launch.launch.launch_warnings import checkpoint_bytes, launch_warnings, proxy_fault, saved_bytes
from p3o_launch.launch.preflight import Request

ROOT = Path(__file__).parents[2]
BASE = ROOT / "tests/data/base.yaml"


def run(*words: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "from p3o_launch.cli import main; main()"
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.argv = ['p3o-launch', *{list(words)!r}]; {code}"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env=kept | environment,
    )


def checks(text: str) -> list[Check]:
    return list(preset_checks(check_text(text, file="mine.yaml"), Request("mine.yaml")))


def cpu_preset(directory: Path, lines: list[str], **changes: str) -> str:
    """A preset of the built-in checkpoint with prompts of its own."""
    (directory / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    data = {"prompt_data": str(directory / "prompts.jsonl"), "input_key": "prompt", "label_key": "label"} | changes
    return "extends: on_policy\nprofile: cpu\nschema_version: 1\ndata:\n" + "".join(
        f"  {key}: {value}\n" for key, value in data.items()
    )


def gpus_of(directory: Path, rows: str) -> str:
    """A PATH whose nvidia-smi prints ``rows``: the program is asked as on a machine with GPUs."""
    script = directory / "nvidia-smi"
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{rows}\nEND\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return f"{directory}{os.pathsep}{os.environ['PATH']}"


def test_the_machine_alone_needs_no_preset() -> None:
    done = run("doctor")
    assert done.returncode == 0
    assert "python 3." in done.stdout
    assert "main memory" in done.stdout
    assert "GiB free" in done.stdout


def test_doctor_imports_nothing_heavy_without_a_preset() -> None:
    code = (
        "import sys; sys.argv = ['p3o-launch', 'doctor']\n"
        "from p3o_launch.cli import dispatch, guarded\n"
        "guarded(dispatch)\n"
        "sys.stderr.write(str(sorted({'torch', 'ray', 'megatron', 'transformers', 'numpy'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == "[]"


def test_gpus_are_named_with_memory_driver_and_capability(tmp_path: Path) -> None:
    path = gpus_of(tmp_path, "NVIDIA A100-SXM4-80GB, 81920 MiB, 550.54.15")
    done = run("doctor", PATH=path)
    assert "NVIDIA A100-SXM4-80GB, 81920 MiB, driver 550.54.15, compute capability 8.0" in done.stdout


def test_a_preset_for_another_gpu_and_too_few_of_them(tmp_path: Path) -> None:
    path = gpus_of(tmp_path, "Tesla T4, 15360 MiB, 550.54.15")
    done = run("doctor", "on_policy", PATH=path)
    assert done.returncode == 1
    assert "P3O609 on_policy needs 4 GPUs of type A100-80GB; this machine has 1 GPU" in done.stdout
    assert "cluster.gpu is A100-80GB; this machine has Tesla T4" in done.stdout


def test_two_bars_for_the_declared_gpu_and_what_was_not_checked() -> None:
    done = run("doctor", "on_policy", "--format", "json")
    report = json.loads(done.stdout)
    assert report["version"] == 1
    texts = [check["text"] for check in report["checks"]]
    assert any(text.startswith("training: about 66.0 GiB per rank (weights 7.5,") for text in texts)
    assert any(text.startswith("generation: about 51.3 GiB per rank") for text in texts)
    unknown = [check["text"] for check in report["checks"] if check["state"] == "not checked"]
    assert any("config.json" in text for text in unknown)
    assert any("token lengths" in text for text in unknown)


def test_the_cpu_profile_is_examined_to_the_last_prompt_length() -> None:
    done = run("doctor", "on_policy", "--profile", "cpu")
    assert done.returncode == 0, done.stdout
    assert "the model group agrees with config.json of builtin:arithmetic" in done.stdout
    assert "builtin:arithmetic: first 1000 prompts have fields, and 4 to 6 tokens, median 5" in done.stdout


@pytest.mark.parametrize(
    ("lines", "changes", "state", "part"),
    [
        (['{"prompt": "1+1=", "label": "2"}'], {}, "ok", "first 1 prompts have fields, and 4 to 4 tokens"),
        (['{"prompt": "1+1="}'], {}, "error", "label"),
        (['{"question": "1+1=", "label": "2"}'], {}, "error", "prompt"),
        (['{"prompt": "' + "1" * 40 + '=", "label": "2"}'], {}, "error", "above rollout.max_prompt_len (16)"),
        (
            ['{"prompt": "' + "1" * 40 + '=", "label": "2"}', '{"prompt": "1+1=", "label": "2"}'],
            {"overlong_prompts": "skip"},
            "warning",
            "1 above rollout.max_prompt_len (16): they are skipped",
        ),
        (["not json"], {}, "error", "prompts.jsonl:1"),
        (['{"prompt": "1+1=", "label": "2"}'], {}, "warning", "holds 1 different prompt, a rollout takes 16"),
        (
            ['{"prompt": "1+1=", "label": "2"}', '{"prompt": "1 + 2=", "label": "3"}'],
            {},
            "warning",
            "1 of 2 prompts of",
        ),
        (['{"prompt": "one", "label": "1"}'], {}, "error", "does not know: 'o' 'n' 'e'"),
        (['{"prompt": "1+1=", "label": "two"}'], {}, "error", "no response can be any label of"),
        ([""], {}, "error", "holds no usable prompt"),
    ],
)
def test_dataset_fields_and_lengths(
    lines: list[str], changes: dict[str, str], state: str, part: str, tmp_path: Path
) -> None:
    found = checks(cpu_preset(tmp_path, lines, **changes))
    assert [check for check in found if check.state == state and part in check.text], found


def test_missing_files_and_faults_of_the_preset_are_errors(tmp_path: Path) -> None:
    text = cpu_preset(tmp_path, ["{}"], prompt_data="/nowhere/train.jsonl")
    assert any("P3O610" in check.text and check.state == "error" for check in checks(text))
    broken = checks(f"extends: {BASE}\nrollout: {{top_p: 0.9}}\n")
    assert [check.state for check in broken] == ["error", "not checked"]
    partial = checks("partial: true\nschema_version: 1\n")
    assert partial[-1].state == "not checked"


def test_a_ray_address_is_tried() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert ray_check(address, "RAY_ADDRESS").state == "ok"
        assert ray_check(f"ray://{address}", "RAY_ADDRESS").state == "ok"
    assert ray_check(address, "RAY_ADDRESS").state == "error"
    assert ray_check("auto", "RAY_ADDRESS").state == "not checked"
    assert ray_check(None, "RAY_ADDRESS").state == "ok"
    for odd in ("head", "http://", "a:b:c", "[::1", "host:99999999"):
        assert ray_check(odd, "RAY_ADDRESS").state == "error"


def test_proxies_that_reach_this_node() -> None:
    assert proxy_fault({}) is None
    assert proxy_fault({"http_proxy": "http://p:1", "no_proxy": "*"}) is None
    fault = proxy_fault({"HTTPS_PROXY": "http://p:1", "no_proxy": "localhost,10.0.0.0/8"})
    assert fault is not None
    assert "HTTPS_PROXY is set" in fault
    assert "127.0.0.1" in fault
    assert "ranges" in fault


def test_disk_for_the_checkpoints_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    preset = check_text(f"extends: {BASE}\n").preset
    assert preset is not None
    # 0.6 B parameters in bf16, once for the trainer and once for the rollout, and 12 bytes of Adam's each.
    assert checkpoint_bytes(preset) / 596_049_920 == pytest.approx(16, rel=1e-6)
    assert saved_bytes(preset) == 3 * checkpoint_bytes(preset)

    def codes(free: int) -> list[str]:
        disk = warnings_module.Disk(Path("/"), free, 100 * 2**40)
        monkeypatch.setattr(warnings_module, "disk_of", lambda _: disk)
        monkeypatch.setattr(warnings_module, "working_tree", lambda: None)
        return [finding.code for finding in launch_warnings(check_text(f"extends: {BASE}\n"), preset)]

    assert codes(50 * 2**40) == []
    assert codes(2 * checkpoint_bytes(preset)) == ["P3O604"]
    assert codes(9 * 2**40) == ["P3O604"]  # 91 % full
    assert codes(11 * 2**40) == []
    ignoring = check_text(f'extends: {BASE}\nignore: {{P3O604: "a quota of our own"}}\n').preset
    assert ignoring is not None
    assert launch_warnings(check_text(f"extends: {BASE}\n"), ignoring) == []


def test_a_dirty_tree_refuses_a_strict_launch_and_no_other(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "code.py").write_text("x = 1\n")
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(tmp_path), "add", "."], check=True)
    subprocess.run(["git", "-C", str(tmp_path), *author, "commit", "-q", "-m", "one"], check=True)
    preset = check_text(f"extends: {BASE}\n").preset
    assert preset is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        result = check_text(f"extends: {BASE}\n")
        assert "P3O704" not in [finding.code for finding in launch_warnings(result, preset)]
        (tmp_path / "code.py").write_text("x = 2\n")
        assert "P3O704" in [finding.code for finding in launch_warnings(result, preset)]
    for command in (["run"], ["submit", "--ray-address", "http://127.0.0.1:1"]):
        done = run(*command, "--preset", "on_policy", "--profile", "cpu", "--strict", cwd=tmp_path)
        assert done.returncode == 1, done.stderr
        assert "warning P3O704 the working tree at" in done.stdout
        assert not (tmp_path / "runs").exists()


def test_the_report_counts_every_state() -> None:
    listed = [Check("a", "ok", "x"), Check("a", "error", "y", "mend it"), Check("b", "not checked", "z")]
    assert report_text(listed) == (
        "a\n  ok          x\n  error       y\n              hint: mend it\n"
        "b\n  not checked z\n1 ok, 1 error, 1 not checked\n"
    )
    assert [check["state"] for check in json.loads(report_json(listed))["checks"]] == ["ok", "error", "not checked"]


def test_another_format_is_a_usage_error() -> None:
    assert run("doctor", "--format", "sarif").returncode == 2

"""From a file to findings: one fault, one finding, at its place, in words a user can act on."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from p3o_launch import check, guards
from p3o_launch.check import CheckResult, check_file, check_text
from p3o_launch.diagnostics import Finding, Severity
from p3o_launch.fields import FIELDS
from p3o_launch.guards import GuardContext, Rule
from p3o_launch.schema import Preset
from p3o_launch.shape import _REQUIRED, known_path, suggest

DATA = Path(__file__).parents[1] / "data"
BASE = (DATA / "base.yaml").read_text()
TREE: dict[str, Any] = yaml.safe_load(BASE)


def checked(text: str, **options: Any) -> CheckResult:
    return check_text(text, file=str(DATA / "x.yaml"), **options)


def child(text: str, **options: Any) -> CheckResult:
    return checked("extends: base.yaml\n" + text, **options)


def one(result: CheckResult) -> tuple[str, int, int, str, str | None]:
    (finding,) = result.findings
    return finding.code, finding.position.line, finding.position.column, finding.message, finding.hint


def dumped(data: Any) -> str:
    return yaml.safe_dump(data, sort_keys=False)


def test_a_sound_preset_has_no_finding_and_resolves_to_itself() -> None:
    result = checked(BASE)
    assert result.findings == ()
    assert result.preset is not None
    assert result.preset.model.num_layers == 28
    assert result.preset.optimizer.lr == 1e-5
    assert {**result.resolved, "name": None} == {**TREE, "name": None}


FAULTS = [
    # text, code, line, column, message contains, hint
    ("batch:\n  micro_batch_size: two\n", "P3O007", 3, 21, "must be a whole number, but is the text 'two'", None),
    ("batch:\n  micro_batch_size: 2.0\n", "P3O007", 3, 21, "must be a whole number, but is the number 2.0", "write 2"),
    ("batch:\n  micro_batch_size: 2.5\n", "P3O007", 3, 21, "must be a whole number", None),
    ("batch:\n  micro_batch_size: 1e1\n", "P3O007", 3, 21, "the text '1e1'", "write 10"),
    ("batch:\n  micro_batch_size: '4'\n", "P3O007", 3, 21, "the text '4'", "remove the quotes"),
    ("batch:\n  micro_batch_size: true\n", "P3O007", 3, 21, "the boolean true", None),
    ("batch:\n  micro_batch_size: -1\n", "P3O007", 3, 21, "must be at least 1, but is the number -1", None),
    ("batch:\n  micro_batch_size: [1]\n", "P3O007", 3, 21, "but is a list", None),
    ("batch:\n  micro_batch_size:\n", "P3O007", 3, 20, "but is empty", None),
    ("batch: 3\n", "P3O007", 2, 8, "batch must be a group of settings, but is the number 3", None),
    ("batch: []\n", "P3O007", 2, 8, "batch must be a group of settings, but is a list", None),
    ("optimizer:\n  lr: yes\n", "P3O007", 3, 7, "the boolean true (yes is a boolean in YAML 1.1)", None),
    ("optimizer:\n  lr: fast\n", "P3O007", 3, 7, "must be a number, but is the text 'fast'", None),
    ("optimizer:\n  lr: .nan\n", "P3O007", 3, 7, "must be a finite number", None),
    ("optimizer:\n  lr: -1e-5\n", "P3O007", 3, 7, "must be at least 0", None),
    ("optimizer:\n  adam_beta1: 1.5\n", "P3O007", 3, 15, "must be at most 1, but is the number 1.5", None),
    ("optimizer:\n  lr: 1E39\n", "P3O007", 3, 7, "must be a finite number", "numbers above 3.4e38 are infinite"),
    ("model:\n  rotary_base: 0\n", "P3O007", 3, 16, "must be above 0", None),
    ("algorithm:\n  ess_scope: steps\n", "P3O007", 3, 14, "must be one of step, micro_batch", "did you mean step?"),
    (
        "algorithm:\n  use_tis: 'on'\n",
        "P3O007",
        3,
        12,
        "must be true or false, but is the text 'on'",
        "remove the quotes",
    ),
    ("data:\n  input_key: 1\n", "P3O007", 3, 14, "must be text, but is the number 1", 'put it in quotes: "1"'),
    ("data:\n  input_key: 010\n", "P3O007", 3, 14, "010 is octal in YAML 1.1", 'put it in quotes: "010"'),
    ("data:\n  input_key: off\n", "P3O007", 3, 14, "off is a boolean in YAML 1.1", 'put it in quotes: "off"'),
    ("data:\n  input_key: ''\n", "P3O007", 3, 14, "must be a text that is not empty", None),
    ("data:\n  input_key: 1.50\n", "P3O007", 3, 14, "the number 1.50 (1.5)", 'put it in quotes: "1.50"'),
    ("name: a/b\n", "P3O007", 2, 7, "name must be 1 to 64 letters", None),
    ("cluster:\n  env:\n    A: 1\n", "P3O007", 4, 8, "cluster.env.A must be text", 'put it in quotes: "1"'),
    ("cluster:\n  env: text\n", "P3O007", 3, 8, "cluster.env must be a mapping", None),
    (
        "batch:\n  micro_batch_size: 010\n",
        "P3O007",
        3,
        21,
        "010 is octal in YAML 1.1 and means 8",
        "write 10, or 8 if octal is meant",
    ),
    ("cluster:\n  timeout_s: 10:00\n", "P3O007", 3, 14, "means 600", "write 600"),
    (
        "batch:\n  micro_batchsize: 2\n",
        "P3O006",
        3,
        3,
        "no setting batch.micro_batchsize",
        "did you mean batch.micro_batch_size?",
    ),
    ("micro_batch_size: 2\n", "P3O006", 2, 1, "no setting micro_batch_size", "belongs under batch"),
    ("optimizer:\n  temperature: 0.6\n", "P3O006", 3, 3, "no setting optimizer.temperature", "belongs under rollout"),
    ("optimiser:\n  lr: 1e-5\n", "P3O006", 2, 1, "no setting optimiser", "did you mean optimizer?"),
    (
        "training:\n  global_batch_size: 4\n  num_rollout: 1\n",
        "P3O006",
        2,
        1,
        "no setting training",
        "did you mean batch?",
    ),
    ("batch: {a b: 2}\n", "P3O006", 2, 9, "no setting batch.'a b'", None),
    ("extend: other\n", "P3O006", 2, 1, "no setting extend", "did you mean extends?"),
    ("schema_version: 2\n", "P3O010", 2, 17, "schema_version is 2", "write schema_version: 1"),
    ("schema_version: one\n", "P3O010", 2, 17, "schema_version is 'one'", "write schema_version: 1"),
    ("seed: 42\n", "P3O007", 2, 7, "seed must be a group of settings", None),
]


@pytest.mark.parametrize(("text", "code", "line", "column", "message", "hint"), FAULTS, ids=[f[0] for f in FAULTS])
def test_one_fault_is_one_finding(text: str, code: str, line: int, column: int, message: str, hint: str | None) -> None:
    found = one(child(text))
    assert found[:3] == (code, line, column)
    assert message in found[3]
    assert (hint in (found[4] or "")) if hint else True


REQUIRED = [(group, field) for group, fields in FIELDS.items() for field, shape in fields.items() if shape[1]]


@pytest.mark.parametrize("path", REQUIRED, ids=".".join)
def test_a_missing_key_is_one_finding_at_its_group(path: tuple[str, str]) -> None:
    tree = copy.deepcopy(TREE)
    del tree[path[0]][path[1]]
    text = dumped(tree)
    code, line, _, message, _ = one(checked(text))
    assert code == "P3O012"
    assert f"{path[0]}.{path[1]} is missing" in message
    assert text.splitlines()[line - 1].startswith(f"{path[0]}:")


@pytest.mark.parametrize("group", ["algorithm", "model", "batch", "optimizer", "rollout", "data"])
def test_a_missing_group_is_one_finding(group: str) -> None:
    tree = {key: value for key, value in TREE.items() if key != group}
    assert one(checked(dumped(tree)))[3] == f"{group} is missing"


@pytest.mark.parametrize("path", REQUIRED, ids=".".join)
def test_a_misspelt_required_key_is_not_reported_as_missing_too(path: tuple[str, str]) -> None:
    tree = copy.deepcopy(TREE)
    tree[path[0]][path[1] + "s"] = tree[path[0]].pop(path[1])
    code, _, _, _, hint = one(checked(dumped(tree)))
    assert code == "P3O006"
    assert hint == f"did you mean {'.'.join(path)}?"


@pytest.mark.parametrize("group", ["algorithm", "model", "batch", "optimizer", "rollout", "data"])
def test_a_misspelt_required_group_is_not_reported_as_missing_too(group: str) -> None:
    tree = {key if key != group else key[:-1]: value for key, value in TREE.items()}
    code, _, _, _, hint = one(checked(dumped(tree)))
    assert (code, hint) == ("P3O006", f"did you mean {group}?")


def test_every_fault_is_reported_in_one_pass_in_the_order_of_the_file() -> None:
    result = child(
        "batch:\n  micro_batch_size: 0\n  num_rollouts: 3\noptimizer:\n  lr: off\nmodel:\n  attention_dropout: 0.1\n"
    )
    assert [(f.code, f.position.line) for f in result.findings] == [
        ("P3O007", 3),
        ("P3O006", 4),
        ("P3O007", 6),
        ("P3O201", 8),
    ]


def test_a_guard_that_reads_a_broken_field_waits_until_it_is_mended() -> None:
    broken = child("batch:\n  micro_batch_size: nine\n  global_batch_size: 49\n")
    assert [f.code for f in broken.findings] == ["P3O007"]
    mended = child("batch:\n  micro_batch_size: 9\n  global_batch_size: 49\n")
    assert "P3O302" in {f.code for f in mended.findings}


def test_a_finding_lies_in_the_file_that_wrote_the_deciding_value(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(BASE.replace("top_p: 1.0", "top_p: 0.9"))
    (tmp_path / "hot.yaml").write_text("partial: true\nrollout:\n  top_k: 5\n")
    (tmp_path / "child.yaml").write_text("extends: parent.yaml\nprofile: hot.yaml\n\nrollout: {min_p: 0.1}\n")
    found = check_file(str(tmp_path / "child.yaml")).findings
    line = BASE.splitlines().index("  top_p: 1.0") + 1
    assert [
        (f.code, Path(f.position.file).name, f.position.line, f.position.column, f.position.origin) for f in found
    ] == [
        ("P3O401", "child.yaml", 4, 18, ""),
        ("P3O401", "hot.yaml", 3, 10, "profile hot.yaml"),
        ("P3O401", "parent.yaml", line, 10, "extends"),
    ]


def test_a_finding_about_an_absent_value_lies_at_its_group() -> None:
    text = BASE.replace("  use_rollout_logprobs: true\n", "")
    code, line, column, _, _ = one(checked(text))
    assert (code, text.splitlines()[line - 1], column) == ("P3O101", "algorithm:", 1)


def test_a_finding_of_an_override_says_so() -> None:
    (finding,) = child("", overrides=["rollout.temperature=0.6", "rollout.top_p=0.9"]).findings
    p = finding.position
    assert (finding.code, p.file, p.line, p.column, p.origin) == ("P3O401", "--set", 2, 15, "--set")


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("rollout.temprature=1", "P3O009"),
        ("rollout=", "P3O007"),
        ("nothing=1", "P3O009"),
        ("extends=on_policy", "P3O009"),
        ("rollout.temperature.x=1", "P3O009"),
        ("seed.seed.seed=1", "P3O009"),
        ("batch.micro_batch_size=[1", "P3O002"),
        ("batch.micro_batch_size=two", "P3O007"),
        ("batch.micro_batch_size=010", "P3O007"),
        ("batch.micro_batch_size=!!python/name:os.system", "P3O005"),
        ("batch={zebra: 1}", "P3O006"),
    ],
)
def test_a_wrong_override_is_one_finding(override: str, code: str) -> None:
    (finding,) = child("", overrides=[override]).findings
    assert (finding.code, finding.position.file, finding.position.line) == (code, "--set", 1)


def test_overrides_reach_every_kind_of_setting() -> None:
    result = child(
        "",
        overrides=[
            "batch={num_rollout: 3, micro_batch_size: 2}",
            "optimizer.lr=3e-6",
            'cluster.env.A_B.c="1"',
            "cluster.runtime_env.env_vars={A: b}",
            "evaluation.interval=null",
            'ignore.P3O113="monitoring"',
            "name=other",
            "batch.num_rollout=4",
        ],
    )
    assert result.findings == ()
    assert result.preset is not None
    assert (result.preset.batch.num_rollout, result.preset.batch.micro_batch_size) == (4, 2)
    assert result.preset.optimizer.lr == 3e-6
    assert result.preset.cluster.env == {"A_B.c": "1"}
    assert result.preset.cluster.runtime_env == {"env_vars": {"A": "b"}}
    assert result.preset.name == "other"


def test_the_error_message_does_not_show_a_value_under_a_secrets_name() -> None:
    (finding,) = child("cluster:\n  env:\n    WANDB_API_KEY: 31415926\n").findings
    assert "31415926" not in finding.message + str(finding.hint)


def test_control_characters_do_not_reach_the_terminal() -> None:
    for text in ('"a\\e[31m": 1\n', 'data: {input_key: ["\\e[2J"]}\n', 'algorithm: {kl_mode: "\\e[2J"}\n'):
        for finding in child(text).findings:
            assert (finding.message + str(finding.hint)).isprintable()


def test_a_partial_file_is_checked_for_shape_only() -> None:
    assert checked("partial: true\nbatch: {micro_batch_size: 2}\n").findings == ()
    assert checked("partial: true\nbatch: {micro_batch_size: 2}\n").preset is None
    assert [f.code for f in checked("partial: true\nbatch: {micro_batchsize: 2}\n").findings] == ["P3O006"]


# ignore


def test_a_warning_is_ignored_with_a_reason_that_is_kept() -> None:
    text = "algorithm: {eps_clip: 0.3}\n"
    assert [f.code for f in child(text).findings] == ["P3O113"]
    result = child(text + "ignore: {P3O113: shared with the other arm}\n")
    assert result.findings == ()
    assert [(s.finding.code, s.reason) for s in result.suppressed] == [("P3O113", "shared with the other arm")]


def test_an_error_that_changes_the_objective_cannot_be_ignored() -> None:
    result = child("algorithm: {use_tis: true}\nignore: {P3O102: no}\n".replace("no}", "because}"))
    assert sorted(f.code for f in result.findings) == ["P3O013", "P3O102"]
    assert result.suppressed == ()


@pytest.mark.parametrize(
    ("ignored", "code"),
    [("{P3O113: }", "P3O007"), ("{P3O113: ''}", "P3O007"), ("[P3O113]", "P3O007"), ("{p3o113: x}", "P3O013")],
)
def test_ignore_wants_a_code_and_a_reason(ignored: str, code: str) -> None:
    assert one(child(f"ignore: {ignored}\n"))[0] == code


def test_a_broken_entry_of_ignore_hides_no_rule_and_breaks_none() -> None:
    found = child("ignore: {P3O113: }\nmodel: {hidden_dropout: 0.1}\nbatch: {micro_batch_size: 4}\n")
    assert not found.crashed
    assert {"P3O007", "P3O201"} <= {finding.code for finding in found.findings}


# guards that crash


@pytest.fixture
def crashing_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(context: GuardContext) -> Iterator[Finding]:
        yield Finding("batch", "never seen")
        raise ZeroDivisionError("oops")

    rules = guards.all_guards()
    rule = Rule("P3O199", "crashes", Severity.WARNING, "", "", "", body=body)
    monkeypatch.setattr(check, "all_guards", lambda: {**rules, "P3O199": rule})


@pytest.mark.usefixtures("crashing_rule")
def test_a_guard_that_raises_is_a_finding_and_hides_no_other() -> None:
    result = child("model: {attention_dropout: 0.1}\n")
    assert [f.code for f in result.findings] == ["P3O901", "P3O201"]
    assert "P3O199" in result.findings[0].message
    assert "ZeroDivisionError: oops" in result.findings[0].message
    assert result.crashed
    assert result.has_errors
    assert "Traceback" in result.crashes[0]


@pytest.mark.usefixtures("crashing_rule")
def test_a_crash_cannot_be_ignored() -> None:
    assert sorted(f.code for f in child("ignore: {P3O901: x}\n").findings) == ["P3O013", "P3O901"]


# paths


def test_known_paths_are_those_of_the_schema() -> None:
    assert known_path("batch") == ("batch",)
    assert known_path("batch.num_rollout") == ("batch", "num_rollout")
    assert known_path("cluster.env.A.B") == ("cluster", "env", "A.B")
    assert known_path("rollout.extra.a.b") == ("rollout", "extra", "a", "b")
    assert known_path("ignore.P3O113") == ("ignore", "P3O113")
    for dotted in ("", ".", "batch.", "batch..x", "nope", "batch.nope", "batch.num_rollout.x", "name.x"):
        assert known_path(dotted) is None or dotted == "batch."


def test_suggestions_are_existing_paths_or_directives() -> None:
    for path in [("temprature",), ("rolout", "temperature"), ("batch", "lr"), ("seed", "sed"), ("profil",)]:
        meant = suggest(path)
        assert meant is not None
        assert known_path(".".join(meant)) == meant or meant[0] in ("extends", "profile", "recipe")


def test_the_placeholder_has_every_required_field() -> None:
    assert Preset.model_validate(_REQUIRED).name == "placeholder"


# hostile input


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from([*FIELDS, "env", "extra", "lr", "name", "ignore", "extends", "x y"]), inner
            ),
        ),
        max_leaves=12,
    )
)
def test_whatever_a_mapping_holds_is_findings_or_a_preset(tree: Any) -> None:
    result = check_text(dumped({"schema_version": 1, "g": tree}), file="x.yaml")
    assert result.findings
    assert not result.crashed


PATHS = [(group, field) for group, fields in FIELDS.items() for field in fields]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 100),
    st.sampled_from([0, 1, 2, 3, 4, 7, 64, 2**63, 10**30]),
    st.floats(),
    st.sampled_from(["", "x", "1e-5", "none", "auto", "\x1b[0m", "P3O113"]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(PATHS), VALUES, min_size=1, max_size=5))
def test_no_value_of_a_field_crashes_a_guard(changes: dict[tuple[str, str], Any]) -> None:
    tree = copy.deepcopy(TREE)
    for (group, field), value in changes.items():
        tree.setdefault(group, {})[field] = value
    result = check_text(dumped(tree), file="x.yaml")
    assert not result.crashed, result.crashes
    assert result.findings or isinstance(result.preset, BaseModel)


def test_a_large_file_full_of_faults_is_judged_in_a_second() -> None:
    text = "\n".join(f"temperatur{i}: 1" for i in range(4000))
    start = time.perf_counter()
    result = checked(text)
    assert time.perf_counter() - start < 1
    assert len(result.findings) == 4001


def test_a_file_is_read_once_and_named_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(BASE)
    result = check_file("./a.yaml")
    assert result.source == "./a.yaml"
    assert result.findings == ()
    assert [file.path for file in result.chain] == ["./a.yaml"]

"""Files to one tree: inheritance, recipes, profiles, overrides, and the origin of every value."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p3o_launch.errors import UsageError
from p3o_launch.loading import MAX_FILES, Flat, Loaded, flatten, load

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)

    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def flat(loaded: Loaded) -> Flat:
    assert not loaded.findings
    assert loaded.root is not None
    return flatten(loaded.root)


def data(loaded: Loaded) -> dict[str, Any]:
    settings: dict[str, Any] = flat(loaded).data
    return {key: value for key, value in settings.items() if key != "name"}


def only(loaded: Loaded) -> tuple[str, str, int, int, str]:
    (finding,) = loaded.findings
    p = finding.position
    assert loaded.root is None
    return finding.code, p.file, p.line, p.column, finding.message


def test_later_parents_win_and_own_keys_win_over_all(write: Write) -> None:
    write("a.yaml", "batch: {x: 1, y: 1, z: 1}\nonly_a: 1\n")
    write("b.yaml", "batch: {y: 2, z: 2}\n")
    write("c.yaml", "extends: [a.yaml, b.yaml]\nbatch: {z: 3}\n")
    assert data(load("c.yaml")) == {"batch": {"x": 1, "y": 2, "z": 3}, "only_a": 1}


def test_lists_and_scalars_are_replaced_as_a_whole(write: Write) -> None:
    write("a.yaml", "l: [1, 2]\nm: {x: 1}\ns: 1\n")
    write("b.yaml", "extends: a.yaml\nl: [3]\nm: 2\ns: {y: 1}\n")
    assert data(load("b.yaml")) == {"l": [3], "m": 2, "s": {"y": 1}}


def test_every_value_knows_the_file_that_set_it(write: Write) -> None:
    write("base/a.yaml", "g:\n  x: 1\n  y: 1\n")
    write("b.yaml", "extends: base/a.yaml\ng:\n  y: 2\n")
    values = flat(load("b.yaml")).values
    assert (values[("g", "x")].file, values[("g", "x")].line, values[("g", "x")].origin) == (
        "base/a.yaml",
        2,
        "extends",
    )
    assert (values[("g", "y")].file, values[("g", "y")].line, values[("g", "y")].origin) == ("b.yaml", 3, "")


def test_parents_are_found_beside_the_file_that_names_them(write: Write) -> None:
    write("deep/er/a.yaml", "x: 1\n")
    write("deep/b.yaml", "extends: er/a.yaml\n")
    write("c.yaml", "extends: deep/b.yaml\n")
    assert data(load("c.yaml")) == {"x": 1}


def test_a_shipped_preset_is_extended_by_name(write: Write) -> None:
    write("mine.yaml", "extends: temp_1p2\nbatch: {num_rollout: 5}\n")
    settings = data(load("mine.yaml"))
    assert settings["rollout"]["temperature"] == 1.2
    assert settings["batch"]["num_rollout"] == 5


def test_own_keys_win_over_the_files_profile_and_the_command_lines_profile_over_them(write: Write) -> None:
    write("p1.yaml", "x: profile1\ny: profile1\n")
    write("p2.yaml", "y: profile2\n")
    write("a.yaml", "profile: p1.yaml\nx: own\nz: own\n")
    assert data(load("a.yaml")) == {"x": "own", "y": "profile1", "z": "own"}
    assert data(load("a.yaml", profile="p2.yaml")) == {"x": "own", "y": "profile2", "z": "own"}


def test_a_childs_profile_replaces_its_parents(write: Write) -> None:
    write("p1.yaml", "a: 1\n")
    write("p2.yaml", "b: 2\n")
    write("parent.yaml", "profile: p1.yaml\n")
    write("child.yaml", "extends: parent.yaml\nprofile: p2.yaml\n")
    assert data(load("parent.yaml")) == {"a": 1}
    assert data(load("child.yaml")) == {"b": 2}
    assert load("child.yaml").choices == {"profile": "p2.yaml"}


def test_recipes_are_chosen_like_profiles_and_lie_below_them(write: Write) -> None:
    write("r.yaml", "x: recipe\ny: recipe\n")
    write("p.yaml", "y: profile\n")
    write("a.yaml", "profile: p.yaml\nrecipe: r.yaml\n")
    assert data(load("a.yaml")) == {"x": "recipe", "y": "profile"}
    assert data(load("a.yaml", recipe="r.yaml", profile="p.yaml")) == {"x": "recipe", "y": "profile"}


def test_set_chooses_a_profile_and_the_option_wins_over_it(write: Write) -> None:
    write("p1.yaml", "x: 1\n")
    write("p2.yaml", "x: 2\n")
    write("a.yaml", "y: 0\n")
    assert data(load("a.yaml", overrides=["profile=p1.yaml"]))["x"] == 1
    assert data(load("a.yaml", overrides=["profile=p1.yaml"], profile="p2.yaml"))["x"] == 2


def test_a_profile_marks_its_values(write: Write) -> None:
    write("a.yaml", "extends: on_policy\n")
    position = flat(load("a.yaml", profile="cpu")).values[("cluster", "device")]
    assert position.origin == "profile cpu"
    assert position.file.endswith("profiles/cpu.yaml")


def test_a_preset_is_named_after_its_file_and_not_after_its_parent(write: Write) -> None:
    write("my run (2).yaml", "extends: parent.yaml\n")
    write("parent.yaml", "name: parent\ndescription: of the parent\nx: 1\n")
    assert flat(load("my run (2).yaml")).data == {"x": 1, "name": "my_run_2"}
    assert flat(load("parent.yaml")).data["name"] == "parent"


def test_the_chain_holds_every_file_with_its_hash(write: Write) -> None:
    write("a.yaml", "x: 1\n")
    write("b.yaml", "extends: a.yaml\n")
    chain = load("b.yaml").chain
    assert [(file.path, file.origin) for file in chain] == [("b.yaml", ""), ("a.yaml", "extends")]
    assert chain[1].sha256 == "d09edadd173a8bbc233d47dcafc30cc876af2fb569812f2bbe0e92a1905bbce8"


def test_a_cycle_is_told_where_it_closes(write: Write) -> None:
    write("a.yaml", "extends: b.yaml\n")
    write("b.yaml", "x: 1\nextends: a.yaml\n")
    code, file, line, column, message = only(load("a.yaml"))
    assert (code, file, line, column) == ("P3O008", "b.yaml", 2, 10)
    assert "a.yaml -> b.yaml -> a.yaml" in message


def test_a_cycle_through_a_link_is_seen(write: Write, tmp_path: Path) -> None:
    write("a.yaml", "extends: b.yaml\n")
    os.symlink(tmp_path / "a.yaml", tmp_path / "b.yaml")
    assert only(load("a.yaml"))[0] == "P3O008"


def test_two_parents_may_share_a_grandparent(write: Write) -> None:
    write("g.yaml", "x: 1\n")
    write("a.yaml", "extends: g.yaml\na: 1\n")
    write("b.yaml", "extends: g.yaml\nb: 1\n")
    write("c.yaml", "extends: [a.yaml, b.yaml]\n")
    assert data(load("c.yaml")) == {"x": 1, "a": 1, "b": 1}


def test_a_tree_of_many_files_is_cut_off_quickly(write: Write) -> None:
    write("f0.yaml", "x: 1\n")
    for level in range(1, 12):
        write(f"f{level}.yaml", f"extends: [{', '.join([f'f{level - 1}.yaml'] * 10)}]\n")
    start = time.perf_counter()
    loaded = load("f11.yaml")
    assert time.perf_counter() - start < 1
    assert {finding.code for finding in loaded.findings} == {"P3O008"}
    assert len(loaded.chain) <= MAX_FILES


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("x: 1\nextends: nowhere.yaml\n", "P3O008", 2),
        ("extends: no_such_preset\n", "P3O008", 1),
        ("extends: ../../../etc/passwd\n", "P3O008", 1),
        ("extends: ''\n", "P3O007", 1),
        ('extends: "a\\0.yaml"\n', "P3O008", 1),
        ('profile: "a\\0"\n', "P3O008", 1),
        (f"extends: {'x' * 5000}.yaml\n", "P3O008", 1),
        ("extends: 3\n", "P3O007", 1),
        ("extends: [on_policy, 3]\n", "P3O007", 1),
        ("extends: {a: b}\n", "P3O007", 1),
        ("profile: no_such_profile\n", "P3O008", 1),
        ("profile: [cpu]\n", "P3O007", 1),
        ("profile: off\n", "P3O007", 1),
        ("recipe: no_such_recipe\n", "P3O008", 1),
    ],
)
def test_a_directive_that_leads_nowhere_is_one_finding(write: Write, text: str, code: str, line: int) -> None:
    write("a.yaml", text)
    found = only(load("a.yaml"))
    assert (found[0], found[1], found[2]) == (code, "a.yaml", line)


def test_a_broken_parent_is_reported_in_the_parent(write: Write) -> None:
    write("a.yaml", "x: [1\n")
    write("b.yaml", "extends: a.yaml\n")
    assert only(load("b.yaml"))[:2] == ("P3O002", "a.yaml")


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"", "P3O001", 1),
        (b"   \n\n", "P3O001", 1),
        (b"# nothing\n", "P3O001", 1),
        (b"- a\n", "P3O001", 1),
        (b"text\n", "P3O001", 1),
        (b"null\n", "P3O001", 1),
        (b"a: 1\nb: \xff\xfe\n", "P3O001", 2),
        ("a: 1\n".encode("utf-16"), "P3O001", 1),
        (b"\x7fELF\x02\x01\x01\x00", "P3O001", 1),
        (b"a: 1\nb: \x00\n", "P3O001", 2),
        (b"a: 1\n\nb: \x1b[31m\n", "P3O001", 3),
        (b"a: 1 # " + b"x" * 1_000_000, "P3O004", 1),
        (b"x" * 10_000_000, "P3O004", 1),
        (b"[" * 10_000_000, "P3O004", 1),
    ],
    ids=range(14),
)
def test_an_unusable_file_is_one_finding_in_under_a_second(write: Write, content: bytes, code: str, line: int) -> None:
    write("a.yaml", content)
    start = time.perf_counter()
    found = only(load("a.yaml"))
    assert time.perf_counter() - start < 1
    assert (found[0], found[1], found[2]) == (code, "a.yaml", line)


def test_a_byte_order_mark_is_no_fault(write: Write) -> None:
    write("a.yaml", b"\xef\xbb\xbfx: 1\n")
    assert data(load("a.yaml")) == {"x": 1}


def test_what_is_no_file_is_a_finding(write: Write, tmp_path: Path) -> None:
    (tmp_path / "d.yaml").mkdir()
    os.mkfifo(tmp_path / "f.yaml")
    assert only(load("d.yaml"))[4] == "the file cannot be read: it is a directory"
    assert only(load("f.yaml"))[4] == "the file cannot be read: it is not a regular file"
    assert only(load("absent.yaml"))[4] == "the file does not exist"
    assert only(load("/dev/zero"))[0] == "P3O001"
    assert only(load("bad\0name.yaml"))[0] == "P3O001"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_a_finding(write: Write) -> None:
    write("a.yaml", "x: 1\n").chmod(0)
    assert only(load("a.yaml"))[0] == "P3O001"


@pytest.mark.parametrize("override", ["", "a", "=1", " =1"])
def test_an_override_without_a_path_or_a_value_is_a_usage_error(write: Write, override: str) -> None:
    write("a.yaml", "x: 1\n")
    with pytest.raises(UsageError, match="path=value"):
        load("a.yaml", overrides=[override])


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("profile: [cpu]", "profile must be a name", "write cpu without the brackets"),
        ("profile: {a: b}", "profile must be a name", "write profile: NAME"),
        ("recipe: 4", "recipe must be a name", "quote a name that looks like a number"),
        ("partial: 3", "partial must be true or false", "write partial: true, or remove it"),
        ("partial:", "partial must be true or false", "write partial: true, or remove it"),
    ],
)
def test_a_directive_of_the_wrong_kind_says_what_to_write(line: str, message: str, hint: str) -> None:
    found = [item for item in load("a.yaml", text=f"extends: temp_1p2\n{line}\n").findings if item.code == "P3O007"]
    assert [(item.message, item.hint) for item in found] == [(message, hint)]


def test_a_missing_parent_with_a_shipped_name_is_named() -> None:
    (found,) = load("a.yaml", text="extends: ./on_policy.yaml\n").findings
    assert (found.code, found.hint) == ("P3O008", "the preset that ships with p3o-launch is named on_policy")

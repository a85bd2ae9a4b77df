"""Make the flag tables in ``p3o_launch/importers/data`` from a corpus of argparse facts.

``python scripts/flag_tables.py CORPUS``: CORPUS holds ``flags/{megatron,slime,relax}.json`` (one record per flag: flag,
dest, type, default, choices, action, nargs, alias_of, in_versions) and ``yaml/{verl,nemo_rl}/*.yaml``.
Kept per flag is what the importers read, one flag a line, so that a newer table shows as a readable difference.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

TARGET = Path(__file__).resolve().parent.parent / "p3o_launch" / "importers" / "data"
FRAMEWORKS = ("megatron", "slime", "relax")
KEPT = ("dest", "type", "default", "choices", "action", "nargs", "alias_of")
# verl: the groups whose values decide a fact; the rest of the generated file is about logging and profiling.
VERL = {
    "ppo_trainer": "verl__trainer__config___generated_ppo_trainer.yaml",
    "ppo_megatron_trainer": "verl__trainer__config___generated_ppo_megatron_trainer.yaml",
}
VERL_GROUPS = ("actor_rollout_ref", "algorithm", "critic", "data", "trainer")
VERL_DROPPED = ("profiler", "_target_", "trace", "prometheus", "agent", "multi_turn", "checkpoint_engine", "ref")


def flag_record(record: dict[str, Any]) -> dict[str, Any]:
    """One flag without the keys that say nothing."""
    kept = {key: record[key] for key in KEPT if record.get(key) is not None}
    if isinstance(kept.get("default"), dict) and "expr" in kept["default"]:
        del kept["default"]  # computed at run time
    if isinstance(kept.get("choices"), dict):
        del kept["choices"]
    if kept.get("action") == "argparse.BooleanOptionalAction":
        kept["action"] = "toggle"
    return kept


def flag_table(source: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Flag -> facts; where several versions differ, the later record wins and choices are the union."""
    table: dict[str, dict[str, Any]] = {}
    for record in source["flags"]:
        new, old = flag_record(record), table.get(record["flag"])
        if old and "choices" in old and "choices" in new:
            new["choices"] = list(dict.fromkeys(old["choices"] + new["choices"]))
        table[record["flag"]] = new
    return dict(sorted(table.items()))


def pruned(value: Any) -> Any:
    """A generated configuration without what no fact depends on."""
    if isinstance(value, dict):
        return {key: pruned(item) for key, item in value.items() if key not in VERL_DROPPED}
    return value


def yaml_keys(corpus: Path) -> dict[str, Any]:
    """framework -> the keys that its configurations have, as nested mappings; the keys of a list's items count too."""
    tables: dict[str, Any] = {}
    for framework in ("nemo_rl", "verl"):
        tree: dict[str, Any] = {}
        for file in sorted((corpus / "yaml" / framework).glob("*.yaml")):
            add_keys(tree, yaml.safe_load(file.read_text("utf-8")))
        tables[framework] = tree
    return tables


def add_keys(tree: dict[str, Any], value: Any) -> None:
    """Lay the keys of ``value`` over a tree of keys."""
    for item in value if isinstance(value, list) else [value]:
        for key, below in item.items() if isinstance(item, dict) else ():
            add_keys(tree.setdefault(str(key), {}), below)


def main(corpus: Path) -> None:
    """Write the tables."""
    for framework in FRAMEWORKS:
        source = json.loads((corpus / "flags" / f"{framework}.json").read_text("utf-8"))
        table = flag_table(source)
        meta = source["_meta"]
        head = {"repo": meta["repo"], "commit": meta["commit"]}
        head["prefixes"] = [item["prefix"] for item in meta.get("dynamic_prefixes", [])]
        lines = [f"  {json.dumps(flag)}: {json.dumps(record)}" for flag, record in table.items()]
        text = "{\n" + f'"meta": {json.dumps(head)},\n"flags": {{\n' + ",\n".join(lines) + "\n}}\n"
        json.loads(text)
        (TARGET / f"{framework}.json").write_text(text, "utf-8")
    defaults = {}
    for name, file in VERL.items():
        data = yaml.safe_load((corpus / "yaml" / "verl" / file).read_text("utf-8"))
        defaults[name] = pruned({group: data[group] for group in VERL_GROUPS})
    (TARGET / "verl_defaults.json").write_text(json.dumps(defaults, indent=1) + "\n", "utf-8")
    (TARGET / "yaml_keys.json").write_text(json.dumps(yaml_keys(corpus), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

#!/usr/bin/env python3
"""Writes NAME.reference.json beside each bundle of a folder: the prompt and greedy text that are stored for its checkpoint.

    references.py BUNDLES CHECKPOINTS

CHECKPOINTS is the folder with modelopt/ and gguf/; a bundle is named as pack.sh names it. Further texts of real models are in
prompts.json beside this program. Standard library only.
"""

import json
import struct
import sys
from pathlib import Path


def of_export(path):
    """`expected.safetensors` of an export."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])

    def values(name, code):
        begin, end = header[name]["data_offsets"]
        raw = data[8 + length + begin : 8 + length + end]
        return list(struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw))

    return {
        "prompt": values("input_ids", "q"),
        "greedy": values("greedy_ids", "q"),
        "margins": values("greedy_margin", "f"),
    }


def of_oracle(path):
    """An oracle of a GGUF file."""
    oracle = json.loads(path.read_text())
    reference = oracle["ref"]
    return {"prompt": oracle["prompt"], "greedy": reference["greedy"], "margins": reference["top1_top2_gap"]}


def main():
    bundles, checkpoints = map(Path, sys.argv[1:])
    found = {}
    for path in checkpoints.glob("modelopt/*/*/expected.safetensors"):
        found[f"{path.parent.parent.name}-{path.parent.name}"] = of_export(path)
    for path in checkpoints.glob("gguf/oracle/*.json"):
        found[f"tiny-{path.stem}"] = found[path.stem] = of_oracle(path)
    prompts = json.loads(Path(__file__).with_name("prompts.json").read_text())
    for name, stored in prompts["models"].items():
        found[name] = {"prompt": stored["texts"][0]["prompt"], "texts": stored["texts"]}
    for manifest in bundles.glob("*/manifest.json"):
        name = manifest.parent.name
        if name in found:
            (bundles / f"{name}.reference.json").write_text(json.dumps(found[name]))
        else:
            print(f"no stored text: {name}", file=sys.stderr)


main()

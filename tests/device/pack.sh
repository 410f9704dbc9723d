#!/usr/bin/env bash
# Packs the tests that need a GPU for a machine that has one and no cargo: executables, bundles of the small checkpoints, and a
# program that runs them. Needs nvcc (VT_NVCC).
#
#     tests/device/pack.sh OUT [CHECKPOINTS]
#     OUT/run.sh                                # there
#
# CHECKPOINTS defaults to ../shared/checkpoints.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:?usage: tests/device/pack.sh OUT [CHECKPOINTS]}
checkpoints=$(realpath "${2:-../shared/checkpoints}")
mkdir -p "$out/bundles"
out=$(realpath "$out")

cargo build --release -p vt-convert --bin vt-convert
convert=${CARGO_TARGET_DIR:-target}/release/vt-convert
for source in "$checkpoints"/modelopt/*/*/config.json "$checkpoints"/gguf/tiny/*.gguf; do
    source=${source%/config.json}
    name=$(basename "$(dirname "$source")")-$(basename "$source" .gguf)
    # Some of the checkpoints are of architectures that are not run, or are meant to be refused.
    "$convert" "$source" "$out/bundles/$name" --quiet 2>"$out/refused.log" || echo "not packed: $name: $(tail -1 "$out/refused.log")"
done
rm -f "$out/refused.log"

tests=(-p vt-kernels --test cuda_forward -p vt-run --test cuda_model)
cargo test --release --no-run "${tests[@]}" --message-format=json |
    python3 -c '
import json, shutil, sys
for line in sys.stdin:
    built = json.loads(line)
    if built.get("executable") and built["target"]["name"].startswith("cuda_"):
        shutil.copy(built["executable"], sys.argv[1] + "/" + built["target"]["name"])
' "$out"

cat >"$out/run.sh" <<'RUN'
#!/usr/bin/env bash
# Runs every test beside it on the first GPU.
cd "$(dirname "$0")"
export VT_TEST_CUDA=1 VT_TEST_BUNDLES=$PWD/bundles
status=0
for test in ./cuda_*; do
    "$test" --nocapture || status=1
done
exit $status
RUN
chmod +x "$out/run.sh"

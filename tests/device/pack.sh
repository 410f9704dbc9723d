#!/usr/bin/env bash
# Packs the tests that need a GPU for a machine that has one and no cargo: executables, bundles of the small checkpoints and of
# real models, and a program that runs them. Needs nvcc (VT_NVCC).
#
#     tests/device/pack.sh OUT [CHECKPOINTS] [GGUF...]
#     OUT/run.sh                                # there
#     OUT/run.sh --sanitize                     # small cases under compute-sanitizer
#
# CHECKPOINTS defaults to ../shared/checkpoints. Real models are SmolLM2-135M-Instruct (Q4_1) and Gemma 3 270M (Q4_K_M):
# where no GGUF is given, those in .build/model. VT_TEST_ONLY=NAME runs the bundles whose name contains it.
set -euo pipefail
out=$(realpath -m "${1:?usage: tests/device/pack.sh OUT [CHECKPOINTS] [GGUF...]}")
here=$(realpath "$(dirname "$0")/../..")
checkpoints=$(realpath "${2:-$here/../shared/checkpoints}")
real=()
for source in "${@:3}"; do real+=("$(realpath "$source")"); done
cd "$here"
mkdir -p "$out/bundles"

cargo build --release -p vt-convert --bin vt-convert
convert=${CARGO_TARGET_DIR:-target}/release/vt-convert
for source in "$checkpoints"/modelopt/*/*/config.json "$checkpoints"/gguf/tiny/*.gguf; do
    source=${source%/config.json}
    name=$(basename "$(dirname "$source")")-$(basename "$source" .gguf)
    # A part of a checkpoint.
    [ "$name" != smollm2-nvfp4 ] || continue
    # Some of the checkpoints are of architectures that are not run, or are meant to be refused.
    "$convert" "$source" "$out/bundles/$name" --quiet 2>"$out/refused.log" || echo "not packed: $name: $(tail -1 "$out/refused.log")"
done
rm -f "$out/refused.log"
# Experts with more than a matrix each, or stored in different ways.
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
python3 fixtures/make_experts.py "$made"
for source in "$made"/*; do
    name=$(basename "$source" .gguf)
    case $name in *-plain) continue ;; esac
    "$convert" "$source" "$out/bundles/$name" --quiet
done

if [ ${#real[@]} = 0 ]; then
    for model in SmolLM2-135M-Instruct.Q4_1 gemma-3-270m-q4_k_m; do
        if [ -f ".build/model/$model.gguf" ]; then
            real+=(".build/model/$model.gguf")
        else
            echo "SKIPPED: .build/model/$model.gguf does not exist: the tests run without it" >&2
        fi
    done
fi
for source in "${real[@]}"; do
    name=$(basename "$source" .gguf)
    # As its stored text is named.
    [ "$name" != SmolLM2-135M-Instruct.Q4_1 ] || name=smollm2-135m-Q4_1
    "$convert" "$source" "$out/bundles/$name" --quiet
done
python3 tests/device/references.py "$out/bundles" "$checkpoints"

tests=(-p vt-kernels -p vt-run)
for test in cuda_gemm cuda_gemm_many_rows cuda_forward cuda_attention cuda_moe cuda_sampling cuda_model; do tests+=(--test $test); done
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
# Runs every test beside it on the first GPU. With --sanitize: small cases of the kernels' tests under each of
# compute-sanitizer's tools, and a small model under memcheck.
cd "$(dirname "$0")"
export VT_TEST_CUDA=1 VT_TEST_BUNDLES=$PWD/bundles
status=0
if [ "${1:-}" != --sanitize ]; then
    for test in ./cuda_*; do
        "$test" --nocapture || status=1
    done
    exit $status
fi
export VT_TEST_SMALL=1 VT_TEST_ONLY=${VT_TEST_ONLY:-qwen3_moe-nvfp4}
# One test of a program under a tool.
check() {
    log=$(basename "$2").$3.$1.log
    timeout "${VT_TEST_LIMIT:-120}" compute-sanitizer --tool "$1" --report-api-errors no --error-exitcode 9 "$2" --exact "$3" >"$log" 2>&1
    ended=$?
    echo "$1 $2 $3: exit $ended; $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -1)"
    return $ended
}
# A test asks for an error of the API on purpose. A model sees how much memory is free, so that nothing may run beside it; the
# other tools would take minutes over it, and the other tests launch its kernels.
check memcheck ./cuda_model logits_are_the_cpus || status=1
running=()
for tool in racecheck memcheck initcheck synccheck; do
    for test in ./cuda_*; do
        [ "$test" != ./cuda_model ] || continue
        for name in $("$test" --list | sed -n 's/: test$//p'); do
            if [ ${#running[@]} -ge "${VT_TEST_JOBS:-12}" ]; then
                wait "${running[0]}" || status=1
                running=("${running[@]:1}")
            fi
            check $tool "$test" "$name" &
            running+=($!)
        done
    done
done
for one in "${running[@]}"; do wait "$one" || status=1; done
exit $status
RUN
chmod +x "$out/run.sh"

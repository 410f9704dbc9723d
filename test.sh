#!/usr/bin/env bash
# Everything that must hold, with warnings as errors. Python packages are installed below .build/; cargo-nextest and
# cargo-deny are used where they are installed. Options:
#   --no-python   leave out the official OpenAI client, transformers, the S3 server and model_signing (need PyPI)
#   --no-model    leave out what needs the 98 MB model (needs PyPI)
set -euo pipefail
cd "$(dirname "$0")"

python=yes
real_model=yes
for option in "$@"; do
    case $option in
    --no-python) python=no ;;
    --no-model) real_model=no ;;
    *)
        echo "usage: $0 [--no-python] [--no-model]" >&2
        exit 2
        ;;
    esac
done

say() { printf '\n== %s (%ss)\n' "$*" "$SECONDS" >&2; }
skip() { printf 'SKIPPED: %s\n' "$*" >&2; }

target=${CARGO_TARGET_DIR:-target}
case $target in
/*) ;;
*) target=$PWD/$target ;;
esac
bin=$target/release

say "Formatting"
cargo fmt --all --check

say "Source is ASCII"
if LC_ALL=C git grep -nP '[^\x00-\x7F]' -- '*.rs' '*.toml' '*.sh' '*.py' '*.cu' '*.cuh'; then
    echo "non-ASCII characters in source files" >&2
    exit 1
fi

say "Release build of the binaries"
cargo build --release --locked --bins

say "Lints"
cargo clippy --workspace --all-targets --locked -- -D warnings

say "What links what"
# No output of `cargo tree` but a match is a fault.
linked() { cargo tree --locked --edges normal --prefix none "${@:2}" | grep -E "^($1) " >&2; }
if linked "tokio|vt-store" -p vt-convert || linked "vt-store|object_store|reqwest" -p vt-run --no-default-features; then
    echo "must not be linked there" >&2
    exit 1
fi

say "Documentation"
RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet

if command -v cargo-deny >/dev/null 2>&1; then
    say "Licences and advisories"
    cargo deny check licenses bans sources
else
    skip "cargo-deny is not installed: licences are not checked"
fi

if [ $real_model = yes ]; then
    say "Quickstart, twice: the same answers"
    ./quickstart.sh
    first=$(./quickstart.sh)
    second=$(./quickstart.sh)
    diff <(echo "$first") <(echo "$second")
    grep -q "Paris" <<<"$first"
fi

venv=$PWD/.build/venv
if [ $python = yes ]; then
    say "Python packages"
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --requirement tests/openai/requirements.txt --requirement tests/store/requirements.txt
    export VT_TEST_PYTHON=$venv/bin/python
fi
for program in docker-registry skopeo openssl; do
    command -v $program >/dev/null 2>&1 || skip "$program is not installed: tests of stores are incomplete"
done

[ "${VT_TEST_CUDA:-}" = 1 ] || skip "VT_TEST_CUDA is not 1: tests that need a GPU are left out; see tests/device/pack.sh"

say "Tests"
export VT_TEST_BIN_DIR=$bin
if cargo nextest --version >/dev/null 2>&1; then
    cargo nextest run --workspace --locked --no-fail-fast
    cargo test --workspace --locked --doc --quiet
else
    cargo test --workspace --locked --no-fail-fast --quiet
fi

say "Mutated input for every parser, 30 s each"
mkdir -p .build
(cd .build && "$bin/vt-fuzz" all --seconds 30 2>fuzz.log) || {
    cat .build/fuzz.log >&2
    exit 1
}

if [ $python = yes ]; then
    say "The official OpenAI client"
    if [ $real_model = yes ]; then
        served=.build/smollm2
    else
        python3 fixtures/make_tiny.py .build/tiny nvfp4
        rm -rf .build/tiny/bundle
        "$bin/vt-convert" .build/tiny/nvfp4 .build/tiny/bundle --quiet
        served=.build/tiny/bundle
    fi
    export VT_RUN=$bin/vt-run VT_BUNDLE=$served
    "$venv/bin/python" -m pytest --quiet tests/openai

    say "Chat templates beside transformers"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --requirement fixtures/chat_templates.requirements.txt
    # A training framework that carries the published templates of many models.
    "$venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --dest .build/templates axolotl==0.19.0
    sources=(.build/templates/*.whl)
    [ $real_model = no ] || sources+=(.build/model/*.gguf)
    [ ! -d ../shared/checkpoints ] || sources+=(../shared/checkpoints)
    "$venv/bin/python" fixtures/chat_templates.py .build/templates.json "${sources[@]}" 2>/dev/null
    VT_TEST_TEMPLATES=$PWD/.build/templates.json cargo test --quiet --locked -p vt-run --test chat_templates
fi

say "All of it holds"

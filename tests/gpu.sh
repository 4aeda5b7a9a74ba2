#!/usr/bin/env bash
# Everything on a GPU: the tests of devices, the bench of devices (the table of layers and whole models), and the memory of a
# training. Writes Markdown and JSON with the name of the card to a folder.
#
#   tests/gpu.sh all wgpu results            builds and runs
#   tests/gpu.sh build wgpu,cuda prebuilt    builds only, with fusion and without, for one or both; the folder can travel
#   tests/gpu.sh run cuda results prebuilt   runs what was built, on a machine without Rust
#
# For CUDA, CubeCL's build downloads LLVM from GitHub, and its kernels are compiled where they run with the help of a CUDA toolkit
# (`CUDA_PATH`, or /usr/local/cuda). On a machine without a GPU, in software and small:
#   GPU_SH_SMALL=1 tests/gpu.sh all wgpu results
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
    sed -n '5,11p' "$0" | cut -c3- >&2
    exit 2
}
[ $# -ge 3 ] || usage
command=$1 runtime=$2 folder=$3
case $command,$runtime in *,wgpu | *,cuda | build,wgpu,cuda) ;; *) usage ;; esac
# Of the compiled backends, the one that the benches take.
export BURN_DEVICE=$runtime

# Prints the executable that cargo made of a target.
built() {
    cargo "$@" --message-format=json | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1
}

build() {
    mkdir -p "$1"
    for variant in "" ",fusion"; do
        local features="flex,rayon,simd,$runtime$variant" suffix="${variant/,/-}"
        cp "$(built test --no-run --release --no-default-features --features "$features" --test wgpu)" "$1/tests$suffix"
        cp "$(built bench --no-run --no-default-features --features "$features" --bench devices)" "$1/devices$suffix"
        [ -n "$variant" ] ||
            cp "$(built build --release --no-default-features --features "$features" --example growth)" "$1/growth"
    done
}

card() {
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1 ||
        vulkaninfo --summary 2>/dev/null | sed -n 's/.*deviceName *= *//p' | head -n 1 || true
}

run() {
    local results=$1 prebuilt=$2 card
    card=$(card)
    card=${card:-a device in software}
    mkdir -p "$results"
    local large=() growth=(--size 50m --steps 300)
    if [ -n "${GPU_SH_SMALL:-}" ]; then
        large=(--batch 1 --image 32 --classes 500 --tokens 256 --width 64 --turns 1)
        growth=(--steps 20 --length 32)
    fi
    {
        printf '# %s, %s\n' "$card" "$runtime"
        for variant in "" "-fusion"; do
            printf '\n## With%s fusion\n' "$([ -n "$variant" ] || echo out)"
            printf '\nTests of devices: '
            "$prebuilt/tests$variant" >"$results/tests$variant.log" 2>&1 || true
            sed -n 's/^test result: //p' "$results/tests$variant.log" | grep . || echo "did not end, see tests$variant.log"
            for models in layers planes large; do
                printf '\n'
                "$prebuilt/devices$variant" $([ "$models" = layers ] && [ -n "${GPU_SH_SMALL:-}" ] && echo relu) \
                    $([ "$models" = planes ] && echo --planes ${GPU_SH_SMALL:+--turns 1}) \
                    $([ "$models" = large ] && echo --large "${large[@]}") \
                    --card "$card" --json "$results/$models$variant.json" 2>"$results/$models$variant.log" ||
                    echo "$models: did not end, see $models$variant.log"
            done
        done
        printf '\n## Memory while a language model is trained\n\n'
        "$prebuilt/growth" "${growth[@]}" --csv "$results/growth.csv" --plot "$results/growth.svg" 2>"$results/growth.log" ||
            echo "did not end, see growth.log"
    } | tee "$results/results.md"
}

case $command in
build) build "$folder" ;;
run)
    [ $# -ge 4 ] || usage
    run "$folder" "$4"
    ;;
all)
    build "$folder/prebuilt"
    run "$folder" "$folder/prebuilt"
    ;;
*) usage ;;
esac

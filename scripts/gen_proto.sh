#!/usr/bin/env bash
# Regenerates client/octavo/v1 from protos/. The generator is pinned to the oldest runtime that the
# extras allow (vLLM accepts protobuf 5.29.6), and lives in an environment of its own because it
# needs an older protobuf than the services run on.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/proto-venv
if [ ! -x $venv/bin/protoc-gen-mypy ]; then
  ${PYTHON:-python3} -m venv $venv
  $venv/bin/pip install -q 'grpcio-tools==1.71.2' 'protobuf==5.29.6' 'mypy-protobuf==3.6.0' 'setuptools<81'
fi
out=${1:-client}
mkdir -p "$out"
PATH="$PWD/$venv/bin:$PATH" $venv/bin/python -m grpc_tools.protoc -I protos \
  --python_out="$out" --grpc_python_out="$out" --mypy_out="$out" --mypy_grpc_out="$out" \
  protos/octavo/v1/*.proto
touch "$out/octavo/v1/__init__.py"

#!/usr/bin/env bash
# Fails when client/octavo/v1 is not what protos/ generates.
set -euo pipefail
cd "$(dirname "$0")/.."
fresh=build/proto-check
rm -rf "$fresh"
scripts/gen_proto.sh "$fresh"
if ! diff -r -x __pycache__ "$fresh/octavo/v1" client/octavo/v1; then
  echo 'client/octavo/v1 is stale: run make proto' >&2
  exit 1
fi
echo 'generated code is up to date'

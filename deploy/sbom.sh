#!/bin/sh
# Print what an image of ours holds, as CycloneDX (JSON).
#
#   deploy/sbom.sh octavo/scheduler > scheduler.cdx.json
#
# The tool that looks is mounted and stays out of the image. Its Python must be the image's: PYTHON (3.11).
set -eu

image=$1
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT INT TERM
chmod 755 "$tools"
"${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --target "$tools" 'cyclonedx-bom>=7,<8'
docker run --rm --volume "$tools:/tools:ro" --network none --entrypoint python "$image" -c '
import runpy
import sys

sys.path.insert(0, "/tools")
sys.argv = ["cyclonedx-py", "environment", "--output-format", "JSON", "/opt/octavo/bin/python"]
runpy.run_module("cyclonedx_py", run_name="__main__")'

"""Octavo's laboratory: benchmarks, experiments, the simulator, the tuner, the scorecard."""

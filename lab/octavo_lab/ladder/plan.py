"""How the time of a ladder is spent, decided before the first cell: docs/ladder.md, "What a budget does".

Nothing is ever made up for: a percentile that wants more requests than came is printed as missing.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from scipy.optimize import brentq

from octavo_lab.ladder.config import (
    ARMS,
    BASELINE,
    BEST,
    BEST_STATIC,
    CONTROL,
    MIDDLE,
    OVERLOAD,
    LadderConfig,
)
from octavo_lab.load.statistics import needed

MIN_WINDOW_S: Final = 5.0
SATURATED_BATCHES: Final = 3
MIN_REPEATS: Final = 2
COMPARED_SHARE: Final = 0.7
"""Share of the time that goes, at most, into the windows of the comparison."""
SPARE: Final = 1.08
"""Requests that are offered where a P99 is wanted, as a multiple of those that it needs."""
DRAIN_S: Final = 4.0
"""Expected time from the end of a window until all is answered, and the next cell has begun."""
LONGEST_DRAIN_S: Final = 45.0
"""Wait for what is under way where an arm keeps up with the load."""
CUT_DRAIN_S: Final = 1.0
"""The same where it cannot: what is not answered counts as slower than all that is."""
_Key = tuple[str, str]
"""Arm and rung."""


@dataclass(frozen=True, slots=True)
class LadderCell:
    """One run of one arm at one rate."""

    arm: str
    rung: str
    repeat: int
    rate_per_s: float
    warm_up_s: float
    window_s: float
    drain_s: float
    """Wait for the last answers, at most."""
    seed: int
    """Of arrivals and requests: the same for all arms."""

    @property
    def name(self) -> str:
        """Names it in files."""
        return f"{self.rung}.{self.repeat}.{self.arm}"

    @property
    def expected_s(self) -> float:
        """How long it takes, about."""
        return self.warm_up_s + self.window_s + DRAIN_S


@dataclass(frozen=True, slots=True)
class CellPlan:
    """All cells, in the order in which they run."""

    cells: tuple[LadderCell, ...]
    repeats: int
    expected_s: float
    notes: tuple[str, ...]
    """Where the budget made the experiment smaller than asked, in words."""


@dataclass(frozen=True, slots=True)
class Loads:
    """What the search has found, in requests per second."""

    capacities: Mapping[str, float]
    """By arm."""
    rungs: Mapping[str, float]
    control_rung: str
    """The rung at which the control is at its capacity."""
    longest_batch_s: float = 0.0
    """Of the static arms, in the batch size that each is tuned to."""

    @property
    def top(self) -> str:
        """The heaviest rung."""
        return max(self.rungs, key=self.rungs.__getitem__)

    @property
    def saturated_s(self) -> float:
        """Least window at the top that tells a rate of a static arm."""
        return SATURATED_BATCHES * self.longest_batch_s


def loads_of(config: LadderConfig, capacities: Mapping[str, float], longest_batch_s: float = 0.0) -> Loads:
    """Return the rungs that follow from the arms' capacities."""
    best = max(capacities.values())
    best_static = max((rate for arm, rate in capacities.items() if ARMS[arm].static), default=best)
    own = capacities.get(CONTROL, best_static)
    middle, control_rung = own, MIDDLE
    # Where the control is itself (nearly) the best static arm, the middle lies between the baseline and that.
    if own > 0.95 * best_static and BEST_STATIC in config.rungs:
        middle, control_rung = (own / 2 + best_static) / 2, BEST_STATIC
    rates = {BASELINE: own / 2, MIDDLE: middle, BEST_STATIC: best_static, BEST: best, OVERLOAD: 1.5 * best}
    rungs = {name: rates[name] for name in config.rungs}
    return Loads(dict(capacities), rungs, control_rung, longest_batch_s)


def plan_cells(config: LadderConfig, loads: Loads, available_s: float) -> CellPlan:
    """Return the cells that fit into the time, and what they had to give up for it."""
    for repeats in range(max(1, config.repeats), 0, -1):
        windows, scarce = _windows(config, loads, available_s, repeats)
        if not scarce or repeats <= MIN_REPEATS:
            break
    cells = _in_order(config, loads, windows, repeats)
    expected_s = sum(cell.expected_s for cell in cells)
    notes = [*_given_up(config, loads, windows, repeats)]
    if expected_s > available_s + 1:
        late_s = expected_s - available_s
        notes.append(f"about {late_s:.0f} s longer than the budget: windows have a least length")
    return CellPlan(tuple(cells), repeats, expected_s, tuple(notes))


def _given_up(
    config: LadderConfig, loads: Loads, windows: Mapping[_Key, float], repeats: int
) -> Iterator[str]:
    if repeats < config.repeats:
        yield f"{repeats} repeats instead of {config.repeats}, so that windows are not too short"
    rung, wanted = loads.control_rung, needed(0.99)
    for arm in config.full_arms if rung in config.rungs else ():
        offered = repeats * windows[arm, rung] * loads.rungs[rung]
        if offered < wanted:
            told = f"about {offered:.0f} requests for {arm} at the control's capacity"
            yield f"{told}: no P99, which wants {wanted}"
    short = [arm for arm in config.arms if windows[arm, loads.top] < loads.saturated_s]
    if short:
        yield (
            f"windows at the highest rung are shorter than {SATURATED_BATCHES} of the longest batches "
            f"({loads.saturated_s:.0f} s): {', '.join(short)}"
        )


def _windows(
    config: LadderConfig, loads: Loads, available_s: float, repeats: int
) -> tuple[dict[_Key, float], bool]:
    """Return the window of each arm at each rung, and whether the others' are shorter than they should be."""
    keys = [(arm, rung) for rung in config.rungs for arm in config.arms]
    compared = [key for key in keys if key[0] in config.full_arms and key[1] == loads.control_rung]
    others = [key for key in keys if key not in compared]
    # So many requests of a rung want so much time in each repeat.
    wanted_s = {rung: SPARE * needed(0.99) / (repeats * rate) for rung, rate in loads.rungs.items()}
    time_s = available_s / repeats - sum(config.warm_up_of(rung) + DRAIN_S for _, rung in keys)
    windows: dict[_Key, float] = {}
    if compared:
        most = COMPARED_SHARE * time_s / len(compared)
        windows = dict.fromkeys(compared, max(MIN_WINDOW_S, min(wanted_s[loads.control_rung], most)))
    left_s = time_s - sum(windows.values())
    weights = {key: (1 + (key[0] in config.full_arms)) / loads.rungs[key[1]] ** 0.5 for key in others}
    scarce = any(left_s * weight < MIN_WINDOW_S * sum(weights.values()) for weight in weights.values())
    least_s = dict.fromkeys(config.rungs, MIN_WINDOW_S)
    least_s[loads.top] = max(MIN_WINDOW_S, loads.saturated_s)
    windows |= _shared(left_s, weights, {key: least_s[key[1]] for key in others})
    # Beyond what a P99 wants, longer windows add little.
    most_s = {rung: max(least, 2 * wanted_s[rung]) for rung, least in least_s.items()}
    return {key: min(value, most_s[key[1]]) for key, value in windows.items()}, scarce


def _shared(time_s: float, weights: Mapping[_Key, float], least_s: Mapping[_Key, float]) -> dict[_Key, float]:
    """Share time out, by weight, so that nobody gets less than its least while others have more.

    What all of them want at least may be more than there is: then each gets `MIN_WINDOW_S` and its part, by
    what it wants beyond that, of the rest.
    """
    wanted_s = sum(least_s.values()) - MIN_WINDOW_S * len(least_s)
    spare_s = max(0.0, time_s - MIN_WINDOW_S * len(least_s))
    if wanted_s >= spare_s:
        part = spare_s / wanted_s if wanted_s > 0 else 0.0
        return {key: MIN_WINDOW_S + part * (least - MIN_WINDOW_S) for key, least in least_s.items()}
    # Nobody is below its least at the rate per weight at which all that is given out is what there is.
    per_weight = brentq(
        lambda rate: sum(max(least, rate * weights[key]) for key, least in least_s.items()) - time_s,
        *(0.0, time_s / min(weights.values())),
    )
    return {key: max(least, per_weight * weights[key]) for key, least in least_s.items()}


def _in_order(
    config: LadderConfig, loads: Loads, windows: Mapping[_Key, float], repeats: int
) -> list[LadderCell]:
    """Interleave the arms: at each rung of each repeat, every arm once, in an order drawn anew."""
    cells = []
    for repeat, (number, rung) in itertools.product(range(repeats), enumerate(config.rungs)):
        seed = config.seed * 10_000 + number * 100 + repeat
        rate, warm_up_s = loads.rungs[rung], config.warm_up_of(rung)
        for arm in random.Random(seed).sample(config.arms, len(config.arms)):
            keeps_up = rate <= 1.01 * loads.capacities[arm]
            drain_s = LONGEST_DRAIN_S if keeps_up else CUT_DRAIN_S
            window_s = windows[arm, rung]
            cells.append(LadderCell(arm, rung, repeat, rate, warm_up_s, window_s, drain_s, seed))
    return cells

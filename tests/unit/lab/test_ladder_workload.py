"""What the ladder asks."""

from __future__ import annotations

import asyncio
import itertools
import re
from dataclasses import replace

from octavo_lab.ladder.config import FULL, LadderConfig
from octavo_lab.ladder.workload import Workload

CONFIG = replace(FULL, dataset="lognormal", prompt_tokens=60.0, output_tokens=20.0, length_cv=0.5)


class Words:
    """A token is a word with the blank before it."""

    async def pieces(self, text: str) -> list[str]:
        return re.findall(r"\s*\S+", text)


def workload(config: LadderConfig = CONFIG) -> Workload:
    made = Workload(config)
    asyncio.run(made.split_with(Words()))
    return made


def test_workload_is_determined_by_the_seed() -> None:
    one, other = workload(), workload()
    assert list(one.requests(3, 40)) == list(other.requests(3, 40))
    assert list(one.requests(3, 40)) != list(one.requests(4, 40))


def test_workload_of_more_requests_begins_with_that_of_fewer() -> None:
    few = list(workload().requests(3, 10))
    assert list(workload().requests(3, 200))[:10] == few


def test_prompts_have_the_tokens_that_they_are_said_to_have() -> None:
    for one in workload().requests(3, 100):
        assert isinstance(one.prompt, str)
        assert len(one.prompt.split()) == one.prompt_tokens


def test_half_of_the_prompts_share_one_of_four_beginnings() -> None:
    requests = workload().requests(3, 400)
    heads: dict[str, int] = {}
    for one in requests:
        head = " ".join(str(one.prompt).split()[: CONFIG.shared_prefix_tokens])
        heads[head] = heads.get(head, 0) + 1
    shared = [count for count in heads.values() if count > 10]
    assert len(shared) == CONFIG.num_shared_prefixes
    assert 0.3 < sum(shared) / len(requests) < 0.6


def test_workload_without_sharing_has_prompts_that_differ_from_the_start() -> None:
    requests = workload(replace(CONFIG, shared_prefix_share=0.0)).requests(3, 200)
    assert len({" ".join(str(one.prompt).split()[:8]) for one in requests}) == len(requests)


def test_record_tells_what_was_asked() -> None:
    told = workload().record
    assert "lognormal" in told["description"]
    assert "50% of the prompts" in told["description"]
    assert 40 < told["sample"]["prompt_tokens"] < 80


def test_highest_rung_begins_with_a_backlog_and_others_do_not() -> None:
    at_once = FULL.process(5.0, FULL.backlog_of("overload"))
    times = list(itertools.islice(at_once.times(3), 70))
    assert times[: FULL.backlog] == [0.0] * FULL.backlog
    assert times[FULL.backlog :] == list(itertools.islice(FULL.process(5.0).times(3), 6))
    assert FULL.backlog_of("middle") == 0
    assert "64 at once" in str(at_once)

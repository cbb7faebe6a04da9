from __future__ import annotations

from typing import Any

import pytest
from octavo.sampling import SamplingParams

from worker_svc.runner.base import SequenceData
from worker_svc.runner.restrictions import Restrictions

EOS = 2


def banned(output: list[int], **sampling: Any) -> set[int]:
    params = SamplingParams(**sampling)
    sequence = SequenceData(1, [5, 6, 7, *output], 3, params)
    return set(Restrictions(sequence, (EOS,), 100).bans(sequence))


@pytest.mark.parametrize(
    ("output", "expected"),
    [([], {9}), ([6], {9}), ([5, 6], {9, 8}), ([4, 6], {9}), ([5, 6, 8], {9}), ([6, 6], {9})],
)
def test_last_token_of_a_bad_sequence_is_banned_after_the_others_in_the_output_only(
    output: list[int], expected: set[int]
) -> None:
    # The prompt ends with 6, 7: what is in it does not count.
    assert banned(output, bad_words_token_ids=((9,), (5, 6, 8), (6, 7, 1))) == expected


def test_tokens_that_end_are_banned_before_min_tokens() -> None:
    given = {"min_tokens": 2, "stop_token_ids": (4, 10**6)}
    assert banned([1], **given) == {EOS, 4}
    assert banned([1, 1], **given) == set()
    assert banned([1], **given, ignore_eos=True) == {4}


def test_permits_is_what_is_allowed_and_not_banned() -> None:
    params = SamplingParams(allowed_token_ids=(3, 4, 10**6), bad_words_token_ids=((4,),))
    sequence = SequenceData(1, [5], 1, params)
    restrictions = Restrictions(sequence, (EOS,), 100)
    assert restrictions.allowed == (3, 4)
    assert [token for token in range(100) if restrictions.permits(sequence, token)] == [3]


def test_nothing_is_restricted_that_was_not_asked_for() -> None:
    sequence = SequenceData(1, [5], 1, SamplingParams(stop_token_ids=(4,)))
    assert not Restrictions(sequence, (EOS,), 100).any

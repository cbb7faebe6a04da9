"""Whose key is good is asked once in a while, and the last answer holds while nobody can be asked."""

from __future__ import annotations

import asyncio
from typing import cast

from octavo import AsyncClient
from octavo.errors import AccessDeniedError, ErrorInfo, UnavailableError
from octavo.gateway.key_check import KeyCheck
from octavo.keys import new_key

GOOD, BAD = new_key(), new_key()


class Scheduler:
    """Knows one key, or needs none."""

    def __init__(self, *, open_to_all: bool = False) -> None:
        self.good = {GOOD}
        self.open_to_all = open_to_all
        self.reachable = True
        self.asked: list[str] = []
        self.now = 0.0
        self.free = asyncio.Event()
        self.free.set()

    async def models(self, *, api_key: str) -> list[object]:
        self.asked.append(api_key)
        await self.free.wait()
        if not self.reachable:
            raise UnavailableError("no answer", ErrorInfo("UNREACHABLE", "", 14))
        if not self.open_to_all and api_key not in self.good:
            reason = "BAD_API_KEY" if api_key else "NO_API_KEY"
            raise AccessDeniedError("refused", ErrorInfo(reason, "", 16))
        return []

    def check(self) -> KeyCheck:
        return KeyCheck(cast("AsyncClient", self), lambda: self.now)


async def status(check: KeyCheck, key: str) -> int:
    refusal = await check.refusal(key)
    return 200 if refusal is None else refusal.status


async def test_without_keys_at_the_scheduler_any_key_will_do_and_one_question_serves_all() -> None:
    scheduler = Scheduler(open_to_all=True)
    check = scheduler.check()

    assert await asyncio.gather(*(status(check, key) for key in ("", "any", GOOD) * 9)) == [200] * 27
    assert scheduler.asked == [""]


async def test_keys_are_told_apart_and_what_cannot_be_one_is_not_asked_about() -> None:
    scheduler = Scheduler()
    check = scheduler.check()

    for _ in range(3):
        assert [await status(check, key) for key in (GOOD, BAD, "", "sk-any")] == [200, 401, 401, 401]
    assert scheduler.asked == ["", GOOD, BAD]


async def test_new_key_is_good_in_two_seconds_and_revoked_one_bad_in_ten() -> None:
    scheduler = Scheduler()
    check = scheduler.check()
    assert [await status(check, key) for key in (GOOD, BAD)] == [200, 401]
    scheduler.good = {BAD}

    scheduler.now = 2.0
    assert [await status(check, key) for key in (GOOD, BAD)] == [200, 200]
    scheduler.now = 10.0
    assert [await status(check, key) for key in (GOOD, BAD)] == [401, 200]


async def test_last_answer_holds_while_the_scheduler_is_away_and_strangers_wait_for_it() -> None:
    scheduler = Scheduler()
    check = scheduler.check()
    assert [await status(check, key) for key in (GOOD, "")] == [200, 401]
    scheduler.reachable, scheduler.now = False, 100.0

    assert [await status(check, key) for key in (GOOD, "", BAD)] == [200, 401, 503]
    assert await status(Scheduler.check(scheduler), GOOD) == 503


async def test_scheduler_that_takes_long_holds_up_no_key_that_was_good() -> None:
    scheduler = Scheduler()
    check = scheduler.check()
    assert [await status(check, key) for key in (GOOD, BAD)] == [200, 401]
    scheduler.now = 11.0
    scheduler.good = {BAD}
    scheduler.free.clear()

    assert await status(check, GOOD) == 200, "as it was, before the scheduler has answered"
    new = asyncio.ensure_future(status(check, BAD))
    await asyncio.sleep(0)
    scheduler.free.set()
    assert await new == 200, "a key that was bad waits for the answer"
    assert await status(check, GOOD) == 401


async def test_answers_that_are_remembered_are_bounded() -> None:
    scheduler = Scheduler()
    check = scheduler.check()
    keys = [new_key() for _ in range(5000)]
    await asyncio.gather(*(status(check, key) for key in keys))

    assert await status(check, keys[-1]) == await status(check, keys[0]) == 401
    assert [scheduler.asked.count(key) for key in (keys[-1], keys[0])] == [1, 2]

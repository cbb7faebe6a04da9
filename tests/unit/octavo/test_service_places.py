"""Places that nobody can take away from everybody else, and turns."""

from __future__ import annotations

import asyncio

from octavo.service.places import Places, Turns


def taken_by(places: Places, who: str) -> int:
    count = 0
    while places.take(who):
        count += 1
    return count


def test_one_alone_gets_its_share_and_leaves_room_for_others() -> None:
    places = Places(8192, share=3)
    assert taken_by(places, "greedy") == 6144
    for other in range(100):
        assert places.take(f"tenant {other}")


def test_many_who_want_all_keep_nobody_out_until_each_place_is_taken() -> None:
    places = Places(64, share=1 / 3)
    held = [taken_by(places, f"greedy {n}") for n in range(10)]
    assert held[0] == 16
    assert all(held)
    assert sum(held) < 64


def test_place_given_back_is_there_again() -> None:
    places = Places(4, share=3)
    assert taken_by(places, "a") == 3
    places.leave("a")
    assert places.take("a")
    assert places.take("b")
    assert not places.take("c")
    for who in "aaab":
        places.leave(who)
    assert taken_by(places, "c") == 3


async def test_turns_of_one_do_not_wait_for_those_of_another() -> None:
    turns = Turns(2)
    running: list[str] = []
    go = asyncio.Event()

    async def take(who: str) -> None:
        await turns.take(who)
        running.append(who)
        await go.wait()
        turns.leave(who)

    tasks = [asyncio.create_task(take(who)) for who in ("a", "a", "a", "a", "b")]
    for _ in range(5):
        await asyncio.sleep(0)
    assert running == ["a", "a", "b"]
    assert tasks.pop(3).cancel()
    go.set()
    await asyncio.gather(*tasks)
    assert running == ["a", "a", "b", "a"]
    await asyncio.gather(turns.take("a"), turns.take("a"))

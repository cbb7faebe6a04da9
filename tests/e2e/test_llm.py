"""`octavo.LLM` as a script uses it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from octavo import LLM, InvalidRequestError, SamplingParams
from octavo.cli.demo import ANSWER
from octavo.stack import StackError

SIM = {"runner": "sim", "sim_speed": 8}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("sim", progress=False, scheduler={"policy": "fcfs"}, **SIM) as llm:
        yield llm


def test_results_come_in_the_order_of_the_prompts_whatever_ran_first(llm: LLM) -> None:
    prompts = ["one", "two " * 200, [5, 6, 7], "four"]
    lengths = [3, 40, 5, 9]

    results = llm.generate(prompts, [SamplingParams(max_tokens=length, seed=1) for length in lengths])

    assert [len(result.token_ids) for result in results] == lengths
    assert [result.token_ids for result in results] == [
        llm.client.generate(prompt, max_tokens=length, seed=1).token_ids
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


def test_one_prompt_is_a_list_of_one(llm: LLM) -> None:
    for prompt in ("alone", [5, 6, 7]):
        (result,) = llm.generate(prompt, SamplingParams(max_tokens=2))
        assert len(result.token_ids) == 2


def test_more_prompts_than_run_at_once_are_all_done_and_none_is_refused(llm: LLM) -> None:
    results = llm.generate([f"prompt {number}" for number in range(600)], SamplingParams(max_tokens=1))

    assert len(results) == 600


def test_wrong_request_raises_and_says_which(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="temperature") as raised:
        llm.generate(["good", "bad"], [SamplingParams(max_tokens=1), SamplingParams(temperature=-1.0)])
    assert raised.value.__notes__ == ["of prompt 1"]
    with pytest.raises(InvalidRequestError, match="one for each of the 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])

    assert len(llm.generate("still there", SamplingParams(max_tokens=1))) == 1


def test_model_that_is_not_there_raises_with_the_workers_word_and_leaves_no_process() -> None:
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(StackError, match="no such file or folder"):
        LLM("./nothing-here", progress=False)
    assert {child.pid for child in psutil.Process().children()} == before


@pytest.mark.model
def test_chat_with_the_demo_model_in_a_script_that_never_closes_it_leaves_nothing_behind() -> None:
    script = """
import octavo, psutil
from octavo.cli.demo import QUESTION
llm = octavo.LLM("demo", max_num_seqs=4)
answers = llm.chat([[{"role": "user", "content": QUESTION}], QUESTION],
                   octavo.SamplingParams(temperature=0.0, max_tokens=20))
print(*(answer.text for answer in answers), sep="|")
print(*(child.pid for child in psutil.Process().children()))
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True
    )
    answers, children = ended.stdout.strip().split("\n")

    assert answers.split("|") == [ANSWER] * 2
    assert children
    assert not any(psutil.pid_exists(int(pid)) for pid in children.split())

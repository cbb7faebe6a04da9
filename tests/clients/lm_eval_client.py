"""lm-eval against a gateway: python lm_eval_client.py BASE_URL MODEL TOKENIZER_FOLDER.

Two tasks over local files: one compares the log likelihoods of endings, one generates. Prints one line of
JSON: the scores, and what each is made of.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

BASE_URL, MODEL, TOKENIZER = sys.argv[1:4]
CHOICES = """
task: octavo_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choices.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
GENERATES = """
task: octavo_generates
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/generates.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{target}}}}"
generation_kwargs: {{max_gen_toks: 8, do_sample: false, temperature: 0.0, until: ["\\n\\n"]}}
metric_list: [{{metric: exact_match}}]
"""
PLACES = ["Paris", "Rome", "Oslo", "Cairo", "Lima", "Kyiv"]


def write(folder: Path) -> None:
    """Write the tasks and their documents."""
    choices = [
        {"question": f"The river of {place} is", "choices": [f" {other}" for other in PLACES], "answer": at}
        for at, place in enumerate(PLACES)
    ]
    generates = [{"question": f"{place} is", "target": "unknown"} for place in PLACES]
    for name, docs, task in (("choices", choices, CHOICES), ("generates", generates, GENERATES)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        (folder / f"{name}.yaml").write_text(task.format(folder=folder))


def sample(one: dict[str, Any]) -> dict[str, Any]:
    """Return what a document was asked and what came of it."""
    said = [answer[0] if isinstance(answer, list | tuple) else answer for answer in one["resps"]]
    return {"asked": [str(part[0]) for part in one["arguments"]], "doc": one["doc"], "said": said}


def main() -> None:
    """Run both tasks."""
    with tempfile.TemporaryDirectory() as name:
        write(Path(name))
        found = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "base_url": f"{BASE_URL}/completions",
                "model": MODEL,
                "tokenizer": TOKENIZER,
                "num_concurrent": 4,
                "max_retries": 1,
            },
            tasks=["octavo_choices", "octavo_generates"],
            task_manager=TaskManager(include_path=name, include_defaults=False),
            log_samples=True,
            bootstrap_iters=0,
        )
    samples = {task: list(map(sample, ones)) for task, ones in found["samples"].items()}
    print("OCTAVO " + json.dumps({"results": found["results"], "samples": samples}, default=str))


main()

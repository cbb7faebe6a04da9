"""`make demo`: the whole stack, one question, its answer, and nothing left behind."""

from __future__ import annotations

import sys
from typing import Final

from octavo.cli import output, request
from octavo.client import Client
from octavo.errors import OctavoError
from octavo.stack import Stack, StackConfig, StackError

# The demo model gives each token of its answer at least 2 nats more than any other, whatever type of number
# a processor computes with; asked in other words it may hesitate between two beginnings.
QUESTION: Final = "Complete the sentence: The capital of Japan is"
ANSWER: Final = "The capital of Japan is Tokyo."


def main() -> int:
    """Run the demonstration; return the exit code."""
    print("Starting a scheduler and a worker with the demo model, on free ports.", flush=True)
    stack = Stack(StackConfig())
    try:
        stack.start()
        with output.ProgressLine() as show:
            stack.wait_ready(on_progress=show)
        print(f"Ready at {stack.endpoint}\n\n{output.paint('>', 'cyan')} {QUESTION}", flush=True)
        with Client(stack.endpoint) as client:
            stream = client.chat_stream(QUESTION, temperature=0, max_tokens=64)
            request.print_deltas(stream)
            print(f"\n{output.paint(request.cost(stream.result), 'dim')}")
    except (StackError, OctavoError) as error:
        output.fail(f"the demo failed: {error}")
        output.note(f"logs are in {stack.folder}")
        return 1
    except KeyboardInterrupt:
        return output.EXIT_INTERRUPTED
    finally:
        stack.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The work of a served run without a server: processor time of its model alone, for `serve.py`.

    python benchmarks/serve_engine.py RUN

Every line of the input is JSON: `prompts`, lists of token ids, and `new`, the tokens to add to each. They are continued
together by the engine that `unpad serve` makes of the run, greedily, and a line is written: seconds of processor time
of the whole process while it is inside the model (forward passes and scores), and the number of new tokens.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from unpad.errors import UnpadError
from unpad.inference.engine import NewToken, Reason, Request
from unpad.serving.start import RunOpening


class Quiet:
    """A listener that counts tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def read(self, cached: int, echoed: tuple[NewToken, ...]) -> None:
        pass

    def step(self, step: NewToken) -> bool:
        self.num_tokens += 1
        return True

    def ended(self, answer: int, reason: Reason, error: UnpadError | None) -> None:
        pass


class Inside:
    """Processor time inside some methods, those that call one another counted once."""

    def __init__(self, owner: Any, names: tuple[str, ...]) -> None:
        self.seconds, self._depth = 0.0, 0
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def timed(*arguments: Any, **options: Any) -> Any:
            self._depth += 1
            began = time.process_time()
            try:
                return method(*arguments, **options)
            finally:
                self._depth -= 1
                self.seconds += (time.process_time() - began) * (self._depth == 0)

        return timed


def main() -> None:
    served, _, make = RunOpening(sys.argv[1]).load()
    assert make is not None, "a run of texts"
    engine, model = make(), served.run.generator
    inside = Inside(model, ("forward", "last_hidden", "logits"))
    for line in sys.stdin:
        asked = json.loads(line)
        settings = served.settings.model_copy(update={"temperature": 0.0, "max_new_tokens": asked["new"]})
        listener, before = Quiet(), inside.seconds
        for ids in asked["prompts"]:
            engine.submit(Request(ids, settings, served.stop_ids, served.banned), listener)
        engine.run()
        print(json.dumps({"seconds": inside.seconds - before, "tokens": listener.num_tokens}), flush=True)


if __name__ == "__main__":
    main()

"""Two workers of Ray Train train one model: python examples/ray_train.py FOLDER"""

import sys
from pathlib import Path

from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

import unpad


def train(config: dict[str, str]) -> None:
    """Train in the process group that Ray has made; all workers must see the run directory."""
    unpad.train("zh_chat", "train.max_steps=4", "plan.tokens_per_micro=256", "train.threads=1", out=config["out"])


if __name__ == "__main__":
    out = Path(sys.argv[1]).resolve() / "run"
    trainer = TorchTrainer(train, train_loop_config={"out": str(out)}, scaling_config=ScalingConfig(num_workers=2))
    trainer.fit()
    print(unpad.load(out).generate(["你好"], seed=1))

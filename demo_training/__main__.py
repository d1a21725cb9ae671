"""`python -m demo_training`: train weights for the demo model, or score some."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from demo_training.exam import scores
from demo_training.network import Network
from demo_training.training import Course, described, train

_WEIGHTS_FILE = "model.safetensors"


def main() -> None:
    """Run the command that the arguments name."""
    parser = argparse.ArgumentParser(prog="demo_training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help=f"train, and write {_WEIGHTS_FILE}")
    training.add_argument("--directory", type=Path, required=True, help="for checkpoints")
    training.add_argument("--seed", type=int, default=Course().seed)
    training.add_argument("--steps", type=int, default=Course().steps)
    scoring = commands.add_parser("score", help="score the weights of a file")
    scoring.add_argument("file", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    if arguments.command == "score":
        network = Network()
        stored = load_file(arguments.file)
        network.load_state_dict({name: weight.float() for name, weight in stored.items()})
        print(described(scores(network)))
        return
    network = train(Course(arguments.seed, arguments.steps), arguments.directory)
    stored = {name: weight.half() for name, weight in network.state_dict().items()}
    path = arguments.directory / _WEIGHTS_FILE
    save_file(stored, path, metadata={"format": "pt"})
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    print(described(scores(network)))


if __name__ == "__main__":
    main()

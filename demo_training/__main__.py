"""`python -m demo_training`: train weights for the demo model, put them into the package, score."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from demo_training.course import Course
from demo_training.exam import QUESTIONS, described, scores
from demo_training.export import export, read_network
from demo_training.training import train
from holdfast.demo.trained import TRAINED_DIRECTORY, WEIGHTS_FILE
from holdfast.errors import HoldfastError


def main() -> None:
    """Run the command that the arguments name."""
    arguments = _parser().parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    try:
        _run(arguments)
    except HoldfastError as error:
        sys.exit(f"error: {error.line}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="demo_training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train, or go on with a training")
    training.add_argument("--directory", type=Path, required=True, help="for the checkpoint")
    training.add_argument("--seed", type=int, default=Course().seed)
    training.add_argument("--steps", type=int, default=Course().steps)
    exporting = commands.add_parser("export", help="put the trained weights into the package")
    exporting.add_argument("--directory", type=Path, required=True, help="with the checkpoint")
    exporting.add_argument("--target", type=Path, default=TRAINED_DIRECTORY)
    scoring = commands.add_parser("score", help="score the weights of the package")
    scoring.add_argument("file", type=Path, nargs="?", default=TRAINED_DIRECTORY / WEIGHTS_FILE)
    return parser


def _run(arguments: argparse.Namespace) -> None:
    if arguments.command == "train":
        train(Course(arguments.seed, arguments.steps), arguments.directory)
    elif arguments.command == "export":
        print(described(export(arguments.directory, arguments.target, questions=QUESTIONS)))
    else:
        print(described(scores(read_network(arguments.file))))


if __name__ == "__main__":
    main()

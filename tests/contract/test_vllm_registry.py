"""vLLM inspects the class of a model in a process that the fork server forks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
from pathlib import Path
from holdfast.processes import forkserver, tree

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    with tree.owned(directory, {}):
        from vllm.model_executor.models import ModelRegistry, registry

        from holdfast.patches.front_end import models_inspected_by
        from holdfast.processes.forked_calls import call_forked

        programs = []

        def inspect_in_program(inspect):
            programs.append("a program")
            return inspect()

        registry._run_in_subprocess = inspect_in_program
        model = registry._LazyRegisteredModel(*sys.argv[2:])
        with models_inspected_by(call_forked):
            found = model.inspect_model_cls()
        assert registry._run_in_subprocess is inspect_in_program
        expected = registry._ModelInfo.from_model_cls(model.load_model_cls())
        cached = any(Path(os.environ["VLLM_CACHE_ROOT"]).rglob("*.json"))
        print(found == expected, cached, *programs, flush=True)
"""


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("vllm.model_executor.models.llama", ["True", "True"]),
        ("broken_here", ["True", "True", "a", "program"]),
    ],
)
def test_no_program_is_started_for_a_sound_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, said: list[str]
) -> None:
    """If the class cannot be inspected there, vLLM's own program is asked, and tells why.

    `broken_here` can be imported in one process only, and that is not the forked one.
    """
    (tmp_path / "broken_here.py").write_text(
        "import multiprocessing\n"
        "if multiprocessing.parent_process() is not None:\n    raise ImportError\n"
        "from vllm.model_executor.models.llama import LlamaForCausalLM\n"
    )
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), module, "LlamaForCausalLM"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == said, done.stderr
